"""NCCL variables on two TP ranks behind `launch_server`; a recorder stands in for the library.

A server is stopped before the next one starts: idle, its schedulers keep two cores busy.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.test_server import STARTUP_SECONDS, Server, two_ranks
from tests.engine.worker import ROOT, STANDINS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the recorder with"),
]
ON = "--enable-verify-graphs"


class Call(NamedTuple):
    """One call of a rank into the recorder, and the NCCL variables at that moment."""

    pid: str
    name: str
    environ: dict[str, str]


class Recorded(Server):
    """A server whose NCCL is the recorder."""

    def __init__(
        self, arguments: list[str], folder: Path, plan: dict[str, Any], shell: dict[str, str]
    ) -> None:
        library, self._record = folder / "libnccl.so.2", folder / "record"
        source = STANDINS / "nccl_recorder.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
        mine = {
            "CPU_ENGINE_NCCL": json.dumps(plan),
            "SGLANG_NCCL_SO_PATH": str(library),
            "NCCL_RECORD": str(self._record),
        }
        super().__init__(arguments, folder / "log.txt", mine | shell)

    def calls(self, *names: str) -> list[Call]:
        """Of these entry points, in order; all ranks."""
        found = []
        for line in self._record.read_text().splitlines():
            head, *pairs = line.split("\t")
            pid, name = head.split()
            environ = dict(pair.split("=", 1) for pair in pairs)
            found.append(Call(pid, name, environ))
        return [call for call in found if not names or call.name in names]

    def nccl(self) -> dict[str, Any]:
        """What `/server_info` shows."""
        state = self.ask("/server_info")["internal_states"][0]["verify_graphs"]
        found: dict[str, Any] = state["nccl"]
        return found

    def ranks(self) -> subprocess.CompletedProcess[str]:
        """The command."""
        code = "import sys; from sglang_verify_graphs.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "ranks", f"http://127.0.0.1:{self.port}"]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="class")
def tuned(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """No speculation, so no verify graphs: users without EAGLE get NCCL alone."""
    arguments = [
        *two_ranks(pair["target"]), ON,
        "--nccl-env", "NCCL_ALGO=Ring", "--nccl-profile", "no-ll128",
    ]  # fmt: skip
    shell = {"NCCL_ALGO": "Tree", "NCCL_IB_TIMEOUT": "22"}
    started = Recorded(arguments, tmp_path_factory.mktemp("tuned"), {}, shell)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


class TestTuned:
    def test_the_environment_is_there_before_the_first_communicator(self, tuned: Recorded) -> None:
        first = tuned.calls("ncclCommInitRank", "ncclCommInitRankConfig")
        assert len({call.pid for call in first}) == 2
        for call in first:
            assert call.environ["NCCL_ALGO"] == "Ring"
            assert call.environ["NCCL_PROTO"] == "^LL128"
            assert call.environ["NCCL_IB_TIMEOUT"] == "22"

    def test_every_rank_proves_it(self, tuned: Recorded) -> None:
        report = tuned.nccl()
        assert report["problems"] == []
        assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
        for rank in report["ranks"]:
            assert (rank["world_size"], rank["nccl_version"]) == (2, "2.27.3")
            assert rank["library"].endswith("libnccl.so.2")
            algorithm, protocol = rank["variables"]["NCCL_ALGO"], rank["variables"]["NCCL_PROTO"]
            assert (algorithm["requested"], algorithm["effective"]) == ("Ring", "Ring")
            assert (algorithm["source"], protocol["source"]) == ("flag", "profile no-ll128")
            for one in (algorithm, protocol):
                assert (one["read_by_nccl"], one["in_use"]) == (True, True), one
            assert rank["variables"]["NCCL_IB_TIMEOUT"]["source"] == "shell"
            assert rank["variables"]["NCCL_CUMEM_ENABLE"]["source"] == "SGLang"
        done = tuned.ranks()
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [line for line in tuned.log.splitlines() if "[verify-graphs] NCCL 2.27.3" in line]
        assert "NCCL_ALGO=Ring (flag): in use" in line

    def test_nccl_stops_writing_its_log(self, tuned: Recorded) -> None:
        for pid in {call.pid for call in tuned.calls("ncclCommInitRank")}:
            calls = [call for call in tuned.calls() if call.pid == pid]
            path = next(
                c.environ["NCCL_DEBUG_FILE"] for c in calls if "NCCL_DEBUG_FILE" in c.environ
            )
            assert not Path(path).parent.exists()
            reset = [call for call in calls if call.name == "ncclResetDebugInit"]
            assert reset
            assert "NCCL_DEBUG" not in reset[0].environ


@pytest.fixture(scope="class")
def broken(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """SGLang overwrites, rank 0 writes late, rank 1 has a value of its own."""
    arguments = [
        *two_ranks(pair["target"]), ON, "--verify-graph-observe", "--enable-nccl-nvls",
        "--nccl-env", "NCCL_NVLS_ENABLE=0", "CUDA_DEVICE_MAX_CONNECTIONS=1",
    ]  # fmt: skip
    plan = {
        "late": {"0": {"NCCL_NTHREADS": "256"}},
        "early": {"1": {"NCCL_BUFFSIZE": "1048576"}},
    }
    started = Recorded(arguments, tmp_path_factory.mktemp("broken"), plan, {})
    try:
        started.wait()
        yield started
    finally:
        started.stop()


class TestBroken:
    def test_an_override_a_late_write_and_a_differing_rank_are_each_named(
        self, broken: Recorded
    ) -> None:
        report = broken.nccl()
        first, second = (rank["variables"] for rank in report["ranks"])
        for name, asked, has in (
            ("NCCL_NVLS_ENABLE", "0", "1"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8"),
        ):
            for variables in (first, second):
                one = variables[name]
                assert (one["requested"], one["effective"]) == (asked, has)
                assert one["status"].startswith("overridden by SGLang"), one
        assert first["NCCL_NTHREADS"]["status"] == "set, ignored: communicator already up"
        assert "NCCL_BUFFSIZE" not in first
        assert second["NCCL_BUFFSIZE"]["effective"] == "1048576"
        said = "\n".join(report["problems"])
        for name in ("NVLS_ENABLE", "MAX_CONNECTIONS", "NCCL_NTHREADS", "NCCL_BUFFSIZE differs"):
            assert name in said
            assert name in broken.log
        done = broken.ranks()
        assert done.returncode == 1
        assert "NCCL_BUFFSIZE" in done.stdout


def test_a_rank_without_the_plugin_is_named_and_nobody_hangs(
    pair: dict[str, str], tmp_path: Path
) -> None:
    plan = {"absent": {"1": True}}
    server = Recorded([*two_ranks(pair["target"]), ON], tmp_path, plan, {})
    try:
        deadline = time.monotonic() + STARTUP_SECONDS
        while "did not come within" not in server.log:
            assert time.monotonic() < deadline, server.log[-4000:]
            time.sleep(0.5)
    finally:
        server.stop()
    assert "rank 1 did not come within 3 s: it runs without --enable-verify-graphs" in server.log


@pytest.mark.parametrize(
    ("words", "shell", "said"),
    [
        (["--nccl-env", "NCCL_PROTO=LL128"], {}, "data may be corrupted"),
        ([], {"NCCL_PROTO": "allreduce:LL128"}, "data may be corrupted"),
        (["--nccl-env", "PATH=/x"], {}, "'PATH' is no NCCL variable"),
    ],
)
def test_what_is_refused_ends_the_launcher_with_one_line(
    words: list[str], shell: dict[str, str], said: str, pair: dict[str, str], tmp_path: Path
) -> None:
    server = Server([*two_ranks(pair["target"]), ON, *words], tmp_path / "log", shell)
    try:
        assert server._process.wait(timeout=STARTUP_SECONDS) == 1
    finally:
        if server._process.poll() is None:
            server.stop()
    assert server.log.rstrip().splitlines()[-1].startswith("[verify-graphs] ")
    assert said in server.log
    assert "Traceback" not in server.log
