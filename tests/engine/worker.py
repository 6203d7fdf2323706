"""Run a scenario in a process of its own: `run_scenario("tests.engine.scenarios:serve", ...)`.

A scenario is a function of JSON-able keyword arguments that returns something JSON-able.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STANDINS = HERE / "standins"


class ScenarioFailed(AssertionError):
    """Carries the output of the process."""


def engine_env(*, graphs: bool = False, draft_extend_graph: bool = True) -> dict[str, str]:
    """The environment in which SGLang runs on the stand-ins (also for `launch_server`)."""
    env = dict(os.environ)
    paths = [str(STANDINS), str(ROOT), env.get("PYTHONPATH", "")]
    env |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),
        "CPU_ENGINE_GRAPHS": str(int(graphs)),
        "CPU_ENGINE_DRAFT_EXTEND_GRAPH": str(int(draft_extend_graph)),
        "CPU_ENGINE_ATTENTION": attention(),
    }
    return env | ({"TRITON_INTERPRET": "1"} if attention() == "triton" else {})


def attention() -> str:
    """The attention backend that knows EAGLE on a CPU: triton's where the CPU's own does not."""
    source = _srt() / "layers" / "attention" / "intel_amx_backend.py"
    return "intel_amx" if "MultiStepDraft" in source.read_text(encoding="utf-8") else "triton"


def _srt() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "run the engine tests inside a virtual environment that holds SGLang"
    (folder,) = spec.submodule_search_locations or ()
    return Path(folder, "srt")


def _other_models() -> list[str]:
    """SGLang imports every model that it has: a second, and a page of warnings in each log."""
    names = {path.stem for path in (_srt() / "models").glob("*.py")}
    return sorted(names - {"__init__", "llama", "llama_eagle3", "registry", "utils"})


def run_scenario(
    scenario: str,
    *,
    graphs: bool = False,
    draft_extend_graph: bool = True,
    env: dict[str, str] | None = None,
    timeout: float = 120,
    **kwargs: Any,
) -> Any:
    """Call `module:function` with `kwargs` in a fresh process and give back what it returned."""
    environment = engine_env(graphs=graphs, draft_extend_graph=draft_extend_graph) | (env or {})
    with tempfile.TemporaryDirectory(prefix="scenario-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log.txt")
        process = _forks().Process(
            target=_run, args=(scenario, kwargs, environment, str(answer), str(log))
        )
        process.start()
        try:
            process.join(timeout)
        finally:
            returncode = process.exitcode
            _kill_group(process)
        if returncode != 0 or not answer.exists():
            reason = "timed out" if returncode is None else f"exited with {returncode}"
            output = log.read_text(errors="replace") if log.exists() else ""
            raise ScenarioFailed(f"{scenario} {reason}\n{output}")
        return json.loads(answer.read_text())


@functools.cache
def _forks() -> ForkServerContext:
    """Starts processes that have :mod:`tests.engine.preload` behind them: two seconds, not ten."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.preload"])
    before = dict(os.environ)
    os.environ.update(engine_env())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(scenario: str, kwargs: dict[str, Any], env: dict[str, str], answer: str, log: str) -> None:
    """A scenario's process, made to look as if it had been started from a shell."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(ROOT)
    known = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [
        *env["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if path not in known)
    ]  # fmt: skip
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    status = 1
    try:
        module, _, function = scenario.partition(":")
        result = getattr(importlib.import_module(module), function)(**kwargs)
        Path(answer).write_text(json.dumps(result))
        status = 0
    except SystemExit as end:
        print(end, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # SGLang leaves threads and groups that would hold the interpreter


def run_plugin(scenario: str, config: Any, settings: Any = None, **kwargs: Any) -> Any:
    """A scenario of `tests.engine.plugin`, with graphs."""
    return run_scenario(
        f"tests.engine.plugin:{scenario}",
        graphs=True,
        timeout=120 if attention() == "intel_amx" else 900,  # kernels are interpreted
        config=config,
        settings=settings,
        **kwargs,
    )


def _kill_group(process: BaseProcess) -> None:
    """The scenario and whatever it started; its session is its own, so nobody else is hit."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
