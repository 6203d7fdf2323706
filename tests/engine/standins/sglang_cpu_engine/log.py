"""What tests read: which graphs were captured, and which were replayed how often."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Graph(NamedTuple):
    """One captured shape. `width` is tokens per request; `draft` runs `steps - 1` forwards.

    Runners of before 0.5.14 do not say which `size` they capture.
    """

    phase: str
    steps: int | None
    width: int
    size: int | None


class GraphLog:
    """Counters that only grow: compare two readings to see that nothing was captured between."""

    def __init__(self) -> None:
        self.captures: Counter[Graph] = Counter()
        self.replays: Counter[Graph] = Counter()

    def phase_replays(self) -> dict[str, int]:
        """Replays of each phase, all shapes together."""
        totals: Counter[str] = Counter()
        for graph, count in self.replays.items():
            totals[graph.phase] += count
        return dict(totals)
