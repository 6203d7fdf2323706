"""Which (batch, draft_steps) pairs get a graph, in which order, and what each width may cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, order=True)
class VerifyBucket:
    """One captured verify graph: ``batch`` requests of ``width`` tokens each."""

    draft_steps: int
    batch: int
    width: int = 0
    """Tokens verified per request: a chain's drafts and the bonus token before them (the default),
    or the nodes of a tree."""

    def __post_init__(self) -> None:
        if not self.width:
            object.__setattr__(self, "width", self.draft_steps + 1)

    @property
    def rows(self) -> int:
        """Tokens of one replay, padding included."""
        return self.batch * self.width

    def padded_rows(self, batch: int) -> int:
        """Tokens of a replay that belong to no request when ``batch`` requests run in it."""
        return (self.batch - batch) * self.width


@dataclass(frozen=True)
class WidthPlan:
    """The ladder of batches captured for one draft step count, ascending."""

    draft_steps: int
    batches: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    """Batches of the full ladder that the memory budget left no room for."""
    width: int = 0
    """As in ``VerifyBucket``."""

    def __post_init__(self) -> None:
        if not self.width:
            object.__setattr__(self, "width", self.draft_steps + 1)

    def bucket(self, batch: int) -> VerifyBucket:
        return VerifyBucket(self.draft_steps, batch, self.width)

    def bucket_for(self, batch: int, *, padding: bool = True) -> VerifyBucket | None:
        """The smallest captured bucket that holds ``batch`` requests, if there is one."""
        at = bisect_left(self.batches, batch)
        if batch < 1 or at == len(self.batches):
            return None
        size = self.batches[at]
        return self.bucket(size) if padding or size == batch else None

    def mean_padded_rows(self, max_batch: int) -> float:
        """Padded rows of a verify, averaged over the covered batches up to ``max_batch``."""
        pads = [
            bucket.padded_rows(batch)
            for batch in range(1, max_batch + 1)
            if (bucket := self.bucket_for(batch))
        ]
        return sum(pads) / len(pads) if pads else 0.0

    def fit(self, free_bytes: int, bytes_per_graph: float) -> WidthPlan:
        """Drop the largest batches until the predicted memory fits ``free_bytes``.

        The largest go first because a verify that runs eager costs launches, and launches weigh
        least in a large batch.
        """
        room = len(self.batches)
        while room and room * bytes_per_graph > free_bytes:
            room -= 1
        return self._first(room)

    def up_to(self, largest: int) -> WidthPlan:
        """Drop the batches above ``largest``."""
        return self._first(bisect_right(self.batches, largest))

    def _first(self, count: int) -> WidthPlan:
        return replace(
            self, batches=self.batches[:count], dropped=self.batches[count:] + self.dropped
        )


@dataclass(frozen=True)
class CapturePlan:
    """Every reachable bucket, widest width first."""

    widths: tuple[WidthPlan, ...]
    max_batch: int
    """Largest batch that the scheduler can form."""
    padding: bool = True

    def __iter__(self) -> Iterator[VerifyBucket]:
        """Buckets in capture order: widest first, largest first, so that memory is reused."""
        for width in self.widths:
            for batch in reversed(width.batches):
                yield width.bucket(batch)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(width.draft_steps for width in self.widths)

    def width(self, draft_steps: int) -> WidthPlan | None:
        return next((w for w in self.widths if w.draft_steps == draft_steps), None)

    def uncovered(self, draft_steps: int) -> tuple[int, ...]:
        """Batches up to ``max_batch`` that would verify eagerly at ``draft_steps``."""
        width = self.width(draft_steps)
        return tuple(
            batch
            for batch in range(1, self.max_batch + 1)
            if width is None or width.bucket_for(batch, padding=self.padding) is None
        )

    def replace_width(self, new: WidthPlan) -> CapturePlan:
        widths = tuple(new if w.draft_steps == new.draft_steps else w for w in self.widths)
        return replace(self, widths=widths)


def batch_ladder(max_batch: int) -> tuple[int, ...]:
    """Batches to capture up to ``max_batch``: by 2 to 8, by 4 to 32, by quarter octaves above.

    About half as many graphs as SGLang's own list (1..8, 10..32 by 2, 40..64 by 4), for at most a
    quarter of padding above 12; at the small end verify is bound by weights and padding is free.
    """
    sizes, size = [], 1
    while size < max_batch:
        sizes.append(size)
        size += 1 if size < 2 else 2 if size < 8 else max(4, 2 ** (size.bit_length() - 3))
    return (*sizes, max_batch)


def plan_capture(
    steps: Iterable[int],
    max_batch: int,
    *,
    draft_tokens: int = 0,
    cap: int | None = None,
    ladder: Sequence[int] | None = None,
    padding: bool = True,
    alignment: int = 1,
) -> CapturePlan:
    """Plan the graphs for ``steps`` and batches 1..``max_batch``.

    ``draft_tokens`` is the width of a tree, which has one step count only. ``cap`` is the largest
    batch the user allows; ``ladder`` replaces the default one; without ``padding`` every batch
    needs its own graph. ``alignment``: tokens of a graph must be a multiple of it (attention TP
    with a gathered buffer), so batches are rounded up for widths that need it.
    """
    top = max_batch if cap is None else min(cap, max_batch)
    if ladder is None:
        ladder = batch_ladder(top) if padding else range(1, top + 1)
    batches = sorted({b for b in ladder if 1 <= b <= top})
    widths = []
    for k in sorted(set(steps), reverse=True):
        aligned = {_align(batch, draft_tokens or k + 1, alignment) for batch in batches}
        widths.append(WidthPlan(k, tuple(sorted(aligned)), width=draft_tokens))
    return CapturePlan(tuple(widths), max_batch, padding)


def _align(batch: int, width: int, alignment: int) -> int:
    while batch * width % alignment:
        batch += 1
    return batch


def format_ranges(batches: Iterable[int]) -> str:
    """``(1, 2, 3, 40)`` as ``1-3, 40``."""
    runs: list[list[int]] = []
    for batch in batches:
        if runs and batch == runs[-1][1] + 1:
            runs[-1][1] = batch
        else:
            runs.append([batch, batch])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)
