"""Run a scenario in a process of its own: `run_scenario("tests.engine.scenarios:serve", ...)`.

A scenario is a function of JSON-able keyword arguments that returns something JSON-able.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
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
    }
    return env


def _other_models() -> list[str]:
    """SGLang imports every model that it has: a second, and a page of warnings in each log."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "run the engine tests inside a virtual environment that holds SGLang"
    (folder,) = spec.submodule_search_locations or ()
    names = {path.stem for path in Path(folder, "srt", "models").glob("*.py")}
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
        answer = Path(folder, "answer.json")
        log = Path(folder, "log.txt")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.worker", scenario, str(answer)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(json.dumps(kwargs).encode(), timeout=timeout)
            finally:
                returncode = process.poll()
                _kill_group(process)
        if returncode != 0 or not answer.exists():
            reason = "timed out" if returncode is None else f"exited with {returncode}"
            raise ScenarioFailed(f"{scenario} {reason}\n{log.read_text(errors='replace')}")
        return json.loads(answer.read_text())


def run_plugin(scenario: str, config: Any, settings: Any = None, **kwargs: Any) -> Any:
    """A scenario of `tests.engine.plugin`, with graphs."""
    return run_scenario(
        f"tests.engine.plugin:{scenario}",
        graphs=True,
        config=config,
        settings=settings,
        **kwargs,
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The scenario and whatever it started; its session is its own, so nobody else is hit."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _main() -> None:
    scenario, answer = sys.argv[1:]
    module, _, function = scenario.partition(":")
    kwargs = json.loads(sys.stdin.read())
    result = getattr(importlib.import_module(module), function)(**kwargs)
    Path(answer).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # SGLang leaves threads and groups that would hold the interpreter


if __name__ == "__main__":
    _main()
