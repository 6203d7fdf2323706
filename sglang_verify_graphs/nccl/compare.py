"""Where the ranks of a server disagree, and where one has not what was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from sglang_verify_graphs.buckets import format_ranges
from sglang_verify_graphs.nccl.evidence import SHELL
from sglang_verify_graphs.nccl.status import LATE, OVERRIDDEN, REQUESTED, UNSET, RankStatus

_NAMED = 16
"""Missing ranks that are named one by one."""


class Place(NamedTuple):
    """A rank in the words of a message: its group (``dp 1 ``, or nothing), node and number."""

    group: str
    node: str
    rank: int


@dataclass(frozen=True)
class Mismatch:
    """Ranks that differ from the others, or from what was asked for."""

    what: str
    """A variable, or another property of a rank."""
    places: tuple[Place, ...]
    text: str
    start: bool = False
    """Whether a strict server starts all the same: SGLang replaced what only the shell had."""


def mismatches(groups: Sequence[Sequence[RankStatus]]) -> tuple[Mismatch, ...]:
    """Every rank that is missing, differs from the others, or has not what was asked for.

    One group for each data-parallel replica; values must agree between them too.
    """
    ranks = {place: rank for place, rank in places(groups).items() if not rank.problem}
    found = [m for at in range(len(groups)) for m in _absent(_label(groups, at), groups[at])]
    for what, read in _PROPERTIES.items():
        found += _differing(what, {place: str(read(rank)) for place, rank in ranks.items()})
    for name in dict.fromkeys(name for rank in ranks.values() for name in rank.variables):
        have = {place: rank.variables.get(name) for place, rank in ranks.items()}
        values = {place: show(v.effective if v else None) for place, v in have.items()}
        states = {place: v.status if v else UNSET for place, v in have.items()}
        found += _differing(name, values) or _differing(name, states)
    return (*found, *_broken(ranks))


def places(groups: Sequence[Sequence[RankStatus]]) -> dict[Place, RankStatus]:
    """Every rank by its place."""
    return {
        Place(_label(groups, at), rank.node, rank.rank): rank
        for at, group in enumerate(groups)
        for rank in group
    }


def _label(groups: Sequence[Sequence[RankStatus]], at: int) -> str:
    return f"dp {at} " if len(groups) > 1 else ""


_PROPERTIES: Mapping[str, Callable[[RankStatus], object]] = {
    "world size": lambda rank: rank.world_size,
    "NCCL version": lambda rank: rank.nccl_version,
    "NCCL library": lambda rank: rank.library,
    "installed NCCL": lambda rank: rank.packaged_version,
}


def _absent(name: str, group: Sequence[RankStatus]) -> Iterator[Mismatch]:
    seen = Counter(rank.rank for rank in group)
    size = max((rank.world_size for rank in group), default=0)
    missing = (rank for rank in range(size) if rank not in seen)
    for absent in islice(missing, _NAMED):
        text = f"{name}rank {absent} is missing: {len(seen)} of {size} ranks left evidence"
        yield Mismatch("rank", (), text)
    for rank in group:
        place = Place(name, rank.node, rank.rank)
        if rank.problem:
            yield Mismatch("rank", (place,), f"{where([place])} has no evidence: {rank.problem}")
        if seen[rank.rank] > 1 or not 0 <= rank.rank < size:
            yield Mismatch("rank", (place,), f"{where([place])} is there twice, or beyond {size}")


def _differing(what: str, values: Mapping[Place, str]) -> list[Mismatch]:
    usual = Counter(values.values()).most_common(1)[0][0] if values else ""
    by_value: dict[str, list[Place]] = {}
    for place, value in values.items():
        by_value.setdefault(value, []).append(place)
    odd = tuple(place for place, value in values.items() if value != usual)
    text = "; ".join(f"{value} on {where(own)}" for value, own in by_value.items())
    return [Mismatch(what, odd, f"{what} differs: {text}")] if odd else []


def _broken(ranks: Mapping[Place, RankStatus]) -> Iterator[Mismatch]:
    """What was asked for and is not so, alike on every rank or not."""
    faults: dict[tuple[str, str, bool], list[Place]] = {}
    for place, rank in ranks.items():
        loaded, packaged = rank.nccl_version, rank.packaged_version
        if loaded and packaged and not f"{packaged}.".startswith(f"{loaded}."):
            text = f"NCCL {loaded} is loaded, {packaged} is installed"
            faults.setdefault(("NCCL version", text, False), []).append(place)
        for name, v in rank.variables.items():
            if v.status in (REQUESTED, LATE) or v.status.startswith(OVERRIDDEN):
                text = f"{name}={show(v.effective)}: {v.status} ({v.evidence})"
                start = v.source == SHELL and v.status.startswith(OVERRIDDEN)
                faults.setdefault((name, text, start), []).append(place)
    for (what, text, start), own in faults.items():
        yield Mismatch(what, tuple(own), f"{text}, on {where(own)}", start)


def where(ranks: Iterable[Place]) -> str:
    """Ranks in the words of a message, by node."""
    nodes: dict[tuple[str, str], list[int]] = {}
    for place in sorted(ranks):
        nodes.setdefault((place.group, place.node), []).append(place.rank)
    return ", ".join(
        f"{group}rank{'s' * (len(numbers) > 1)} {format_ranges(numbers)} ({node})"
        for (group, node), numbers in nodes.items()
    )


def show(value: str | None) -> str:
    """A value in a message."""
    return UNSET if value is None else value or "''"
