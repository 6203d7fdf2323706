"""Two TP ranks behind `launch_server`, under the policy and live control: real spawn, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.cli import main
from sglang_verify_graphs.policy import PERIOD
from tests.engine.scenarios import random_prompts
from tests.engine.worker import ROOT, engine_env
from tests.engine.worker import run_plugin as run

pytestmark = pytest.mark.engine

STARTUP_SECONDS = 600
BIND = f"0|{min(1, len(os.sched_getaffinity(0)) - 1)}"
"""A core for each rank; SGLang asks for it where ranks outnumber NUMA nodes."""


class Server:
    """A server process group and its address."""

    def __init__(self, arguments: list[str], log: Path, more: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = log
        env = engine_env(graphs=True) | {"SGLANG_CPU_OMP_THREADS_BIND": BIND} | more
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "sglang.launch_server",
                    "--port",
                    str(self.port),
                    *arguments,
                ],
                cwd=ROOT,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log[-4000:]
            try:
                self.ask("/health_generate")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"the server did not start\n{self.log[-4000:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def two_ranks(target: str) -> list[str]:
    """Arguments that serve a model on two TP ranks."""
    flags = {
        "--device": "cpu",
        "--tp": "2",
        "--dtype": "float32",
        "--model-path": target,
        "--attention-backend": "intel_amx",
        "--mem-fraction-static": "0.2",
        "--max-total-tokens": "2048",
        "--max-running-requests": "6",
        "--grammar-backend": "none",
    }
    words = [word for flag in flags.items() for word in flag]
    return [*words, "--skip-tokenizer-init", "--sleep-on-idle"]


@pytest.fixture(scope="module")
def server(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": pair["draft"],
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3",
    }
    arguments = two_ranks(pair["target"]) + [word for flag in flags.items() for word in flag]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    started = Server([*arguments, "--enable-verify-graphs", "--enable-metrics"], log, {})
    try:
        started.wait()
        yield started
    finally:
        started.stop()


PROMPTS = random_prompts(4)


@pytest.fixture(scope="module")
def plain(pair: dict[str, str]) -> Any:
    """Tokens of the target alone, in one process."""
    return run("plain", {"target": pair["target"]}, prompts=PROMPTS, max_new_tokens=24)


def tokens(server: Server) -> list[list[int]]:
    sampling = {"max_new_tokens": 24, "temperature": 0}
    answers = server.ask("/generate", {"input_ids": PROMPTS, "sampling_params": sampling})
    return [answer["output_ids"] for answer in answers]


def report_of(server: Server) -> dict[str, Any]:
    report: dict[str, Any] = server.ask("/server_info")["internal_states"][0]["verify_graphs"]
    return report


def test_both_ranks_are_attested_and_serve(server: Server, plain: Any) -> None:
    for _ in range(3):  # tables of rank 0 reach the other one every few rounds
        assert tokens(server) == plain
    report = report_of(server)
    assert (report["state"], report["ranks"], report["control"]) == ("active", 2, "policy")
    verify = report["phases"]["verify"]
    assert verify["eager"] == 0
    assert verify["replayed"] == report["rounds"] > 2 * PERIOD


def test_metrics_say_what_the_server_says(server: Server) -> None:
    report = report_of(server)  # which publishes first
    address = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    ours = [line for line in lines if line.startswith("sglang:verify_graph_")]
    assert all('tp_rank="0"' in line and "model_name=" in line for line in ours)

    def total(name: str, label: str = "") -> float:
        found = [line for line in ours if line.startswith(f"sglang:verify_graph_{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if label in line)

    assert total("rounds_total") == report["rounds"] > 0
    for phase, counted in report["phases"].items():
        assert total("replays_total", f'phase="{phase}"') == counted["replayed"]
        assert total("eager_total", f'phase="{phase}"') == counted["eager"]
    assert total("accepted_drafts_total", 'position="1"') == report["accepted_by_position"][0]
    assert total("capture_seconds") > 0


def test_one_table_at_start_up(server: Server) -> None:
    lines = [line for line in server.log.splitlines() if "[verify-graphs]" in line]
    assert sum("active on 2 rank(s)" in line for line in lines) == 1
    assert len(lines) == 5, lines


def control(server: Server, *action: str) -> int:
    return main(["control", f"http://127.0.0.1:{server.port}", *action])


def rounds_by_steps(report: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for bucket, count in report["buckets"].items():
        steps = bucket.split("x")[1]
        found[steps] = found.get(steps, 0) + count
    return found


@pytest.mark.parametrize("steps", ["0", "1", "2"])
def test_pinned_steps_reach_both_ranks(server: Server, plain: Any, steps: str) -> None:
    assert control(server, "pin", steps) == 0
    before = rounds_by_steps(report_of(server))
    assert tokens(server) == plain
    after = rounds_by_steps(report_of(server))
    assert {k for k in after if after[k] > before.get(k, 0)} == {steps}


def test_the_kill_switch_and_back(server: Server, plain: Any) -> None:
    assert control(server, "off") == 0
    before = report_of(server)["buckets"]
    assert tokens(server) == plain
    assert report_of(server)["buckets"] == before
    assert control(server, "pin", "7") == 1
    assert report_of(server)["control"] == "off"
    assert control(server, "cold-zero", "on") == 0
    assert control(server, "policy") == 0
    assert tokens(server) == plain
    assert report_of(server)["buckets"] != before
