"""Times served decode rounds without a synchronisation: start to start of two like rounds.

A round is counted when the next one began with the same batch and step count and no other forward
of the target ran between: no prefill, no idle time, no switch. On a GPU the starts are events on
the forward stream, read some rounds later; one that is not ready by then is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_RING = 8


class RoundTimer:
    """Mean and least round time per (batch, draft_steps), in milliseconds.

    ``on_sample`` is told each one: batch, draft steps, milliseconds.
    """

    def __init__(self, device: str) -> None:
        self.on_sample: Callable[[int, int, float], None] | None = None
        self._events: list[Any] = []
        if device == "cuda":
            import torch

            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(_RING)]
        self._starts = [0.0] * _RING
        self._keys = [(0, -1)] * _RING
        self._passes = [0] * _RING
        self._at = 0
        self.sums: dict[tuple[int, int], list[float]] = {}
        """Rounds, their milliseconds, and those of the shortest, by (batch, draft steps)."""

    def start(self, batch: int, draft_steps: int, forward_pass: int) -> None:
        """The head of a decode round, on its stream; ``forward_pass`` counts target forwards."""
        slot = self._at % _RING
        self._collect(slot)
        self._keys[slot] = (batch, draft_steps)
        self._passes[slot] = forward_pass
        if self._events:
            self._events[slot].record()
        else:
            self._starts[slot] = time.perf_counter()
        self._at += 1

    def _collect(self, slot: int) -> None:
        """Before a slot is used again, read the round between it and its successor."""
        after = (slot + 1) % _RING
        key = self._keys[slot]
        consecutive = self._passes[after] == self._passes[slot] + 1
        if self._at < _RING or key != self._keys[after] or not consecutive:
            return
        if self._events:
            if not self._events[after].query():
                return
            elapsed = self._events[slot].elapsed_time(self._events[after])
        else:
            elapsed = 1e3 * (self._starts[after] - self._starts[slot])
        if self.on_sample is not None:
            self.on_sample(*key, elapsed)
        stats = self.sums.get(key)
        if stats is None:
            self.sums[key] = [1, elapsed, elapsed]
        else:
            stats[0] += 1
            stats[1] += elapsed
            stats[2] = min(stats[2], elapsed)

    def snapshot(self) -> dict[str, dict[str, float]]:
        return {
            f"{batch}x{steps}": {
                "rounds": int(n),
                "mean_ms": round(total / n, 4),
                "least_ms": round(least, 4),
            }
            for (batch, steps), (n, total, least) in sorted(self.sums.items())
        }
