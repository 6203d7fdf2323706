"""What a verify accepted, credited to the step count that ran it.

Results come one round late and while the worker may already run another width, so the width is read
from the result. Requests whose draft KV has holes, because rounds without drafts skipped the draft
extend, are *cold*: they accept next to nothing, for as long as they live, and say nothing of the
draft. They are counted apart and kept out of the radix cache, where others would inherit the holes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_verify_graphs.metrics import Counters
from sglang_verify_graphs.policy import MeasuredSteps

_COLD = "_verify_graphs_cold"
_RETURN_ROUNDS = 16
"""Rounds with drafts after some without: what they accept is told apart, because a draft that was
not kept warm fails here and nowhere else."""


class Feedback:
    """One per rank; counts and marks on all, feeds the policy on rank 0."""

    def __init__(
        self, counters: Counters, keep_uncached: Callable[[Any], None],
        policy: MeasuredSteps | None,
    ) -> None:  # fmt: skip
        self.counters = counters
        self.skips_extend = False
        """Rounds of 0 steps skip the draft extend: their requests are cold from then on."""
        self._policy = policy
        self._keep_uncached = keep_uncached
        self._skipped_before = False
        self._any_cold = False
        self._steps: int | None = None
        self._requests: Sequence[Any] = ()
        self._returning = 0

    def result(self, width: int, requests: Sequence[Any]) -> None:
        """A result is about to be taken up: the width that it ran, and its requests."""
        self._steps, self._requests = width - 1, requests

    def verified(self, correct_drafts: Sequence[int]) -> None:
        """Correct drafts of each request of that result."""
        self.counters.accept(correct_drafts)
        steps = self._steps
        if steps is None:
            return  # a release of one width: nothing was named, nothing is chosen
        skipped = self.skips_extend or self._skipped_before
        self._skipped_before = self.skips_extend
        if steps == 0:
            self._returning = _RETURN_ROUNDS
            if skipped:
                self._mark()
            return
        if self._returning:
            self._returning -= 1
            self.counters.accept_after_zero(correct_drafts)
        warm = correct_drafts
        if self._any_cold:
            cold = [getattr(request, _COLD, False) for request in self._requests]
            warm = [n for n, is_cold in zip(correct_drafts, cold, strict=True) if not is_cold]
        if self._policy is not None:
            self._policy.verified(steps, warm)

    def _mark(self) -> None:
        self._any_cold = True
        for request in self._requests:
            if not getattr(request, _COLD, False):
                setattr(request, _COLD, True)
                self._keep_uncached(request)
