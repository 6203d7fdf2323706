"""The engines that are compared, each with the calls that SGLang makes of its controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from benchmarks.simulation.world import STEPS, Hardware, accept_length
from sglang_verify_graphs.buckets import plan_capture
from sglang_verify_graphs.policy import MeasuredSteps


class Engine(Protocol):
    def draft_steps(self, batch: int) -> int: ...

    def verified(self, draft_steps: int, correct_drafts: list[int]) -> None:
        """One round late."""

    def timed(self, batch: int, draft_steps: int, ms: float) -> None:
        """A ring of events late."""


class Static:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def draft_steps(self, batch: int) -> int:
        return self.steps

    def verified(self, draft_steps: int, correct_drafts: list[int]) -> None:
        pass

    def timed(self, batch: int, draft_steps: int, ms: float) -> None:
        pass


class Oracle(Static):
    """Knows every cost, and the acceptance of the very moment."""

    def __init__(self, hardware: Hardware, chain: Callable[[], list[float]]) -> None:
        super().__init__(0)
        self._hardware = hardware
        self._chain = chain

    def draft_steps(self, batch: int) -> int:
        chain = self._chain()
        return max(STEPS, key=lambda k: accept_length(chain, k) / self._hardware.round(batch, k))


class Measured:
    """Ours, on one rank: the table takes the same road as on many."""

    def __init__(self, max_batch: int, configured: int) -> None:
        self.policy = MeasuredSteps(plan_capture(STEPS, max_batch), configured)
        self.verified = self.policy.verified
        self.timed = self.policy.timed

    def draft_steps(self, batch: int) -> int:
        if self.policy.due:
            self.policy.install(self.policy.decide().pack())
        return self.policy.draft_steps(batch)


STOCK_SCHEDULE = {1: (1, 3, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""Smallest batch of a tier and its candidates: SGLang 0.5.17, adaptive_spec_params.py:22-47."""


class StockAdaptive(Static):
    """SGLang's ``--speculative-adaptive``, as 0.5.17 decides (adaptive_spec_params.py:140-262).

    Acceptance alone: every tier of batches follows a moving average of the drafts accepted in a
    round. Every fifth round it goes down while the average does not exceed the next lower
    candidate less a half, and otherwise up while the average exceeds the current one less a half.
    From 0 it goes up a candidate every time. Cost is not asked for.
    """

    def __init__(self, configured: int, schedule: dict[int, tuple[int, ...]]) -> None:
        self._tiers = [
            (least, _Tier(configured, candidates, -0.25 if least == 1 else 0.0))
            for least, candidates in sorted(schedule.items(), reverse=True)
        ]

    def draft_steps(self, batch: int) -> int:
        return self._tier(batch).steps

    def verified(self, draft_steps: int, correct_drafts: list[int]) -> None:
        self._tier(len(correct_drafts)).update(correct_drafts)

    def _tier(self, batch: int) -> _Tier:
        return next(tier for least, tier in self._tiers if batch >= least)


class _Tier:
    def __init__(self, configured: int, candidates: tuple[int, ...], down: float) -> None:
        self.candidates = candidates
        middle = candidates[len(candidates) // 2]
        self.steps = configured if configured in candidates else middle
        self.average = self.steps - 1.0
        self.down = down
        self.rounds = 0

    def update(self, correct_drafts: list[int]) -> None:
        if self.steps:
            self.average += 0.2 * (sum(correct_drafts) / len(correct_drafts) - self.average)
        self.rounds += 1
        if self.rounds <= 10 or self.rounds % 5:
            return
        at = start = self.candidates.index(self.steps)
        if self.steps == 0:
            at = min(at + 1, len(self.candidates) - 1)
            if self.average < 0 < self.candidates[at]:
                self.average = self.candidates[at] - 1.0
        else:
            while at and self.average <= max(self.candidates[at - 1], 1) - 0.5 + self.down:
                at -= 1
            while (
                at >= start
                and at < len(self.candidates) - 1
                and self.average > self.candidates[at] - 0.5
            ):
                at += 1
        self.steps = self.candidates[at]
