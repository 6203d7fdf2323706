"""Every SGLang function this package wraps or calls, with the parameters it relies on.

Checked twice from this one list: against the unpacked wheels (contract tests) and against the
imported modules before anything is patched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    worker: tuple[Requirement, ...]
    """Called by the adapter; none of them is wrapped."""

    def __iter__(self) -> Iterator[Requirement]:
        yield from (*self.launcher, *self.scheduler, *self.worker)


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
    Requirement(f"{_SPEC}.spec_utils", "resolve_num_tokens_per_req", ("phase",)),
    Requirement(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner._get_attention_backend",
        ("self", "init_new_workspace"),
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
    Requirement(f"{_RUNNER}.base_cuda_graph_runner", "freeze_gc", ("enable_cudagraph_gc",)),
    Requirement("sglang.srt.utils.common", "get_cuda_graph_batch_size_alignment"),
    Requirement(
        "sglang.srt.utils.common",
        "get_available_gpu_memory",
        ("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
    ),
    Requirement("sglang.srt.mem_cache.allocation_sizing", "get_alloc_len_per_decode"),
    Requirement("sglang.srt.runtime_context", "get_context"),
    Requirement("sglang.srt.runtime_context", "get_spec"),
    Requirement("sglang.srt.arg_groups.arg_utils", "namespace_of"),
    Requirement("sglang.srt.distributed.parallel_state", "graph_capture", ("stream",)),
    Requirement("sglang.srt.distributed.parallel_state", "get_tp_group"),
    Requirement("sglang.srt.configs.hybrid_arch", "mambaish_config", ("model_config",)),
)


def requirements_of(release: Release) -> Requirements:
    """The requirements of a release, chosen by its capabilities."""
    return Requirements(LAUNCHER, SCHEDULER, WORKER)


def unmet(requirements: tuple[Requirement, ...]) -> list[str]:
    """Requirements that the installed SGLang does not meet, each with what was found instead."""
    problems = []
    for need in requirements:
        try:
            found: Any = importlib.import_module(need.module)
            for part in need.qualname.split("."):
                found = inspect.getattr_static(found, part)
        except (ImportError, AttributeError) as error:
            problems.append(f"{need} is gone ({error})")
            continue
        function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        names = inspect.signature(function).parameters
        if missing := [name for name in need.parameters if name not in names]:
            problems.append(f"{need} takes {list(names)}, not {', '.join(missing)}")
    return problems
