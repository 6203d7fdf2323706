"""Serve stock SGLang and SGLang with verify graphs side by side on one GPU, and compare.

Both engines are resident at the same time and measured in turn, pair by pair, so that clocks, heat
and neighbours hit both alike. ``README.md`` says what is measured; ``--plan`` what would run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from serving.engines import EngineFailed, EngineProcess  # noqa: E402
from serving.matrix import H200, SMOKE, STEPS, VERIFY, Configuration, Matrix, Scale  # noqa: E402
from serving.measure import OutOfTime, Session  # noqa: E402
from serving.models import Model, dummy_pair, real_pair, write_prompts  # noqa: E402
from serving.results import Results, table  # noqa: E402

from sglang_verify_graphs.buckets import batch_ladder  # noqa: E402
from sglang_verify_graphs.compat.releases import resolve_release, sglang_version  # noqa: E402

EXAMPLE = ROOT / "examples" / "smollm2-135m-eagle3"
SPARE = 15
"""Seconds kept for ending engines and writing results."""


def main() -> None:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    state = arguments.state.resolve()
    scale = SMOKE if arguments.smoke else H200
    if arguments.plan:
        with TemporaryDirectory() as folder:
            _print_plan(_matrix(arguments, scale, Path(folder)))
        return
    state.mkdir(parents=True, exist_ok=True)
    matrix = _matrix(arguments, scale, state)
    if arguments.smoke:
        from tests.engine.worker import engine_env

        os.environ.update(engine_env(graphs=True))
    header = run_header(arguments.smoke)
    name = f"serve-{header['slug']}-{header['sglang']}.json"
    if arguments.copy_to is not None:
        arguments.copy_to.mkdir(parents=True, exist_ok=True)
    results = Results(state / name, header, resume=arguments.resume, copy_to=arguments.copy_to)
    Benchmark(
        matrix, results, state, arguments.budget, port=arguments.port,
        prefetch=not arguments.no_prefetch,
    ).run()  # fmt: skip
    print(table(results.data))
    print(f"results: {results.path}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path("serve"), help="folder of this run")
    parser.add_argument("--copy-to", type=Path, help="folder that gets a copy of each result file")
    parser.add_argument("--target", type=Path, help="directory of the real pair's target")
    parser.add_argument("--draft", type=Path, default=EXAMPLE / "draft", help="and of its draft")
    parser.add_argument("--budget", type=float, default=560, help="seconds this call may take")
    parser.add_argument("--resume", action="store_true", help="keep what --state already holds")
    parser.add_argument("--only", nargs="*", default=[], help="parts of configurations' names")
    parser.add_argument("--plan", action="store_true", help="print what would run, run nothing")
    parser.add_argument("--port", type=int, default=31000, help="first port of the engines")
    parser.add_argument("--no-prefetch", action="store_true", help="start engines when needed only")
    parser.add_argument("--smoke", action="store_true", help="the code path, on a CPU, in minutes")
    return parser.parse_args()


def _matrix(arguments: argparse.Namespace, scale: Scale, state: Path) -> Matrix:
    if arguments.smoke:
        real, dummy = _tiny_models(state, build=not arguments.plan)
    else:
        if arguments.target is None and not arguments.plan:
            raise SystemExit(
                "--target is missing: the directory written by the example's target.py"
            )
        name = "smollm2-135m"
        real = (
            Model(name, Path(), Path(), True, 0)
            if arguments.plan
            else real_pair(name, arguments.target.resolve(), arguments.draft.resolve())
        )
        dummy = dummy_pair(
            "llama-8b", state / "models", layers=32, hidden=4096, heads=32, kv_heads=8,
            inner=14336, vocab=32000, context=16384,
        )  # fmt: skip
    release = resolve_release(sglang_version(), allow_untested=True)
    steps = tuple(range(0 if release.zero_steps else 1, STEPS + 1))
    adaptive = state / "adaptive.json"
    adaptive.write_text(json.dumps({"1": {"candidate_steps": list(steps)}}))
    return Matrix(
        scale, real, dummy, batch_ladder(scale.max_batch), adaptive, steps, tuple(arguments.only)
    )


def _tiny_models(state: Path, *, build: bool) -> tuple[Model, Model]:
    folder = state / "models"
    dummy = dummy_pair(
        "tiny-dummy", folder, layers=8, hidden=64, heads=4, kv_heads=4, inner=64, vocab=512,
        context=2048,
    )  # fmt: skip
    if not build:
        return Model("tiny", Path(), Path(), True, 0), dummy
    from tests.engine.pairs import build_pair

    pair = build_pair(folder / "tiny")
    return real_pair("tiny", pair.target, pair.draft), dummy


def run_header(smoke: bool) -> dict[str, Any]:
    """Releases, device and command line of a run; ``slug`` is the device in file names."""
    device = "cpu"
    if not smoke:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        device = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0].strip()
    slug = "".join(c if c.isalnum() else "-" for c in device.lower().removeprefix("nvidia "))
    command = " ".join(["python", *sys.argv])
    for place, short in ((str(ROOT) + os.sep, ""), (str(Path.home()), "~")):
        command = command.replace(place, short)
    return {
        "sglang": importlib.metadata.version("sglang"),
        "device": device or "unknown",
        "torch": importlib.metadata.version("torch"),
        "command": command,
        "slug": slug or "unknown",
    }


def _print_plan(matrix: Matrix) -> None:
    total = 0.0
    for configuration in matrix:
        total += configuration.seconds
        print(
            f"{configuration.key:<36}{configuration.seconds:>6.0f} s, {total:>6.0f} s so far  "
            f"({', '.join(e.role for e in configuration.engines)})"
        )
        print(f"    boot {configuration.boot_seconds:.0f} s")
        for task in configuration.tasks:
            print(f"    {task.key:<20}{task.seconds:>5.0f} s  batches {list(task.batches)}")


def _cores(configuration: int) -> list[int]:
    """Half of the cores for all engines of a configuration, the other half for the next one's.

    Rounds of a small model are bound by the host. Engines are measured in turn and sleep meanwhile,
    so on the same cores they meet the same clocks and neighbours; the next configuration's engines,
    which import meanwhile, are kept away.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half < 4:
        return cores
    return cores[:half] if configuration % 2 == 0 else cores[half:]


class Benchmark:
    """Walks the configurations; the next one's engines import while the present one's boot."""

    def __init__(
        self, matrix: Matrix, results: Results, state: Path, budget: float, *, port: int,
        prefetch: bool,
    ) -> None:  # fmt: skip
        self._matrix = matrix
        self._results = results
        self._state = state
        self._deadline = time.monotonic() + budget - SPARE
        self._prefetch = prefetch
        self._ports = count(port, 7)
        self._started: dict[str, dict[str, EngineProcess]] = {}
        self._turn = count()

    def run(self) -> None:
        try:
            waiting = [one for one in self._matrix if self._open_keys(one)]
            for index, configuration in enumerate(waiting):
                left = self._deadline - time.monotonic()
                need = self._seconds(configuration)
                if need > left:
                    print(f"{configuration.key}: needs {need:.0f} s of {left:.0f} s left; stopping")
                    break
                following = waiting[index + 1] if index + 1 < len(waiting) else None
                self._configuration(configuration, following)
        finally:
            for engines in self._started.values():
                for engine in engines.values():
                    engine.stop()
            self._results.write()

    def _open_keys(self, configuration: Configuration) -> list[str]:
        keys = [f"{configuration.key}:{task.key}" for task in configuration.tasks]
        keys = keys or [f"{configuration.key}:boot"]
        return [key for key in keys if not self._results.is_done(key)]

    def _seconds(self, configuration: Configuration) -> float:
        open_keys = self._open_keys(configuration)
        tasks = [t for t in configuration.tasks if f"{configuration.key}:{t.key}" in open_keys]
        return configuration.boot_seconds + (min(t.seconds for t in tasks) if tasks else 0.0)

    def _start(self, configuration: Configuration) -> dict[str, EngineProcess]:
        if configuration.key not in self._started:
            folder = self._state / "engines" / configuration.key.replace("/", "-")
            cores = _cores(next(self._turn))
            engines = {
                spec.role: EngineProcess(spec, folder / spec.role, next(self._ports), cores)
                for spec in configuration.engines
            }
            for engine in engines.values():
                engine.start()
            self._started[configuration.key] = engines
        return self._started[configuration.key]

    def _configuration(self, configuration: Configuration, following: Configuration | None) -> None:
        print(f"{configuration.key}: booting {[e.role for e in configuration.engines]}", flush=True)
        engines = self._start(configuration)
        measures_more_than_capture = bool(configuration.tasks)
        if self._prefetch and following is not None and measures_more_than_capture:
            left = self._deadline - time.monotonic() - configuration.seconds
            if left > self._seconds(following):
                self._start(following)
        try:
            states = dict(self._boot(configuration, engines))
            session = Session(
                configuration, self._matrix.scale, engines, states,
                lambda length: self._prompts(configuration.model, length),
                self._results, self._deadline,
            )  # fmt: skip
            alive = set(states)
            for task in configuration.tasks:
                key = f"{configuration.key}:{task.key}"
                if not self._results.is_done(key) and self._task(session, task, alive):
                    self._results.finish(key)
        except OutOfTime:
            print(f"{configuration.key}: out of time, to be resumed", flush=True)
        finally:
            for engine in engines.values():
                engine.stop()
            del self._started[configuration.key]

    def _boot(
        self, configuration: Configuration, engines: dict[str, EngineProcess]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """One after the other, so that each has the GPU for itself while it captures."""
        failed = False
        for role, engine in engines.items():
            try:
                state = engine.boot(self._matrix.scale.boot_timeout)
            except EngineFailed as error:
                self._results.fail(configuration.key, str(error), error.log_tail)
                engine.stop()
                failed = True
                continue
            capture = state["probe"]["capture"]
            print(f"  {role}: up after {engine.booted_in:.0f} s, capture {capture}", flush=True)
            self._record_capture(configuration, engine, state)
            if engine.spec.engine == VERIFY:
                engine.command("steps", script=[STEPS])  # as stock: not what pays, what is asked
            if not configuration.tasks:
                engine.stop()
            yield role, state
        if not configuration.tasks and not failed:
            self._results.finish(f"{configuration.key}:boot")

    def _record_capture(
        self, configuration: Configuration, engine: EngineProcess, state: dict[str, Any]
    ) -> None:
        role, identity = engine.spec.role, ("set", "role", "source", "draft_steps")
        ladder, report = state["probe"]["ladder"], state["verify_graphs"] or {}
        several = engine.spec.engine == VERIFY or "adaptive" in role
        entry = {
            "set": configuration.key,
            "role": role,
            "engine": engine.spec.engine,
            "attention": configuration.attention,
            "model": configuration.model.name,
            "source": "probe",
            "draft_steps": f"{self._matrix.steps[0]}-{STEPS}" if several else STEPS,
            "ladder": ladder,
            "batches": len(ladder),
            "boot_seconds": round(engine.booted_in, 1),
            "prefill_graphs": state["probe"]["prefill_graphs"],
            **state["probe"]["capture"],
            "stock_report": {"memory": state["memory"], "startup": state["startup"]},
            "dropped": report.get("dropped"),
        }
        self._results.add("capture", entry, identity)
        if engine.spec.engine != VERIFY:
            return
        for width in report.get("capture", []):
            part = {name: entry[name] for name in ("set", "role", "engine", "attention", "model")}
            part |= width | {"batches": len(width["batches"]), "source": "report"}
            self._results.add("capture", part, identity)

    def _task(self, session: Session, task: Any, alive: set[str]) -> bool:
        key = session.configuration.key
        if missing := set(task.roles) - alive:
            self._results.fail(key, f"{task.key}: no engine {sorted(missing)}", "")
            return False
        if time.monotonic() + 0.6 * task.seconds > self._deadline:
            print(f"  {task.key}: no time left", flush=True)
            return False
        started = time.monotonic()
        try:
            session.run(task)
        except EngineFailed as error:
            self._results.fail(key, f"{task.key}: {error}", error.log_tail)
            session.engines[error.role].stop()
            alive.discard(error.role)
            return False
        except OutOfTime:
            raise
        except Exception as error:
            self._results.fail(key, f"{task.key}: {error!r}", traceback.format_exc())
            return False
        print(f"  {task.key}: {time.monotonic() - started:.0f} s", flush=True)
        return True

    def _prompts(self, model: Model, length: int) -> Path:
        folder = self._state / "prompts"
        folder.mkdir(exist_ok=True)
        texts = (EXAMPLE / "heldout.txt").read_text(encoding="utf-8").splitlines()
        return write_prompts(
            model, folder, length, self._matrix.scale.max_batch, [t for t in texts if t.strip()]
        )


if __name__ == "__main__":
    main()
