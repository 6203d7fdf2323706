"""``calibrate`` against a process with the interface of a server; tests/engine has a real one."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.cli import main
from sglang_verify_graphs.cli.calibrate import write_whole
from sglang_verify_graphs.cli.measure import Limits, Unreachable, buckets_of
from sglang_verify_graphs.costs import PLAIN_DECODE, CostKey, CostRow, CostTable
from sglang_verify_graphs.errors import CostsError
from tests.unit import fake_server

KEY = CostKey(**fake_server.KEY)  # type: ignore[arg-type]
PLAN = {"2": [1, 2], "0": [1, 2]}
STEPS = (PLAIN_DECODE, 0, 2)
ROWS = {(b, k): fake_server.cost(b, k) for b in (1, 2) for k in STEPS}


class Bench:
    """A folder with the fake in SGLang's place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = folder / "path" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(Path(fake_server.__file__).read_text())
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        self._monkeypatch = monkeypatch
        self.out, self._asked, self._pids = (folder / n for n in ("costs.json", "asked", "pids"))
        self.server()

    def server(self, **settings: Any) -> None:
        standard = {
            "state": "active", "plan": PLAN, "batches": [1, 2], "replicas": 1, "runs": 99,
            "max_running": 8, "kv": 100_000, "round_ms": 2.0, "asked": str(self._asked),
            "pids": str(self._pids),
        }  # fmt: skip
        self._monkeypatch.setenv("FAKE", json.dumps(standard | settings))

    def run(self, *flags: str, server: tuple[str, ...] = ()) -> int:
        return main(["calibrate", "--out", str(self.out), *flags, "--", *server])

    @property
    def rows(self) -> dict[tuple[int, int], float]:
        table = CostTable.from_json(self.out.read_text())
        assert table.key == KEY
        return {(row.batch, row.draft_steps): row.ms for row in table.rows}

    def asked(self, path: str) -> list[Any]:
        lines = self._asked.read_text().splitlines() if self._asked.exists() else []
        return [body for asked, body in map(json.loads, lines) if asked == path]

    def ended(self) -> bool:
        """Whether no process of it is left, a moment after it was told to end."""
        pids, deadline = json.loads(self._pids.read_text()), time.monotonic() + 10
        while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_every_bucket_is_measured_at_its_own_batch_and_steps(bench: Bench) -> None:
    assert bench.run("--prompt-tokens", "7", server=("--api-key", "secret")) == 0
    assert bench.rows == ROWS
    loads = bench.asked("/generate")
    assert [len(load["input_ids"]) for load in loads] == [2, 2, 2, 1, 1, 1]
    assert all(len(prompt) == 7 for load in loads for prompt in load["input_ids"])
    assert loads[0]["input_ids"] == loads[2]["input_ids"]
    assert all(load["sampling_params"]["ignore_eos"] for load in loads)
    assert bench.ended()
    assert not bench.out.with_name("costs.json.part").exists()


def test_resumes_with_what_is_there(bench: Bench) -> None:
    odd = CostRow(2, 0, 5.0, 4.0, 6.0, 32)
    bench.out.write_text(CostTable(KEY, (odd,)).to_json())
    assert bench.run() == 0
    assert bench.rows == ROWS | {(2, 0): 5.0}
    assert len(bench.asked("/generate")) == 5
    assert bench.run() == 0
    assert len(bench.asked("/generate")) == 5


@pytest.mark.parametrize("text", ["no table", CostTable(replace(KEY, gpu="other"), ()).to_json()])
def test_a_file_of_another_server_is_left(
    bench: Bench, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.out.write_text(text)
    assert bench.run() == 1
    assert bench.out.read_text() == text
    said = capsys.readouterr().err
    assert "left as it is, give another --out" in said
    assert ("gpu 'other', here 'cpu'" in said) == text.startswith("{")
    assert not bench.asked("/generate")


def test_a_batch_that_cannot_be_reached_is_named_and_left_out(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"2": [1, 2, 4, 16], "0": [1, 2, 4, 16]}
    bench.server(plan=plan, batches=[1, 2, 4, 16], kv=1600)
    assert bench.run() == 0
    assert bench.rows == ROWS
    said = capsys.readouterr().err
    assert "batch 16 is left out: the server runs 8 requests at most" in said
    assert "batch 4 is left out: prompts of 512 tokens leave room for 0 more each" in said
    assert bench.run("--prompt-tokens", "8") == 0
    assert {batch for batch, _ in bench.rows} == {1, 2, 4}


def test_requests_that_never_run_together_or_end_early(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_verify_graphs.cli.measure._STALL_SECONDS", 0.3)
    bench.server(runs=1)
    assert bench.run() == 0
    assert {batch for batch, _ in bench.rows} == {1}
    assert "batch 2 is left out: not all requests ran together" in capsys.readouterr().err
    bench.out.unlink()
    bench.server(ends_after=9)
    assert bench.run() == 1
    assert "ended after" in capsys.readouterr().err


def test_a_server_that_ends_shows_its_last_words(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.server(dies="no such model")
    assert bench.run() == 1
    said = capsys.readouterr().err
    assert "ended with status 3" in said
    assert said.rstrip().endswith("no such model")
    assert "costs.server.log" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state": "off"}, "not active but off: for a reason"),
        ({"plan": {"2": [1, 2]}}, "captured one step count"),
        ({"replicas": 2}, "leave --dp-size out"),
    ],
)
def test_a_server_without_a_choice_is_refused(
    bench: Bench, settings: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.server(**settings)
    assert bench.run() == 1
    assert message in capsys.readouterr().err
    assert not bench.out.exists()
    assert bench.ended()


def test_stops_at_the_time_budget(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    done = CostTable(KEY, (CostRow(2, -1, 5.0, 4.0, 6.0, 32),))
    bench.out.write_text(done.to_json())
    bench.server(round_ms=1e6)
    assert bench.run("--minutes", "0.03") == 0
    assert bench.rows == {(2, -1): 5.0}
    assert "out of time" in capsys.readouterr().err
    assert bench.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_leaves_a_table_and_no_process(bench: Bench, number: int) -> None:
    bench.server(round_ms=20.0)
    command = "import sys; from sglang_verify_graphs.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "calibrate", "--out", str(bench.out), "--"],
        stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], os.getcwd()])},
    )  # fmt: skip
    while not bench.out.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert bench.rows.items() <= ROWS.items()
    assert 0 < len(bench.rows) < len(ROWS)
    assert bench.ended()


def test_a_port_in_use_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert bench.run(server=("--port", str(port))) == 1
    assert f"port {port} cannot be used" in capsys.readouterr().err
    assert bench.run(server=(f"--port={port}",)) == 0
    assert bench.rows == ROWS


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_whole(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(CostsError, match="it is as it was") as caught:
            write_whole(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_buckets_of_a_cut_plan() -> None:
    """A width that lost its largest batches, one that lost all, and a batch that no graph holds."""
    plan = {"3": [1, 2, 4], "1": [1, 2], "0": []}
    found = buckets_of(plan, [1, 2, 4, 6])
    assert list(found) == [6, 4, 2, 1]
    assert found == {6: (1, 3), 4: (3,), 2: (1, 3), 1: (1, 3)}
    assert buckets_of({"1": [1], "0": [1]}, [1]) == {1: (PLAIN_DECODE, 0, 1)}


def test_requests_are_as_long_as_context_and_kv_cache_allow() -> None:
    limits = Limits(running=8, kv_tokens=8000, input_tokens=700, page=1)
    assert limits.new_tokens(2, 100, 1) == 599  # the context ends first
    assert replace(limits, kv_tokens=4000).new_tokens(8, 100, 1) == 500 - 9 - 100
    assert replace(limits, kv_tokens=10**6, input_tokens=10**6).new_tokens(2, 100, 1) == 1024
    with pytest.raises(Unreachable, match="lower --prompt-tokens"):
        limits.new_tokens(8, 900, 1)
