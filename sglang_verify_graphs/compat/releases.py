"""What each SGLang release can do, as capability flags; the only place with version numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sglang_verify_graphs.errors import UnsupportedError


@dataclass(frozen=True)
class Release:
    """One SGLang release: how it differs where the adapter touches it."""

    version: str
    tested: bool = True
    draft_extend_width_from_server_args: bool = False
    """The draft-extend runner ignores the width it is built for (0.5.17:
    speculative/eagle_draft_extend_cuda_graph_runner.py, ``resolve_num_tokens_per_req``)."""
    stream_per_capture: bool = False
    """Every runner captures on a new stream, so the shared pool cannot reuse memory across runners
    (to 0.5.19: runner/decode_cuda_graph_runner.py ``capture``; one stream from 0.5.20 on)."""
    dp_vote: str = "can_run_decode_cuda_graph"
    """ForwardBatch field with the vote of the DP ranks."""
    alignment_from_server_args: bool = False
    """``get_cuda_graph_batch_size_alignment`` takes the server args (to 0.5.17)."""


RELEASES: tuple[Release, ...] = (
    Release(
        "0.5.17",
        draft_extend_width_from_server_args=True,
        stream_per_capture=True,
        dp_vote="can_run_dp_cuda_graph",
        alignment_from_server_args=True,
    ),
    Release("0.5.23"),
)


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
    return Release(**{**nearest.__dict__, "version": installed, "tested": False})


def _key(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])
