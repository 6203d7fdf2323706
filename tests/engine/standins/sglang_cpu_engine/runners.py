"""Let stock's three graph runners (verify or decode, draft, draft extend) run on a CPU."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sglang_cpu_engine import GRAPHS
from sglang_cpu_engine.log import Graph
from sglang_cpu_engine.tape import StaleGraphError, Tape

_PHASES = {
    "EAGLEDraftCudaGraphRunner": "draft",
    "EAGLEDraftExtendCudaGraphRunner": "draft_extend",
}


def graph_of(runner: Any, size: int | None) -> Graph:
    phase = _PHASES.get(type(runner).__name__)
    if phase is None:
        phase = runner.capture_forward_mode.name.lower()
    steps = getattr(runner, "speculative_num_steps", None)
    width = getattr(runner, "captured_req_width", None) or runner.num_tokens_per_bs
    return Graph(phase, steps, width, size)


class TapeBackend:
    """The six methods of `BaseCudaGraphBackend` over `Tape`, with everything counted."""

    def __init__(self, cuda_graph_runner: Any, **kwargs: Any) -> None:
        self._runner = cuda_graph_runner
        self._tapes: dict[Any, Any] = {}
        self._capturing = False
        self.replays: Counter[Any] = Counter()

    def _graph(self, shape_key: Any) -> Graph:
        return graph_of(self._runner, shape_key.size)

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
        **others: Any,
    ) -> None:
        assert self._capturing, "capture_one outside capture_session"
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        self._tapes[shape_key] = self._record(forward_fn)
        GRAPHS.captures[self._graph(shape_key)] += 1

    def _record(self, forward_fn: Callable[[], Any]) -> Any:
        return Tape(forward_fn)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._tapes

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        if shape_key not in self._tapes:
            raise StaleGraphError(f"{self._graph(shape_key)} was not captured")
        self.replays[shape_key] += 1
        GRAPHS.replays[self._graph(shape_key)] += 1
        return self._tapes[shape_key].replay()

    def cleanup(self) -> None:
        self._tapes.clear()


class _Event:
    """torch.cpu has streams and no events."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _graph_capture(stream: Any = None) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(stream=stream)


def install(*, draft_extend: bool) -> None:
    """Open the gates that keep a CPU out; `draft_extend`: is the backend on stock's list."""
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

    open_gate(cuda_graph_setup)
    open_runners(TapeBackend)
    open_draft_worker("_capture_cuda_graphs", draft_extend)


def open_gate(setup: Any) -> None:
    """On a CPU stock captures only under torch.compile, and with a runner of its own."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    setup.CPUGraphRunner = DecodeCudaGraphRunner
    setup.get_flags = lambda: SimpleNamespace(
        capture=SimpleNamespace(enable_torch_compile=True), enable_tf32_matmul=False
    )


def open_runners(backend: type[TapeBackend]) -> None:
    """Have the three runners capture and replay on `backend`."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from sglang.srt.speculative import (
        eagle_draft_cuda_graph_runner,
        eagle_draft_extend_cuda_graph_runner,
    )

    for module in (
        decode_cuda_graph_runner,
        eagle_draft_cuda_graph_runner,
        eagle_draft_extend_cuda_graph_runner,
    ):
        module.resolve_decode_backend = backend
    decode_cuda_graph_runner.graph_capture = _graph_capture
    decode_cuda_graph_runner.get_or_create_global_graph_capture_stream = lambda: None
    # Three collections of a heap full of imports for each runner: a third of a second.
    decode_cuda_graph_runner.freeze_gc = lambda enable_cudagraph_gc: contextlib.nullcontext()
    for name, value in (("Event", _Event), ("is_current_stream_capturing", lambda: False)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, value)


def open_draft_worker(method: str, draft_extend: bool) -> None:
    """Stock's tables of draft runners have no "cpu"; "cuda" names the same two classes.

    The pretence lasts for one call of `method`: nothing else in it asks for an NPU, and `_is_npu`
    is what lets the draft extend of an unlisted backend be graphed.
    """
    from sglang.srt.speculative import eagle_worker_v2

    capture = getattr(eagle_worker_v2.EagleDraftWorker, method)

    @functools.wraps(capture)
    def capture_as_cuda(self: Any) -> None:
        device = self.target_worker.device
        assert device == "cpu"
        eagle_worker_v2._is_cpu, eagle_worker_v2._is_npu = False, draft_extend
        self.target_worker.device = "cuda"
        try:
            capture(self)
        finally:
            eagle_worker_v2._is_cpu, eagle_worker_v2._is_npu = True, False
            self.target_worker.device = device

    setattr(eagle_worker_v2.EagleDraftWorker, method, capture_as_cuda)
