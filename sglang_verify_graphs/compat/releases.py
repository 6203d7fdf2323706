"""What each SGLang release can do, as capability flags; the only place with version numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from sglang_verify_graphs.errors import UnsupportedError


@dataclass(frozen=True)
class Release:
    """One SGLang release: how it differs where the adapter touches it.

    The defaults are what the newest release does.
    """

    version: str
    tested: bool = True
    dp_vote: str = "can_run_decode_cuda_graph"
    """ForwardBatch field with the vote of the DP ranks."""
    stream_per_capture: bool = False
    """Every runner captures on a new stream, so the shared pool cannot reuse memory across runners
    (``capture`` of the decode runner)."""
    alignment_function: bool = True
    """``get_cuda_graph_batch_size_alignment``."""
    alignment_from_server_args: bool = False
    """It takes the server args."""
    draft_extend_width_from_server_args: bool = False
    """The draft-extend runner ignores the width it is built for
    (eagle_draft_extend_cuda_graph_runner.py, ``resolve_num_tokens_per_req``)."""
    draft_arguments_copied: bool = False
    """The draft worker captures by a copy of the arguments, the ladder among them."""
    config_bags: bool = True
    """Resolved arguments stand in bags of the runtime context; else on ServerArgs."""
    switch_writes_bags: bool = True
    """A switch writes the two step counts into their bag. Not where KV is reserved from what it
    would write: there they stay at the widest, and nothing else that runs in a round reads them."""
    graphs_fa3_draft_extend: bool = True
    """The default worker captures draft extend on FlashAttention-3, Hopper's default backend."""
    logits_of_configured_width: bool = False
    """The logits buffer that graphs share has rows for the configured width alone: capturing a
    wider step count dies (upstream #35275)."""
    usage_per_phase: bool = True
    """Workers report the memory and time of their graphs phase by phase."""
    recaptures_hidden_mode: bool = False
    """A verify that wants other hidden states than were captured passes ``load_batch`` by
    capturing the whole ladder anew, in mid-serving."""
    chain_owner: str = "base_spec_worker:EagleDraftWorkerBase"
    """Class with ``_rebuild_topk1_chain_buffers``."""
    width_attribute: str = "captured_req_width"
    """Width that a runner was captured for; where it is ``num_tokens_per_bs``, stock's own gate
    does not check it."""
    hybrid_arch: bool = True
    """``configs.hybrid_arch.mambaish_config``; else a property of the model runner."""
    allocation_module: str = "sglang.srt.mem_cache.allocation_sizing"
    """Module of ``get_alloc_len_per_decode``."""
    integer_keys: bool = False
    """Without padding, stock's gate looks a number up among ShapeKey keys and never finds one."""
    runner_package: bool = True
    """``model_executor.runner``, with ``can_run_graph``/``load_batch``/``execute``, kept in
    ``decode_cuda_graph_runner``, its ladder in ``cuda_graph_config``; else ``CudaGraphRunner`` with
    ``can_run``/``replay_prepare``/``replay`` in ``graph_runner`` and ``ServerArgs.cuda_graph_bs``.
    """
    captures_apart: bool = True
    """``Scheduler.init_all_cuda_graphs`` captures after every worker was built, and the worker then
    builds its other states; else workers capture in their constructors."""
    zero_steps: bool = True
    """A round without drafts is verified at width 1."""
    extend_backend_on_runner: bool = True
    """Eager draft extend runs on ``draft_runner.attn_backend``, which a switch has to set."""
    parallel_context: bool = True
    """``runtime_context.get_parallel``."""
    one_width: bool = False
    """No worker switches between states of several widths; there is a v1 worker beside v2."""
    captures_default_layers: bool = False
    """Graphs read the default layers for EAGLE-3, whichever the draft asks for."""
    prefill_graph_takes_verify: bool = False
    """A verify that was refused its graph may be replayed in one captured for prefill."""
    short_ladder: bool = False
    """A GPU of 24 to 35 GB has graphs for half the batches of later releases."""
    truncates_ladder: bool = False
    """``--cuda-graph-max-bs`` itself may be missing among the batches that are captured."""

    @property
    def runner_module(self) -> str:
        """Module of the decode runner."""
        package = "runner.decode_cuda_graph_runner" if self.runner_package else "cuda_graph_runner"
        return f"sglang.srt.model_executor.{package}"

    @property
    def runner_class(self) -> str:
        return "DecodeCudaGraphRunner" if self.runner_package else "CudaGraphRunner"

    @property
    def runner_attribute(self) -> str:
        """Where a model runner keeps it."""
        return "decode_cuda_graph_runner" if self.runner_package else "graph_runner"


_23 = Release("0.5.23")
_22 = replace(_23, version="0.5.22", graphs_fa3_draft_extend=False)
_21 = replace(_22, version="0.5.21")
_20 = replace(_21, version="0.5.20")
_19 = replace(_20, version="0.5.19", short_ladder=True)
_18 = replace(
    _19,
    version="0.5.18",
    dp_vote="can_run_dp_cuda_graph",
    stream_per_capture=True,
    alignment_from_server_args=True,
    logits_of_configured_width=True,
    switch_writes_bags=False,
)
_17 = replace(
    _18,
    version="0.5.17",
    draft_extend_width_from_server_args=True,
    draft_arguments_copied=True,
    switch_writes_bags=True,
)
_16 = replace(
    _17,
    version="0.5.16",
    draft_extend_width_from_server_args=False,
    draft_arguments_copied=False,
    alignment_function=False,
    alignment_from_server_args=False,
    config_bags=False,
    switch_writes_bags=False,
    usage_per_phase=False,
    recaptures_hidden_mode=True,
    chain_owner="eagle_worker_v2:EagleDraftWorker",
)
_15 = replace(
    _16,
    version="0.5.15.post1",
    width_attribute="num_tokens_per_bs",
    hybrid_arch=False,
    allocation_module="sglang.srt.mem_cache.common",
    integer_keys=True,
)
_14 = replace(_15, version="0.5.14", logits_of_configured_width=False)
_13 = replace(
    _14,
    version="0.5.13.post1",
    integer_keys=False,
    runner_package=False,
    captures_apart=False,
    zero_steps=False,
    extend_backend_on_runner=False,
    parallel_context=False,
)
_12 = replace(_13, version="0.5.12.post1", one_width=True)
_11 = replace(_12, version="0.5.11")
_10 = replace(
    _11,
    version="0.5.10.post1",
    captures_default_layers=True,
    prefill_graph_takes_verify=True,
    graphs_fa3_draft_extend=True,
)
_9 = replace(_10, version="0.5.9", truncates_ladder=True)

RELEASES: tuple[Release, ...] = (
    _9,
    _10,
    _11,
    _12,
    _13,
    _14,
    _15,
    _16,
    _17,
    _18,
    _19,
    _20,
    _21,
    _22,
    _23,
)
"""Oldest first. Each is written as the one after it, and what differs."""


def sglang_version() -> str | None:
    """Version of the installed SGLang, without importing it."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def resolve_release(installed: str | None, *, allow_untested: bool) -> Release:
    """The release to adapt to; an untested one is refused, or served as the nearest older one."""
    tested = ", ".join(release.version for release in RELEASES)
    if installed is None:
        raise UnsupportedError(
            f"SGLang is not installed here; pip install sglang=={RELEASES[-1].version}"
        )
    for release in RELEASES:
        if release.version == installed:
            return release
    if not allow_untested:
        raise UnsupportedError(
            f"SGLang {installed} is not a tested release ({tested}); install one of them, or pass "
            "--verify-graph-allow-untested to try"
        )
    older = [r for r in RELEASES if _key(r.version) <= _key(installed)]
    nearest = older[-1] if older else RELEASES[0]
    return replace(nearest, version=installed, tested=False)


def _key(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])
