"""Lets SGLang's releases before EAGLE on a CPU (0.5.16) speculate there, and graph.

The attention backend is stock's triton one: its planning kernels run in triton's interpreter, its
two attention kernels are replaced by PyTorch. The graph runner is stock's too; a captured graph is
the call that was captured, run again on the static buffers. So gate, padding, choice of the bucket
and metadata are the real ones; that a value was baked in at capture is not seen here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from sgl_kernel.tree import FULL_MASK, build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from sglang_cpu_engine import GRAPHS, runners
from sglang_cpu_engine.runners import graph_of

REPLAYS: Counter[tuple[str, int]] = Counter()
"""Graphs that were replayed: class of the runner and captured batch."""
CAPTURES: Counter[str] = Counter()
"""Graphs that were captured, by class of the runner."""


def install(*, graphs: bool) -> None:
    """Before the scheduler is built."""
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    _replace_tree_ops()
    _replace_attention_kernels()
    if not graphs:
        return
    if find_spec("sglang.srt.model_executor.runner") is not None:
        _open_runner_package()
    else:
        _open_target_runner()
        _open_draft_runners()


def _replace_tree_ops() -> None:
    import sgl_kernel
    from sglang.srt.speculative import eagle_utils

    def build(*args: Any) -> None:
        *before, topk, depth, num_tokens, mask_mode = args
        assert mask_mode == FULL_MASK
        build_tree_kernel_efficient_cpu(*before, topk, depth, num_tokens, mask_mode)

    eagle_utils._is_cuda = True
    with contextlib.suppress(ImportError):  # or nobody tells a verify where to write its KV
        importlib.import_module("sglang.srt.speculative.triton_ops.cache_locs")._is_cuda = True
    eagle_utils.sgl_build_tree_kernel_efficient = build
    sgl_kernel.verify_tree_greedy = verify_tree_greedy_cpu


# -- attention -------------------------------------------------------------------------------------


def _replace_attention_kernels() -> None:
    from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention

    _replace(extend_attention, "extend_attention_fwd", _extend)
    _replace(decode_attention, "decode_attention_fwd", _decode)


def _replace(owner: Any, name: str, function: Callable[..., None]) -> None:
    """Hand ``function`` the arguments by the names that stock's kernel has in this release."""
    signature = inspect.signature(getattr(owner, name))
    wanted = set(inspect.signature(function).parameters)

    def call(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs).arguments
        function(**{key: value for key, value in bound.items() if key in wanted})

    setattr(owner, name, call)


def _attend(q: Any, k: Any, v: Any, scale: float, mask: Any) -> torch.Tensor:
    """[queries, heads, dim] over [keys, heads, dim]; ``mask`` says which keys a query sees."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v).to(q.dtype)


def _extend(
    q_extend: Any, k_extend: Any, v_extend: Any, o_extend: Any, k_buffer: Any, v_buffer: Any,
    qo_indptr: Any, kv_indptr: Any, kv_indices: Any, custom_mask: Any, mask_indptr: Any,
    sm_scale: float,
) -> None:  # fmt: skip
    """The prefix from the cache, whole; then the new tokens, by the tree mask or causally."""
    for i in range(len(qo_indptr) - 1):
        start, end = int(qo_indptr[i]), int(qo_indptr[i + 1])
        slots = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        new, prefix = end - start, len(slots)
        if new <= 0:
            continue
        mask = torch.ones(new, prefix + new, dtype=torch.bool)
        mask[:, prefix:] = torch.ones(new, new, dtype=torch.bool).tril()
        if custom_mask is not None:
            first = int(mask_indptr[i])
            rows = custom_mask[first : first + new * (prefix + new)]
            mask[:, prefix:] = rows.view(new, prefix + new)[:, prefix:].bool()
        keys = torch.cat([k_buffer[slots], k_extend[start:end]])
        values = torch.cat([v_buffer[slots], v_extend[start:end]])
        o_extend[start:end] = _attend(q_extend[start:end], keys, values, sm_scale, mask)


def _decode(
    q: Any, k_buffer: Any, v_buffer: Any, o: Any, kv_indptr: Any, kv_indices: Any, sm_scale: float
) -> None:
    for i in range(q.shape[0]):
        slots = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        mask = torch.ones(1, len(slots), dtype=torch.bool)
        o[i] = _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], sm_scale, mask)[0]


# -- graphs ----------------------------------------------------------------------------------------


class Graph:
    """The captured call; a replay runs it again and writes into what the capture gave back."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._call: Callable[[], Any] = lambda: None
        self._output: Any = None
        self._planned: list[tuple[Any, Any]] = []
        self._context: Callable[[], Any] = contextlib.nullcontext

    def pool(self) -> int:
        return 0

    def capture(self, call: Callable[[], Any]) -> Any:
        self._planned = [(b, b.forward_metadata) for b in _backends(self._runner)]
        self._context = _forward_context()
        self._call, self._output = call, call()
        CAPTURES[type(self._runner).__name__] += 1
        return self._output

    def replay(self) -> Any:
        for backend, metadata in self._planned:
            backend.forward_metadata = metadata
        with self._context():
            output = self._call()
        for kept, fresh in zip(_tensors(self._output), _tensors(output), strict=True):
            if kept is not fresh:
                kept.copy_(fresh)
        REPLAYS[type(self._runner).__name__, self._runner.bs] += 1
        return self._output


class CountedGraph(Graph):
    """For runners without a backend, which does it in later releases."""

    def replay(self) -> Any:
        GRAPHS.replays[graph_of(self._runner, self._runner.bs)] += 1
        return super().replay()


def _backends(runner: Any) -> list[Any]:
    """Attention backends whose plan a graph holds: the same buffers at capture and at replay."""
    model_runner, worker = runner.model_runner, getattr(runner, "eagle_worker", None)
    if worker is None:
        return [getattr(runner, "attn_backend", None) or model_runner.attn_backend]
    steps = getattr(worker.draft_attn_backend, "attn_backends", ())  # one step drafts nothing
    return [*steps, worker.draft_extend_attn_backend]


def _forward_context() -> Callable[[], Any]:
    """What a capture runs in: the runner package hands the attention backend over by it."""
    try:
        from sglang.srt.model_executor import forward_context
    except ImportError:
        return contextlib.nullcontext
    current = forward_context.get_forward_context()
    return lambda: forward_context.forward_context(current)


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = output if isinstance(output, tuple) else vars(output).values()
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def _graph_capture(stream: Any = None) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(stream=stream)


def _capture_graph(self: Any, graph: Graph, pool: Any, stream: Any, call: Any) -> Any:
    GRAPHS.captures[graph_of(self, None)] += 1
    return graph.capture(call)


def _open_target_runner() -> None:
    from sglang.srt.model_executor import cuda_graph_runner

    _open(cuda_graph_runner, "CudaGraphRunner", "_create_device_graph")
    cuda_graph_runner.set_graph_pool_id = lambda pool: None
    torch.cpu.graph_pool_handle = lambda: 0
    _capture_on_cpu(cuda_graph_runner.CudaGraphRunner, "init_device_graphs")


def _capture_on_cpu(runner_class: Any, method: str) -> None:
    """Stock takes a CPU for a device with a runner of its own, under torch.compile alone."""
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph

    def runner(owner: Any) -> Any:
        owner.server_args.enable_torch_compile = False
        return runner_class(owner)

    model_runner.CPUGraphRunner = runner
    stock = getattr(model_runner.ModelRunner, method)

    @functools.wraps(stock)
    def capture(self: Any) -> None:
        self.server_args.enable_torch_compile = not self.server_args.disable_cuda_graph
        try:
            stock(self)
        finally:
            self.server_args.enable_torch_compile = False

    setattr(model_runner.ModelRunner, method, capture)


def _open_runner_package() -> None:
    """The runners of the later engines, on calls in place of tapes."""
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    class CallBackend(runners.TapeBackend):
        def _record(self, forward_fn: Callable[[], Any]) -> Graph:
            graph = Graph(self._runner)
            graph.capture(forward_fn)
            return graph

    if hasattr(model_runner, "get_flags"):
        runners.open_gate(model_runner)
    else:
        _capture_on_cpu(DecodeCudaGraphRunner, "init_decode_cuda_graph")
    runners.open_runners(CallBackend)
    runners.open_draft_worker("_capture_cuda_graphs", True)


def _open(module: Any, runner: str, create: str) -> None:
    module.graph_capture = _graph_capture
    setattr(getattr(module, runner), create, lambda self: CountedGraph(self))
    getattr(module, runner)._capture_graph = _capture_graph


def _open_draft_runners() -> None:
    """Stock's tables of draft runners name no CPU: say CUDA while they are asked."""
    from sglang.srt.speculative import (
        eagle_draft_cuda_graph_runner,
        eagle_draft_extend_cuda_graph_runner,
    )

    for module, name in (
        (eagle_draft_cuda_graph_runner, "EAGLEDraftCudaGraphRunner"),
        (eagle_draft_extend_cuda_graph_runner, "EAGLEDraftExtendCudaGraphRunner"),
    ):
        _open(module, name, "_create_graph")
        getattr(module, name)._capture_init = lambda self, call: call()
    if find_spec("sglang.srt.speculative.eagle_worker") is None:
        runners.open_draft_worker("init_cuda_graphs", True)
        return
    from sglang.srt.speculative import eagle_worker

    stock = eagle_worker.EAGLEWorker.init_cuda_graphs

    def init_cuda_graphs(self: Any) -> None:
        device = self.target_worker.device
        self.target_worker.device = "cuda"
        try:
            stock(self)
        finally:
            self.target_worker.device = device

    eagle_worker.EAGLEWorker.init_cuda_graphs = init_cuda_graphs
