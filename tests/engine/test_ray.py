"""Scheduler actors of a real Ray cluster: stock loses environment and plugins, ours does not.

The cluster starts before the driver has any of it, as a cluster does: a raylet that the driver
itself starts would have its environment. Ray sees two GPUs that are not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_server import BIND, STARTUP_SECONDS, two_ranks
from tests.engine.worker import ROOT, engine_env

RAY = ROOT / ".cache" / "ray"
"""Where `ci/env.sh` puts Ray, which no other test needs."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("ray") is None and not RAY.is_dir(), reason="Ray is not installed: ci/env.sh does"
    ),
]


def ray_env() -> dict[str, str]:
    """What raylet and driver share: no NCCL variable, and no word of which GPUs are there."""
    env = engine_env() | {"SGLANG_CPU_OMP_THREADS_BIND": BIND, "RAY_USAGE_STATS_ENABLED": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(RAY), env["PYTHONPATH"]])
    left_out = ("NCCL_", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in env.items() if not name.startswith(left_out)}


def free_ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [str(probe.getsockname()[1]) for probe in probes]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of one node."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets allow no long path
    # With fixed ports the raylet does not wait for those of its agents, which a slow machine is
    # late with.
    names = ("", "dashboard-agent-grpc-", "dashboard-agent-listen-", "runtime-env-agent-")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [word for name, port in ports.items() for word in (f"--{name}port", port)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-gpus", "2"]
    command += ["--num-cpus", "4", "--include-dashboard", "false", "--temp-dir", str(folder)]
    try:
        subprocess.run([*command, *flags], check=True, env=ray_env(), cwd=ROOT, timeout=300)
        yield f"127.0.0.1:{ports['']}"
    finally:
        for process in Path("/proc").glob("[0-9]*"):  # `ray stop` would end every cluster here
            with contextlib.suppress(OSError):
                if str(folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def launch(cluster: str, target: str, *flags: str) -> dict[str, Any]:
    """What driver and actors had, of SGLang's own launcher."""
    arguments = [*two_ranks(target), "--use-ray", "--disable-cuda-graph", *flags]
    with tempfile.TemporaryFile("w+") as log:  # a pipe would stay open in SGLang's children
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.ray_driver", *arguments],
            env=ray_env()
            | {"RAY_ADDRESS": cluster, "NCCL_PROTO": "LL", "NCCL_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            driver.wait(timeout=STARTUP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        log.seek(0)
        text = log.read()
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert lines, text[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    assert [actor["scheduler"] for actor in found["actors"]] == ["Scheduler"] * 2
    return found


def test_stock_loses_both(cluster: str, pair: dict[str, str]) -> None:
    found = launch(cluster, pair["target"], "--attention-backend", "torch_native")
    assert found["driver"]["NCCL_PROTO"] == "LL"
    assert found["driver"]["NCCL_CUMEM_ENABLE"] == "0"  # by SGLang, for its workers
    for actor in found["actors"]:
        assert actor["environ"] == {}
        assert actor["plugins"] is False


def test_ours_loses_neither(cluster: str, pair: dict[str, str]) -> None:
    """Case 17."""
    found = launch(
        cluster, pair["target"], "--enable-verify-graphs", "--nccl-env", "NCCL_ALGO=Ring"
    )
    for actor in found["actors"]:
        assert actor["environ"] == {
            "NCCL_PROTO": "LL",
            "NCCL_ALGO": "Ring",
            "NCCL_CUMEM_ENABLE": found["driver"]["NCCL_CUMEM_ENABLE"],
            "NCCL_NVLS_ENABLE": found["driver"]["NCCL_NVLS_ENABLE"],
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
            **{k: v for k, v in found["driver"].items() if k == "NCCL_GRAPH_REGISTER"},
        }
        assert actor["plugins"] is True
        assert any("init_all_cuda_graphs" in target for target in actor["patched"])
        assert actor["nccl"]["problems"] == []
        for number, rank in enumerate(actor["nccl"]["ranks"]):
            assert rank["rank"] == number
            sources = {name: one["source"] for name, one in rank["variables"].items()}
            assert sources["NCCL_PROTO"] == "shell"
            assert sources["NCCL_ALGO"] == "flag"
            assert sources["NCCL_CUMEM_ENABLE"] == "SGLang"
