"""The roads into a process: off means off, and nothing fails in silence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.settings import ENV, Settings

ROOT = Path(__file__).resolve().parents[2]
ON = "--enable-verify-graphs"

needs_sglang = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here"),
]


def python(code: str, *argv: str, env: dict[str, str] | None = None, **more: str) -> Any:
    """Run ``code`` in a fresh interpreter; what it printed last, as JSON, or its failure."""
    clean = {k: v for k, v in (env or os.environ).items() if k not in (ENV, "SGLANG_PLUGINS")}
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=clean | more,
        timeout=120,
    )
    if done.returncode:
        return done
    return json.loads(done.stdout.splitlines()[-1])


def sglang(code: str, *argv: str, **more: str) -> Any:
    """As ``python``, on the CPU engine."""
    from tests.engine.worker import engine_env

    return python(code, *argv, env=engine_env(), **more)


def message(done: Any) -> str:
    """The one line with which a process ended."""
    assert isinstance(done, subprocess.CompletedProcess), f"it went on: {done}"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[verify-graphs]")]
    assert done.stderr.rstrip().endswith(line)
    return line


# -- the road without plugins ----------------------------------------------------------------------


def has_pth() -> bool:
    try:
        files = distribution("sglang-verify-graphs").files or []
    except PackageNotFoundError:
        return False
    return any(str(file) == "sglang_verify_graphs.pth" for file in files)


needs_pth = pytest.mark.skipif(not has_pth(), reason="the package is not installed with pip")

_LOADED = "import json, sys; print(json.dumps('sglang_verify_graphs.bootstrap' in sys.modules))"


@needs_pth
def test_the_interpreter_starts_without_us() -> None:
    assert python(_LOADED) is False
    assert python(_LOADED, "--model-path", "m") is False


@needs_pth
@pytest.mark.parametrize("argv", [(), (ON,)])
def test_the_interpreter_starts_with_us(argv: tuple[str, ...]) -> None:
    more = {} if argv else {ENV: Settings().to_json()}
    assert python(_LOADED, *argv, **more) is True


@needs_pth
def test_starting_imports_nothing_heavy() -> None:
    code = (
        "import json, sys; print(json.dumps([m for m in ('torch', 'sglang') if m in sys.modules]))"
    )
    assert python(code, **{ENV: Settings().to_json()}) == []


# -- on SGLang itself ------------------------------------------------------------------------------

_TARGETS = """
import json, sys

def attributes():
    from sglang.srt import server_args
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from sglang.srt.speculative import eagle_worker_v2
    owners = (
        server_args.ServerArgs, scheduler.Scheduler, eagle_worker_v2.EAGLEWorkerV2,
        eagle_worker_v2.EagleDraftWorker, decode_cuda_graph_runner.DecodeCudaGraphRunner,
        pynccl.PyNcclCommunicator, batch_result_processor.SchedulerBatchResultProcessor,
        server_args, scheduler, eagle_worker_v2, decode_cuda_graph_runner,
    )
    return {f"{o.__name__}.{k}": v for o in owners for k, v in list(vars(o).items())}

def wrapped(found):
    code = {k: getattr(getattr(v, "__func__", v), "__code__", None) for k, v in found.items()}
    return sorted(k for k, c in code.items() if c and "sglang_verify_graphs" in c.co_filename)
"""

_OFF = (
    _TARGETS
    + """
before = attributes()
from sglang.srt.plugins import load_plugins
load_plugins()
after = attributes()
changed = sorted(k for k in before.keys() | after.keys() if before.get(k) is not after.get(k))
import sglang_verify_graphs
print(json.dumps({"changed": changed, "wrapped": wrapped(after),
                  "patched": sglang_verify_graphs.status()["patched"]}))
"""
)

_ROAD = (
    _TARGETS
    + """
found = wrapped(attributes())
import sglang_verify_graphs
status = sglang_verify_graphs.status()
kept = sglang_verify_graphs.disable()
print(json.dumps({"wrapped": found, "patched": status["patched"], "kept": kept,
                  "after": wrapped(attributes()), "state": status["state"]}))
"""
)

_LAUNCH = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
import sglang_verify_graphs
model = ["--model-path", sys.argv[2], "--port", "31999", "--device", "cpu"]
ends = []
for flags in (["--verify-graph-steps", "many", sys.argv[1]], ["--verify-graph-strict"]):
    try:
        prepare_server_args([*model, *flags])
    except SystemExit as error:
        ends.append(error.code)
arguments = prepare_server_args([*model, sys.argv[1], "--verify-graph-steps", "0,1"])
print(json.dumps({"ends": ends, "env": os.environ.get("SGLANG_VERIFY_GRAPHS"),
                  "patched": sglang_verify_graphs.status()["patched"], "port": arguments.port}))
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}


class TestOnSGLang:
    pytestmark = needs_sglang

    def test_off_means_off(self) -> None:
        """Installed, no flag: after SGLang loaded its plugins no attribute is another object."""
        assert sglang(_OFF) == {"changed": [], "wrapped": [], "patched": []}

    @needs_pth
    def test_without_plugins_the_wrappers_are_in_place_and_come_off(self) -> None:
        got = sglang(_ROAD, **{ENV: Settings().to_json()})
        assert got == {
            "wrapped": [
                "PyNcclCommunicator.__init__",
                "Scheduler.get_internal_state",
                "Scheduler.init_all_cuda_graphs",
                "Scheduler.set_internal_state",
                "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            ],
            "patched": [
                "sglang.srt.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__",
                "sglang.srt.managers.scheduler:Scheduler.get_internal_state",
                "sglang.srt.managers.scheduler:Scheduler.init_all_cuda_graphs",
                "sglang.srt.managers.scheduler:Scheduler.set_internal_state",
                "sglang.srt.managers.scheduler_components.batch_result_processor:"
                "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            ],
            "kept": [],
            "after": [],
            "state": "off",
        }

    @needs_pth
    def test_a_whitelist_without_us(self) -> None:
        done = sglang("import sglang.srt.server_args", ON, SGLANG_PLUGINS="other")
        line = message(done)
        assert "SGLANG_PLUGINS='other'" in line
        assert "SGLANG_PLUGINS=other,verify_graphs" in line

    def test_a_broken_environment_variable(self) -> None:
        code = "from sglang.srt.plugins import load_plugins; load_plugins()"
        line = message(sglang(code, **{ENV: "{broken"}))
        assert "SGLANG_VERIFY_GRAPHS='{broken' is not JSON" in line
        assert ON in line

    @pytest.mark.parametrize("carried", [{}, {ENV: "{}"}], ids=["flags", "flags over environment"])
    def test_flags_in_the_launcher(self, tmp_path: Path, carried: dict[str, str]) -> None:
        """A bad one ends with its line; good ones go to the workers, and the wrappers go away."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        got = sglang(_LAUNCH, ON, str(tmp_path), **carried)
        assert not isinstance(got, subprocess.CompletedProcess), got.stderr[-2000:]
        many, lonely = got["ends"]
        assert "--verify-graph-steps 'many'" in many
        assert f"add {ON}" in lonely
        assert got["env"] == Settings(steps=(0, 1), nccl_shell=()).to_json()
        assert got["port"] == 31999
        assert not any("ServerArgs" in target for target in got["patched"])
