"""How likely each draft position is accepted, from the verified requests of served rounds.

A request of ``k`` drafts with ``c`` accepted has tried positions 1..c+1 and none past ``k``: what
was not tried says nothing (censoring), so positions are kept apart as *conditional* probabilities,
and a narrow round never counts against a wide one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_verify_graphs.estimate import Estimate

MIN_TRIALS = 4.0
"""Below, a position is unknown."""
_MEMORY = 400.0
"""Trials after which evidence weighs 1/e: an error of some 2% in the accept length."""
_DOUBTED = 8.0
"""Most trials that a position keeps when an earlier one was seen to change."""
_FOLLOW = 0.5
"""Share of that change, in log-odds, then expected of it: what raised an alarm is extreme."""
_SLACK = 0.03
"""Smallest change of a probability that is looked for."""
_ALARM = 6.0
"""Log-likelihood ratio of a change. A steady position raises a false alarm once in some 6,000
trials, and the accept length is off by some 1.5%; 400 requests after a change of all positions from
0.7 to 0.5 by some 5%, from 0.85 to 0.35 by 2% (means of simulated runs)."""
_SUSPECT = 2.0
"""Log-likelihood ratio from which a rise is worth a look before it is believed."""
_TOGETHER = 8
"""Requests that are counted before the estimate is brought up to date, unless it is asked for."""


class _Position:
    """Decayed counts, and the stretch of latest trials that fits them least, up and down.

    The stretches are those of a CUSUM: one starts again when it speaks against a change.
    """

    __slots__ = ("accepted", "rising", "stretches", "trials")

    def __init__(self) -> None:
        self.trials = 0.0
        self.accepted = 0.0
        self.rising = 0.0
        """Probability in the latest stretch, while that may be a rise."""
        self.stretches = {1: (0.0, 0.0), -1: (0.0, 0.0)}

    def add(self, trials: int, accepted: int) -> float:
        """Count; the change of the log-odds if one is seen, else 0."""
        decay = math.exp(-trials / _MEMORY)
        self.trials = decay * self.trials + trials
        self.accepted = decay * self.accepted + accepted
        for sign, (tried, passed) in self.stretches.items():
            tried, passed = decay * tried + trials, decay * passed + accepted
            others = self.trials - tried
            if others < MIN_TRIALS:
                self.stretches[sign] = 0.0, 0.0
                continue
            before = (self.accepted - passed) / others
            if sign * (passed - before * tried) <= _SLACK * tried:
                tried, passed = 0.0, 0.0
            self.stretches[sign] = tried, passed
            after, pooled = passed / tried if tried else before, self.accepted / self.trials
            apart = tried * _divergence(after, pooled) + others * _divergence(before, pooled)
            if sign > 0:
                self.rising = after if apart > _SUSPECT else 0.0
            if apart > _ALARM:
                self.trials, self.accepted = tried, passed
                self.stretches = dict.fromkeys(self.stretches, (0.0, 0.0))
                return _log_odds(after) - _log_odds(before)
        return 0.0

    def doubt(self, shift: float) -> None:
        """Expect to follow a change that was seen before this draft, with little confidence."""
        if self.trials:
            odds = math.exp(_FOLLOW * shift + _log_odds(self.accepted / self.trials))
            self.trials = min(self.trials, _DOUBTED)
            self.accepted = self.trials * odds / (1 + odds)


def _log_odds(p: float) -> float:
    p = min(max(p, 0.02), 0.98)
    return math.log(p / (1 - p))


def _divergence(p: float, q: float) -> float:
    """Kullback-Leibler divergence of two Bernoulli probabilities."""
    q = min(max(q, 1e-6), 1 - 1e-6)
    return (p * math.log(p / q) if p > 0 else 0.0) + (
        (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0
    )


class Acceptance:
    """Accept length of every step count, the bonus token included, on warm requests."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.observed = 0
        """Requests that were counted."""
        self.changes = 0
        """How often the traffic was seen to change."""
        self._positions = [_Position() for _ in range(max_steps)]
        self._counts = [[0] * (steps + 1) for steps in range(max_steps + 1)]
        """Requests since the last update, by draft steps and correct drafts."""
        self._requests = 0

    def observe(self, draft_steps: int, correct_drafts: Iterable[int]) -> None:
        """One verify: correct drafts of each *warm* request in it, at the width that it ran."""
        counts = self._counts[draft_steps]
        for drafts in correct_drafts:
            counts[min(drafts, draft_steps)] += 1
            self._requests += 1
            self.observed += 1
        if self._requests >= _TOGETHER:
            self._update()

    def _update(self) -> None:
        self._requests = 0
        for counts in self._counts:
            tried, shift = sum(counts), 0.0
            if not tried:
                continue
            for position, rejected in zip(self._positions, counts[:-1], strict=False):
                if shift:
                    position.doubt(shift)
                if tried:
                    shift += position.add(tried, tried - rejected)
                tried -= rejected
            if shift:
                self.changes += 1
                for position in self._positions[len(counts) - 1 :]:
                    position.doubt(shift)
            counts[:] = [0] * len(counts)

    def probability(self, position: int) -> Estimate | None:
        """That draft ``position`` (from 1) is accepted given those before it (Wilson interval)."""
        if self._requests:
            self._update()
        found = self._positions[position - 1]
        if found.trials < MIN_TRIALS:
            return None
        p, n, z2 = found.accepted / found.trials, found.trials, 1.96**2
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        reach = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        return Estimate(p, min(p, centre - reach), max(p, centre + reach))

    def accept_length(self, draft_steps: int) -> Estimate | None:
        """Tokens a request commits in a round; ``None`` while a position in it is unknown.

        The interval adds the positions' errors as independent ones (delta method).
        """
        found = [self.probability(position) for position in range(1, draft_steps + 1)]
        chain = [p for p in found if p is not None]
        if len(chain) < draft_steps:
            return None
        tail, below, above = 0.0, 0.0, 0.0
        for at in range(draft_steps - 1, -1, -1):
            p = chain[at]
            reached = math.prod(q.value for q in chain[:at])
            slope = reached * (1 + tail)
            below += (slope * (p.value - p.low)) ** 2
            above += (slope * (p.high - p.value)) ** 2
            tail = p.value * (1 + tail)
        value = 1 + tail
        return Estimate(
            value, max(1.0, value - math.sqrt(below)),
            min(1.0 + draft_steps, value + math.sqrt(above)),
        )  # fmt: skip

    def expected(self) -> list[tuple[float | None, float]]:
        """Accept length of 0, 1, 2, ... steps, and the most that it may be.

        The first is ``None`` from the first unknown position on; the second takes an unknown draft
        to be as likely as the one before it may be.
        """
        found: list[tuple[float | None, float]] = [(1.0, 1.0)]
        value: float | None = 1.0
        most = reached = reached_at_most = high = 1.0
        for position in range(1, len(self._positions) + 1):
            p = self.probability(position)
            if p is None or value is None:
                value = None
            else:
                reached *= p.value
                value += reached
            high = max(p.high, self._positions[position - 1].rising) if p else high
            reached_at_most *= high
            most += reached_at_most
            found.append((value, most))
        return found
