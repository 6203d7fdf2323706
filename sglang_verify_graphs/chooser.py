"""Which draft steps pay, and which are worth a look: what rank 0 decides for all.

The choice is the captured step count that commits most tokens per second, by what was measured and
by nothing else: neither cost nor choice need be monotone in the steps or the batch. What was not
measured is probed, and guesses serve to price and order probes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sglang_verify_graphs.acceptance import Acceptance
from sglang_verify_graphs.buckets import CapturePlan
from sglang_verify_graphs.costs import RoundCosts
from sglang_verify_graphs.estimate import Estimate

HYSTERESIS = 0.01
"""A choice must be beaten by this much: the noise of two costs and an accept length."""
PROBE_ROUNDS = 3
"""Two of three like rounds in a row are timed (``rounds.py``)."""
NO_PROBE = -1

_SPEND, _SAVE = 0.012, 3.0
"""Probes may lose this share of all tokens, and at most this many rounds' worth saved up: over
1,000 rounds 12 + 3, and what single probes took beyond 3. Of that, debt beyond 1.5 is forgiven, so
that a probe in a large batch does not blind a small one; the waits below keep dear probes rare."""
_NARROWER, _WIDER = 1.25, 2.0
"""Without any guess a round is charged as so many of the choice, until its cost is known."""
_LEAST_LOSS = 0.05
"""Charged for any probe round: two switches, and an estimate that may be wrong."""
_PROMISING, _DISABLED = 0.005, 0.001
"""Share of the tokens that probes of one step count may lose: if it may be the better one by the
bounds of what is known, and if not. The dearer, the rarer."""
_SOON, _LATER, _HOPE = 16, 64, 1.1
"""Least rounds between two probes of a step count: the first while it may be better and its cost is
unknown, or may be better by a tenth; else the second."""
_BLIND = 192
"""Rounds without drafts after which some are drafted: nothing else shows that acceptance rose."""


@dataclass(eq=False)
class _Bucket:
    """One bucket: what is done in it, and when its other step counts were probed."""

    at: int
    batch: int
    captured: tuple[int, ...]
    chosen: int
    probe: int = NO_PROBE
    settled: bool = False
    """Has costs to compare; until then it follows its nearest settled neighbour."""
    costs: dict[int, Estimate] = field(default_factory=dict)
    """Known at this decision."""
    asked: dict[int, int] = field(default_factory=dict)
    """Round of the last probe of a step count."""
    owed: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Probe rounds of a step count of unknown cost, and what was charged for them by guess."""


class StepChooser:
    """A choice and a probe for every bucket, each time that ``choose`` is called."""

    def __init__(self, plan: CapturePlan, configured: int, costs: RoundCosts) -> None:
        self.costs = costs
        self.zero = 0
        """Under which 0 steps are found in the costs: there, or at ``PLAIN_DECODE``."""
        self.acceptance = Acceptance(max(plan.steps))
        self.batches = sorted({b for w in plan.widths for b in w.batches} | {plan.max_batch})
        """Largest batch of each bucket; the last may be one that no graph holds."""
        self._buckets = []
        for at, batch in enumerate(self.batches):
            fitting = [w for w in plan.widths if w.bucket_for(batch, padding=plan.padding)]
            captured = tuple(sorted(w.draft_steps for w in fitting or plan.widths))
            chosen = configured if configured in captured else captured[-1]
            self._buckets.append(_Bucket(at, batch, captured, chosen))
        self.captured = [bucket.captured for bucket in self._buckets]
        self._lengths = self.acceptance.expected()
        self._budget = 0.0
        self._probing = False
        self._round = 0
        self._drafted_at = 0

    @property
    def chosen(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Step count and probe of each bucket."""
        return tuple(b.chosen for b in self._buckets), tuple(b.probe for b in self._buckets)

    def verified(self, draft_steps: int, correct_drafts: Iterable[int]) -> None:
        """As ``Acceptance.observe``; a round without drafts says nothing."""
        if draft_steps:
            self._drafted_at = self._round
            self.acceptance.observe(draft_steps, correct_drafts)

    def choose(self, now: int, visits: Sequence[int], probed: Sequence[int]) -> None:
        """Decide before round ``now``, after these rounds and probe rounds in each bucket."""
        self._round = now
        self._lengths = self.acceptance.expected()
        turn = now % len(self._buckets)  # of those that were not visited, one each time
        due = [bucket for bucket in self._buckets if visits[bucket.at] or bucket.at == turn]
        for bucket in due:
            known = {k: self.costs.round(bucket.batch, k or self.zero) for k in bucket.captured}
            bucket.costs = {k: cost for k, cost in known.items() if cost}
            bucket.settled = len(bucket.costs) > 1
        self._account(due, visits, probed)
        for bucket in due:
            bucket.probe = NO_PROBE
            if bucket.chosen in bucket.costs:
                bucket.chosen = self._best(bucket)
                bucket.probe = self._next_probe(bucket)
        settled = [bucket for bucket in self._buckets if bucket.settled]
        for bucket in self._buckets:
            if settled and not bucket.settled:
                near = min(settled, key=lambda other: abs(other.at - bucket.at)).chosen
                bucket.chosen = near if near in bucket.captured else bucket.chosen

    def _length(self, steps: int) -> float:
        """Accept length of a choice: expected, or at most while a draft is unknown."""
        value, most = self._lengths[steps]
        return most if value is None else value

    def _best(self, bucket: _Bucket) -> int:
        best = bucket.chosen
        least = (1 + HYSTERESIS) * self._length(best) / bucket.costs[best].value
        for steps, cost in bucket.costs.items():
            value, _ = self._lengths[steps]
            if value is not None and value / cost.value > least:
                best, least = steps, value / cost.value
        return best

    def _next_probe(self, bucket: _Bucket) -> int:
        """The step count worth a look that loses least, if that is affordable."""
        rate = self._length(bucket.chosen) / bucket.costs[bucket.chosen].value
        blind = bucket.chosen == 0 and self._round - self._drafted_at >= _BLIND
        found = []
        for steps in bucket.captured:
            since = self._round - bucket.asked.get(steps, -math.inf)
            if steps == bucket.chosen or (since < _SOON and not blind):
                continue
            known, guess = bucket.costs.get(steps), self._guess(bucket, steps)
            low = known.low if known else guess or 0.0
            potential = self._lengths[steps][1] / (rate * low) if low else math.inf
            loss = self._loss(bucket, steps, guess)
            wait = max(_LATER, PROBE_ROUNDS * loss / (_PROMISING if potential > 1 else _DISABLED))
            if potential > (_HOPE if known else 1):
                wait = _SOON
            if blind or since >= wait:
                found.append((guess is not None, loss, steps))
        _, loss, steps = min(found, default=(True, 0.0, NO_PROBE))
        affordable = min(PROBE_ROUNDS * loss, _SAVE) * bucket.batch <= self._budget
        return steps if affordable or loss <= _LEAST_LOSS else NO_PROBE

    def _guess(self, bucket: _Bucket, steps: int) -> float | None:
        """The cost if it is known, else a guess, which is for probes alone.

        Over the cost of the choice as in the nearest bucket that knows both; else on the line
        through the two step counts of this bucket that are known and nearest.
        """
        if steps in bucket.costs:
            return bucket.costs[steps].value
        chosen = bucket.chosen
        both = [b for b in self._buckets if steps in b.costs and chosen in b.costs]
        if both:
            near = min(both, key=lambda other: abs(other.at - bucket.at)).costs
            return bucket.costs[chosen].value * near[steps].value / near[chosen].value
        if len(bucket.costs) < 2:
            return None
        k0, k1 = sorted(bucket.costs, key=lambda known: abs(known - steps))[:2]
        c0, c1 = bucket.costs[k0].value, bucket.costs[k1].value
        return max(c0 + (c1 - c0) * (steps - k0) / (k1 - k0), min(c0, c1) / 2)

    def _loss(self, bucket: _Bucket, steps: int, guess: float | None) -> float:
        """Tokens that a probe round of this cost loses, in tokens of a round of the choice."""
        length, cost = self._length(bucket.chosen), bucket.costs[bucket.chosen].value
        if guess is None:
            return (_NARROWER if steps < bucket.chosen else _WIDER) - 1 / length
        return max(_LEAST_LOSS, guess / cost - (self._lengths[steps][0] or 1.0) / length)

    def _account(self, due: list[_Bucket], visits: Sequence[int], probed: Sequence[int]) -> None:
        """What the rounds since the last decision earned for probes, and what probes took.

        The unit is the tokens of one request in one round of the choice. A probe of unknown cost
        is charged by guess, and again once the cost is known.
        """
        rounds = sum(visits)
        requests = sum(n * batch for n, batch in zip(visits, self.batches, strict=True))
        if rounds:
            full = _SAVE * requests / rounds
            saved = min(self._budget + _SPEND * requests, full)
            self._budget = max(saved, -full / 2) if self._probing else full
        for bucket in due:
            if bucket.chosen not in bucket.costs:
                continue
            for steps in [k for k in bucket.owed if k in bucket.costs]:
                count, charged = bucket.owed.pop(steps)
                self._budget += charged - count * bucket.batch * self._loss(
                    bucket, steps, self._guess(bucket, steps)
                )
            if probed[bucket.at]:
                steps, count = bucket.probe, probed[bucket.at]
                charge = (
                    count * bucket.batch * self._loss(bucket, steps, self._guess(bucket, steps))
                )
                self._budget -= charge
                self._probing = True
                bucket.asked[steps] = self._round
                if steps not in bucket.costs:
                    before, charged = bucket.owed.get(steps, (0, 0.0))
                    bucket.owed[steps] = before + count, charged + charge
