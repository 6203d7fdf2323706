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
    """Wrapped in every scheduler process."""
    capture: tuple[Requirement, ...]
    """Replaced, in the module that is named, for the time of a capture."""
    worker: tuple[Requirement, ...]
    """Called by the adapter, with these parameters and no other required one."""

    def __iter__(self) -> Iterator[Requirement]:
        yield from (*self.launcher, *self.scheduler, *self.capture, *self.worker)


_SRT = "sglang.srt"
_SPEC = f"{_SRT}.speculative"

LAUNCHER: tuple[Requirement, ...] = (
    Requirement(f"{_SRT}.server_args", "ServerArgs.add_cli_args", ("parser",)),
    Requirement(f"{_SRT}.server_args", "ServerArgs.from_cli_args", ("cls", "args")),
)
SCHEDULER = f"{_SRT}.managers.scheduler"
"""The module of a scheduler process, whose import says that it is one."""
COMMUNICATOR = Requirement(
    f"{_SRT}.distributed.device_communicators.pynccl", "PyNcclCommunicator.__init__", ("self",)
)
"""Makes the first NCCL communicator of a rank: the world group has none, and those of torch come up
at their first collective (distributed/parallel_state.py)."""

RESULT = Requirement(
    f"{_SRT}.managers.scheduler_components.batch_result_processor",
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    ("self", "result", "batch"),
)
"""Takes up what a verify accepted, some time after; only the result says which width it ran."""


def requirements_of(release: Release) -> Requirements:
    """The requirements of a release, chosen by its capabilities."""
    return Requirements(
        LAUNCHER,
        (
            Requirement(SCHEDULER, _capture_entry(release), ("self",)),
            Requirement(SCHEDULER, "Scheduler.get_internal_state", ("self", "recv_req")),
            Requirement(SCHEDULER, "Scheduler.set_internal_state", ("self", "recv_req")),
            COMMUNICATOR,
            *(() if release.one_width else (RESULT,)),
        ),
        tuple(_capture(release)),
        (
            *(_ONE_WIDTH_WORKER if release.one_width else _WORKER),
            *_runner(release),
            *_facts(release),
        ),
    )


def _capture_entry(release: Release) -> str:
    name = "init_all_cuda_graphs" if release.captures_apart else "init_model_worker"
    return f"Scheduler.{name}"


def _capture(release: Release) -> Iterator[Requirement]:
    yield Requirement(
        f"{_SRT}.model_executor.model_runner",
        "ModelRunner._get_attention_backend",
        ("self", "init_new_workspace"),
    )
    yield Requirement(release.runner_module, "freeze_gc", ("enable_cudagraph_gc",))
    if release.stream_per_capture:
        yield Requirement(release.runner_module, "graph_capture", ("stream",))
    if release.draft_extend_width_from_server_args:
        yield Requirement(
            f"{_SPEC}.eagle_draft_extend_cuda_graph_runner",
            "resolve_num_tokens_per_req",
            ("phase",),
        )
    if not release.usage_per_phase:
        yield Requirement(release.runner_module, f"{release.runner_class}.capture", ("self",))
    if not release.captures_apart:
        yield Requirement(
            f"{_SRT}.model_executor.model_runner", "ModelRunner.init_device_graphs", ("self",)
        )
        yield Requirement(
            f"{_SPEC}.eagle_worker_v2", "EagleDraftWorker.init_cuda_graphs", ("self",)
        )
    if release.one_width:
        yield Requirement(f"{_SPEC}.eagle_worker", "EAGLEWorker.init_cuda_graphs", ("self",))


_WORKER: tuple[Requirement, ...] = (
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
)
_ONE_WIDTH_WORKER: tuple[Requirement, ...] = (
    Requirement(f"{_SPEC}.eagle_worker", "EAGLEWorker.draft", ("self", "batch")),
    Requirement(
        f"{_SPEC}.eagle_worker_v2", "EagleDraftWorker.draft", ("self", "model_worker_batch")
    ),
)


def _runner(release: Release) -> Iterator[Requirement]:
    if not release.one_width:
        module, owner = release.chain_owner.split(":")
        yield Requirement(f"{_SPEC}.{module}", f"{owner}._rebuild_topk1_chain_buffers", ("self",))
    names = ("can_run", "replay_prepare", "replay")
    if release.runner_package:
        names = ("can_run_graph", "load_batch", "execute")
    for name in names:
        more = () if name == names[0] else ("pp_proxy_tensors",)
        yield Requirement(
            release.runner_module,
            f"{release.runner_class}.{name}",
            ("self", "forward_batch", *more),
        )
    if release.captures_apart:
        yield Requirement(f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2.init_cuda_graphs", ("self",))
    else:
        for name in ("speculative_moe_backend_context", "speculative_moe_a2a_backend_context"):
            yield Requirement(f"{_SPEC}.eagle_worker_v2", name)


def _facts(release: Release) -> Iterator[Requirement]:
    yield Requirement(
        f"{_SRT}.utils.common",
        "get_available_gpu_memory",
        ("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
    )
    yield Requirement(f"{_SRT}.distributed.parallel_state", "get_tp_group")
    if not release.one_width:
        yield Requirement(release.allocation_module, "get_alloc_len_per_decode")
    if release.config_bags:
        yield Requirement(f"{_SRT}.runtime_context", "get_context")
        yield Requirement(f"{_SRT}.runtime_context", "get_spec")
        yield Requirement(f"{_SRT}.arg_groups.arg_utils", "namespace_of", ("cls",))
    if release.hybrid_arch:
        yield Requirement(f"{_SRT}.configs.hybrid_arch", "mambaish_config", ("model_config",))
    if release.parallel_context:
        yield Requirement(f"{_SRT}.runtime_context", "get_parallel")
    else:
        for group in ("dp", "tp", "cp"):
            yield Requirement(f"{_SRT}.layers.dp_attention", f"get_attention_{group}_size")
    if release.alignment_function:
        arguments = ("server_args",) if release.alignment_from_server_args else ()
        yield Requirement(f"{_SRT}.utils.common", "get_cuda_graph_batch_size_alignment", arguments)
    else:
        yield Requirement(f"{_SRT}.utils.common", "require_gathered_buffer", ("server_args",))
