"""Two TP ranks behind `launch_server`, steps changing every round: real spawn, over HTTP."""

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
    settings = {"SGLANG_VERIFY_GRAPHS": json.dumps({"script": [2, 0, 1]})}
    started = Server(arguments, tmp_path_factory.mktemp("server") / "log.txt", settings)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def test_both_ranks_are_attested_and_serve(server: Server, pair: dict[str, str]) -> None:
    prompts = random_prompts(4)
    sampling = {"max_new_tokens": 24, "temperature": 0}
    answers = server.ask("/generate", {"input_ids": prompts, "sampling_params": sampling})
    plain = run("plain", {"target": pair["target"]}, prompts=prompts, max_new_tokens=24)
    assert [answer["output_ids"] for answer in answers] == plain
    report = server.ask("/server_info")["internal_states"][0]["verify_graphs"]
    assert (report["state"], report["ranks"]) == ("active", 2)
    assert {bucket.split("x")[1] for bucket in report["buckets"]} == {"0", "1", "2"}
    verify = report["phases"]["verify"]
    assert verify["eager"] == 0
    assert verify["replayed"] == report["rounds"] > 0


def test_one_table_at_start_up(server: Server) -> None:
    lines = [line for line in server.log.splitlines() if "[verify-graphs]" in line]
    assert sum("active on 2 rank(s)" in line for line in lines) == 1
    assert len(lines) == 5, lines
