"""Which patches of ``patches/`` an SGLang carries: what they mend is left to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.compat.source import Source

_SRT = "sglang.srt"


class Carried(NamedTuple):
    """What a patch brings into a module, and the flags of ``Release`` that are false with it."""

    module: str
    marker: str
    mends: tuple[str, ...] = ()


def _patches(release: Release) -> dict[str, Carried]:
    scheduler, worker = f"{_SRT}.managers.scheduler", f"{_SRT}.speculative.eagle_worker_v2"
    return {
        "gate-reason": Carried(release.runner_module, "def graph_reject_reason"),
        "graph-key-width": Carried(release.runner_module, "def _batch_width"),
        "wide-candidates": Carried(
            f"{_SRT}.model_executor.model_runner",
            "widths = {self.decode_num_tokens_per_req()}",
            ("logits_of_configured_width", "stream_per_capture"),
        ),
        "draft-extend-width": Carried(
            f"{_SRT}.speculative.eagle_draft_extend_cuda_graph_runner",
            "num_draft_tokens=get_spec().speculative_num_draft_tokens",
            ("draft_extend_width_from_server_args",),
        ),
        "batch-pruning": Carried(worker, "get_cuda_graph_batch_size_alignment"),
        "ceiling-check": Carried(scheduler, "warn_uncovered_batch_sizes"),
        "nccl-report": Carried(scheduler, "gather_nccl_report"),
        "ray-env": Carried(f"{_SRT}.ray.scheduler_actor", "load_plugins()"),
        "cheap-switch": Carried(worker, "replace_last=True"),
    }


def carried(release: Release, source: Source) -> tuple[str, ...]:
    """Names of the patches that are in the source."""
    patches = _patches(release).items()
    return tuple(name for name, p in patches if p.marker in source.text(p.module))


def mended(release: Release, names: Iterable[str]) -> Release:
    """The release as these patches make it."""
    patches = _patches(release)
    mends: dict[str, Any] = {flag: False for name in names for flag in patches[name].mends}
    return replace(release, **mends)
