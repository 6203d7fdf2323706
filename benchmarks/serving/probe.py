"""Runs inside every benchmarked engine, stock and patched alike.

It holds the scheduler back until the benchmark says go (so that one engine at a time uses the GPU
while it loads and captures), measures the whole graph capture in the same way for every engine, and
answers commands between measurements. It touches nothing of what serves a request.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = "SERVE_BENCHMARK_FOLDER"
"""Environment variable: the folder through which benchmark and engine talk."""
GO, COMMAND = "go", "command.json"

PARTS = (
    ("sglang.srt.model_executor.model_runner", "ModelRunner", "init_device_graphs"),
    ("sglang.srt.speculative.eagle_worker", "EAGLEWorker", "init_cuda_graphs"),
    ("sglang.srt.speculative.eagle_worker_v2", "EagleDraftWorker", "init_cuda_graphs"),
    ("sglang.srt.speculative.eagle_worker_v2", "EAGLEWorkerV2", "build_adaptive_runtime_state"),
)
"""Who captures in the releases whose scheduler has no ``init_all_cuda_graphs``."""


def load(module: Any) -> None:
    """Called when SGLang has imported ``managers.scheduler``."""
    initialise = module.Scheduler.__init__
    folder = Path(os.environ[FOLDER])

    @functools.wraps(initialise)
    def wait_and_initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        _wait_for(folder / GO)
        probe = Probe(self, folder)
        # Instance attributes: whatever the class holds by now, ours or stock, is what they call.
        if hasattr(self, "init_all_cuda_graphs"):
            self.init_all_cuda_graphs = probe.timed(self.init_all_cuda_graphs)
        else:
            probe.time_parts()
        self.run_batch = probe.dated(self.run_batch)
        self.get_internal_state = probe.answering(self.get_internal_state)
        initialise(self, *args, **kwargs)

    module.Scheduler.__init__ = wait_and_initialise


def _wait_for(path: Path) -> None:
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            sys.exit("the benchmark is gone")
        time.sleep(0.02)


class Starts:
    """When the forwards of a scheduler process began, in nanoseconds, read by the benchmark.

    A file that both processes map: a count, then the times, the oldest overwritten.
    """

    ROOM = 1 << 16

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        path = folder / "starts.bin"
        if create:
            path.write_bytes(bytes(8 * (self.ROOM + 1)))
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def note(self) -> None:
        words = self._words
        count = words[0]
        words[1 + count % self.ROOM] = time.perf_counter_ns()
        words[0] = count + 1

    @property
    def count(self) -> int:
        return self._words[0]

    def since(self, count: int) -> list[int]:
        return [self._words[1 + i % self.ROOM] for i in range(count, self._words[0])]


class Probe:
    """State of the probe in one scheduler process."""

    def __init__(self, scheduler: Any, folder: Path) -> None:
        self._scheduler = scheduler
        self._folder = folder
        self._capture: dict[str, float | None] = {}
        self._capturing = False
        self._hook: Any = None
        self._logits: list[list[tuple[list[int], list[float]]]] = []
        self._gate: GateTimer | None = None
        self._starts = Starts(folder, create=True)

    def dated(self, run_batch: Callable[..., Any]) -> Callable[..., Any]:
        """Notes when each forward of the scheduler begins: 0.3 us, in every engine alike."""
        note = self._starts.note

        def run(*args: Any, **kwargs: Any) -> Any:
            note()
            return run_batch(*args, **kwargs)

        return run

    def time_parts(self) -> None:
        for name, owner, method in PARTS:
            if find_spec(name) is not None:
                one = getattr(importlib.import_module(name), owner)
                if hasattr(one, method):
                    setattr(one, method, self.timed(getattr(one, method)))

    def timed(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        """Adds what a capture takes to the sum; a part within a part counts once."""

        @functools.wraps(capture)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._capturing:
                return capture(*args, **kwargs)
            self._capturing = True
            before, started = _memory(), time.perf_counter()
            try:
                result = capture(*args, **kwargs)
            finally:
                self._capturing = False
            _synchronize()
            taken = {"seconds": time.perf_counter() - started}
            after = _memory()
            taken |= {
                name: None if None in (before[name], after[name]) else after[name] - before[name]
                for name in after
            }
            for name, value in taken.items():
                sofar = self._capture.get(name, 0.0)
                self._capture[name] = None if None in (sofar, value) else round(sofar + value, 4)
            return result

        return measured

    def answering(self, state: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def answer(request: Any) -> Any:
            result = state(request)
            result.internal_state["serve_probe"] = self._facts() | {"answer": self._obey()}
            return result

        return answer

    def _facts(self) -> dict[str, Any]:
        runner = self._scheduler.tp_worker.model_runner
        graphs = _first(runner, "decode_cuda_graph_runner", "graph_runner")
        prefill = _first(runner, "prefill_cuda_graph_runner", "piecewise_cuda_graph_runner")
        return {
            "capture": self._capture,
            "ladder": [int(b) for b in getattr(graphs, "capture_bs", None) or []],
            "max_total_tokens": int(self._scheduler.max_total_num_tokens),
            "prefill_graphs": type(prefill).__name__ not in ("NoneType", "EagerRunner"),
        }

    def _obey(self) -> Any:
        path = self._folder / COMMAND
        if not path.exists():
            return None
        command = json.loads(path.read_text())
        path.unlink()
        try:
            return getattr(self, f"_do_{command.pop('do')}")(**command)
        except Exception:
            return {"error": traceback.format_exc(limit=4)}

    # -- commands --------------------------------------------------------------------------------

    def _do_steps(self, script: list[int]) -> None:
        """Pin the draft steps, or cycle through a list of them."""
        from sglang_verify_graphs.policy import FixedSteps, ScriptedSteps

        controller = self._controller()
        if missing := set(script) - set(controller.states):
            raise ValueError(f"draft steps {sorted(missing)} were not captured")
        controller.policy = FixedSteps(script[0]) if len(script) == 1 else ScriptedSteps(script)

    def _do_logits_on(self) -> None:
        """Keep the largest logits of every eager forward of the target."""
        self._logits = []
        processor = self._scheduler.tp_worker.model_runner.model.logits_processor

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            logits = output.next_token_logits
            if logits is None:
                return
            top = logits.topk(min(8, logits.shape[-1]), dim=-1)
            rows = zip(top.indices.tolist(), top.values.float().tolist(), strict=True)
            self._logits.append(list(rows))

        if self._hook is None:
            self._hook = processor.register_forward_hook(keep)

    def _do_logits_off(self) -> list[Any]:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return self._logits

    def _do_gate_on(self) -> None:
        self._gate = GateTimer(self._controller()._in_charge)

    def _do_gate_off(self) -> dict[str, Any]:
        assert self._gate is not None
        timer, self._gate = self._gate, None
        return timer.result()

    def _do_hot_path(self, switches: int, batch: int) -> dict[str, Any]:
        """Host cost of 1,000 switches and what they leave behind, on the engine's own states."""
        from sglang_verify_graphs.policy import ScriptedSteps

        controller = self._controller()
        steps = sorted(controller.states)
        kept, controller.policy = controller.policy, ScriptedSteps(steps)
        head, apply = controller.activate_step_by_batch, controller._apply
        states = [controller.states[k] for k in steps]
        for _ in range(50):
            head(batch)
        gc.collect()
        _synchronize()
        before, heads, applies = self._held(controller), [0] * switches, [0] * switches
        blocks = sys.getallocatedblocks()
        for i in range(switches):
            started = time.perf_counter_ns()
            head(batch)
            heads[i] = time.perf_counter_ns() - started
        for i in range(switches):
            started = time.perf_counter_ns()
            apply(states[i % len(states)])
            applies[i] = time.perf_counter_ns() - started
        blocks = sys.getallocatedblocks() - blocks
        after = self._held(controller)
        apply(controller.states[controller.current_steps])
        controller.policy = kept
        return {
            "switches": switches,
            "steps": steps,
            "round_head_us": _microseconds(heads),
            "switch_us": _microseconds(applies),
            "gpu_bytes": after["gpu"] - before["gpu"],
            "overrides_logged": after["overrides"] - before["overrides"],
            # The two lists of samples hold one int each a switch.
            "python_blocks_per_switch": round(blocks / switches - 2, 3),
        }

    def _controller(self) -> Any:
        controller = self._scheduler.draft_worker.adaptive_controller
        if type(controller).__name__ != "DraftStepsController":
            raise TypeError(f"no verify graphs in this engine: {controller!r}")
        return controller

    def _held(self, controller: Any) -> dict[str, int]:
        import torch

        gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return {"gpu": gpu, "overrides": controller.engine.overrides_logged()}


class GateTimer:
    """Times the router's decision on served batches, then the gate alone on the last of them."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._decide = router._decide
        self._samples: list[int] = []
        self._batch: Any = None
        router._decide = self._timed

    def _timed(self, batch: Any) -> Any:
        started = time.perf_counter_ns()
        decision = self._decide(batch)
        self._samples.append(time.perf_counter_ns() - started)
        self._batch = batch
        return decision

    def result(self, repeats: int = 5000) -> dict[str, Any]:
        del self._router._decide
        if self._batch is None:
            return {"error": "no verify was served"}
        read, decide = self._router._read_facts, self._router._gate.decide
        alone = [0] * repeats
        for i in range(repeats):
            started = time.perf_counter_ns()
            decide(read(self._batch))
            alone[i] = time.perf_counter_ns() - started
        return {
            "batch": int(self._batch.batch_size),
            "gate_us": _microseconds(alone),
            "decision_with_stock_check_us": _microseconds(self._samples),
        }


def _first(owner: Any, *names: str) -> Any:
    """The attribute by the first of its names, which differ from release to release."""
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


def _microseconds(nanoseconds: list[int]) -> dict[str, float]:
    ordered = sorted(nanoseconds)
    return {
        "median": round(ordered[len(ordered) // 2] / 1e3, 2),
        "p99": round(ordered[int(len(ordered) * 0.99)] / 1e3, 2),
    }


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory() -> dict[str, float | None]:
    """GiB taken on the device, as the device, the driver (this process) and torch see it."""
    import torch

    if not torch.cuda.is_available():
        return {"gb": 0.0, "process_gb": None, "reserved_gb": 0.0}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "gb": (total - free) / 2**30,
        "process_gb": _process_gb(),
        "reserved_gb": torch.cuda.memory_reserved() / 2**30,
    }


def _process_gb() -> float | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return float(process.usedGpuMemory) / 2**30
    except Exception:
        return None
    return None
