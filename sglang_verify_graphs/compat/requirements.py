"""Every SGLang function this package wraps, replaces or calls, with the parameters it relies on.

One list for the unpacked wheels (contract tests, ``doctor``) and for the imported modules: see
``preflight.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_verify_graphs.compat.releases import Release


@dataclass(frozen=True)
class Requirement:
    """A callable ``module:qualname`` that must accept ``parameters`` by name."""

    module: str
    qualname: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Requirements:
    """What one release must have, by the place that asks for it."""

    launcher: tuple[Requirement, ...]
    """Wrapped while the launcher parses flags."""
    scheduler: tuple[Requirement, ...]
    """Wrapped in every scheduler process: the capture first, the server information second."""
    capture: tuple[Requirement, ...]
    """Replaced, in the module that is named, for the time of a capture."""
    worker: tuple[Requirement, ...]
    """Called by the adapter, with these parameters and no other required one."""

    def __iter__(self) -> Iterator[Requirement]:
        yield from (*self.launcher, *self.scheduler, *self.capture, *self.worker)


_RUNNER = "sglang.srt.model_executor.runner"
_SPEC = "sglang.srt.speculative"

LAUNCHER: tuple[Requirement, ...] = (
    Requirement("sglang.srt.server_args", "ServerArgs.add_cli_args", ("parser",)),
    Requirement("sglang.srt.server_args", "ServerArgs.from_cli_args", ("cls", "args")),
)

SCHEDULER: tuple[Requirement, ...] = (
    Requirement("sglang.srt.managers.scheduler", "Scheduler.init_all_cuda_graphs", ("self",)),
    Requirement(
        "sglang.srt.managers.scheduler", "Scheduler.get_internal_state", ("self", "recv_req")
    ),
)

WORKER: tuple[Requirement, ...] = (
    Requirement(
        f"{_SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.build_adaptive_runtime_state",
        ("self", "speculative_num_steps", "speculative_num_draft_tokens", "cuda_graph_bs"),
    ),
    Requirement(
        f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2.activate_step_by_batch", ("self", "batch_size")
    ),
    Requirement(
        f"{_SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.on_verify_complete_cpu",
        ("self", "num_correct_drafts_per_req", "batch_size"),
    ),
    Requirement(f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2.init_cuda_graphs", ("self",)),
    Requirement(
        f"{_SPEC}.base_spec_worker", "EagleDraftWorkerBase._rebuild_topk1_chain_buffers", ("self",)
    ),
    Requirement(
        f"{_RUNNER}.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
    ),
    Requirement(
        f"{_RUNNER}.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.load_batch",
        ("self", "forward_batch", "pp_proxy_tensors"),
    ),
    Requirement(
        f"{_RUNNER}.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.execute",
        ("self", "forward_batch", "pp_proxy_tensors"),
    ),
    Requirement(
        "sglang.srt.utils.common",
        "get_available_gpu_memory",
        ("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
    ),
    Requirement("sglang.srt.mem_cache.allocation_sizing", "get_alloc_len_per_decode"),
    Requirement("sglang.srt.runtime_context", "get_context"),
    Requirement("sglang.srt.runtime_context", "get_spec"),
    Requirement("sglang.srt.arg_groups.arg_utils", "namespace_of", ("cls",)),
    Requirement("sglang.srt.distributed.parallel_state", "get_tp_group"),
    Requirement("sglang.srt.configs.hybrid_arch", "mambaish_config", ("model_config",)),
)


def requirements_of(release: Release) -> Requirements:
    """The requirements of a release, chosen by its capabilities."""
    alignment = Requirement(
        "sglang.srt.utils.common",
        "get_cuda_graph_batch_size_alignment",
        ("server_args",) if release.alignment_from_server_args else (),
    )
    return Requirements(LAUNCHER, SCHEDULER, tuple(_capture(release)), (*WORKER, alignment))


def _capture(release: Release) -> Iterator[Requirement]:
    yield Requirement(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner._get_attention_backend",
        ("self", "init_new_workspace"),
    )
    yield Requirement(f"{_RUNNER}.decode_cuda_graph_runner", "freeze_gc", ("enable_cudagraph_gc",))
    if release.stream_per_capture:
        yield Requirement(f"{_RUNNER}.decode_cuda_graph_runner", "graph_capture", ("stream",))
    if release.draft_extend_width_from_server_args:
        yield Requirement(
            f"{_SPEC}.eagle_draft_extend_cuda_graph_runner",
            "resolve_num_tokens_per_req",
            ("phase",),
        )
