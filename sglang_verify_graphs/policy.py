"""How many draft steps the next decode round takes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglang_verify_graphs.acceptance import Acceptance
from sglang_verify_graphs.buckets import CapturePlan
from sglang_verify_graphs.costs import RoundCosts
from sglang_verify_graphs.errors import AttestationError

PERIOD = 8
"""Rounds between two decisions: 400 verified requests are 8 rounds of a batch of 48."""
DWELL = 4
"""Least rounds from one switch to the next, so that a batch between two buckets cannot flap."""
HYSTERESIS = 0.01
"""A choice must be beaten by this much: the noise of two costs and an accept length."""
PROBE_ROUNDS = 3
"""Two of three like rounds in a row are timed (``rounds.py``)."""
NO_PROBE = -1

_SPEND, _SAVE = 0.012, 3.0
"""Probes may lose this share of all tokens, and at most this many rounds' worth saved up: over
1,000 rounds 12 + 3, and what the last probe took beyond 3. That is within 2% while no probe loses
more than 8, which takes rounds 3.5 times as dear as those of the choice."""
_UNKNOWN_COST = 2.0
"""A round of unknown cost is charged as this many of the dearest known, until it is measured."""
_LEAST_LOSS = 0.05
"""Charged for any probe round: two switches, and an estimate that may be wrong."""
_SOON, _LATER, _LATEST = 16, 64, 2048
"""Rounds until a step count is probed again: while its cost is unknown, while it may be the better
one, and at most while it is not (from ``_LATER`` on, doubled with every probe)."""
_BLIND = 128
"""Rounds without drafts after which some are drafted: nothing else shows that acceptance rose."""


class Policy(Protocol):
    """Asked once at the head of each decode round, on every rank alike."""

    def draft_steps(self, batch: int) -> int:
        """Steps for a round of ``batch`` requests; must be one of the captured step counts."""
        ...


class FixedSteps:
    """The same step count always: SGLang's own behaviour without ``--speculative-adaptive``."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def draft_steps(self, batch: int) -> int:
        return self._steps


class ScriptedSteps:
    """Cycles through a list, one entry a round, so that tests reach every switch."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = tuple(script)
        self._round = -1

    def draft_steps(self, batch: int) -> int:
        self._round = (self._round + 1) % len(self._script)
        return self._script[self._round]


@dataclass(frozen=True)
class StepTable:
    """What every rank does until the next table; one entry per bucket, ascending."""

    round: int
    """Decode rounds before the first one under this table."""
    held: int
    """Step count of the round before."""
    steps: tuple[int, ...]
    probes: tuple[int, ...]
    """Tried in the first ``PROBE_ROUNDS`` rounds instead, unless ``NO_PROBE``."""

    def pack(self) -> list[int]:
        """For a broadcast: as many integers for every table of one plan."""
        return [self.round, self.held, *self.steps, *self.probes]

    @classmethod
    def unpack(cls, payload: Sequence[int]) -> StepTable:
        half = 1 + len(payload) // 2
        return cls(payload[0], payload[1], tuple(payload[2:half]), tuple(payload[half:]))


@dataclass
class _Bucket:
    """What rank 0 knows of a bucket."""

    batch: int
    captured: tuple[int, ...]
    chosen: int
    settled: bool = False
    """Chosen by its own costs; until then it follows its nearest settled neighbour."""
    probe: int = NO_PROBE
    asked: dict[int, int] = field(default_factory=dict)
    """Round of the last probe of a step count."""
    wait: dict[int, int] = field(default_factory=dict)
    owed: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Probe rounds of a step count of unknown cost, and what was charged for them by guess."""


class MeasuredSteps:
    """The step count that commits most tokens per second, by measured cost and acceptance.

    Rank 0 is fed and decides; every rank looks up. At the head of each decode round a rank calls
    ``install`` with rank 0's ``decide().pack()`` when ``due``, and then ``draft_steps``.
    """

    def __init__(self, plan: CapturePlan, configured: int, costs: RoundCosts | None = None) -> None:
        self.costs = costs or RoundCosts()
        self.acceptance = Acceptance(max(plan.steps))
        batches = sorted({b for w in plan.widths for b in w.batches} | {plan.max_batch})
        self._bucket_of = [bisect_left(batches, batch) for batch in range(batches[-1] + 1)]
        self._buckets = []
        for batch in batches:
            fitting = [w for w in plan.widths if w.bucket_for(batch, padding=plan.padding)]
            captured = tuple(sorted(w.draft_steps for w in fitting or plan.widths))
            chosen = configured if configured in captured else captured[-1]
            self._buckets.append(_Bucket(batch, captured, chosen))
        self._round = 0
        self._held = configured
        self._held_until = 0
        self._table = self._new_table()
        self._visits = [0] * len(batches)
        self._probed = [0] * len(batches)
        self._budget = math.inf
        self._changes = 0
        self._drafted_at = 0

    # -- every rank, every round -------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a table must be installed before this round: by its number, never by need."""
        return self._round % PERIOD == 0

    def install(self, payload: Sequence[int]) -> None:
        """Take rank 0's table over; a rank that has seen other rounds stops."""
        table = StepTable.unpack(payload)
        here = (self._round, self._held, len(self._buckets))
        if here != (table.round, table.held, len(table.steps)):
            raise AttestationError(
                f"ranks disagree on the draft steps: decode round {here[0]}, {here[1]} steps and "
                f"{here[2]} buckets here, round {table.round}, {table.held} steps and "
                f"{len(table.steps)} buckets on rank 0; restart the server and report it"
            )
        self._table = table

    def draft_steps(self, batch: int) -> int:
        number, bucket, table = self._round, self._bucket_of[batch], self._table
        self._round = number + 1
        self._visits[bucket] += 1
        probe = table.probes[bucket]
        if probe != NO_PROBE and number < table.round + PROBE_ROUNDS:
            self._probed[bucket] += 1
            return probe
        steps = table.steps[bucket]
        if steps != self._held and (
            number >= self._held_until or self._held not in self._buckets[bucket].captured
        ):
            self._held = steps
            self._held_until = number + DWELL
        return self._held

    # -- rank 0 ------------------------------------------------------------------------------------

    def timed(self, batch: int, draft_steps: int, ms: float) -> None:
        """A served round of ``batch`` requests took ``ms``, start to start."""
        self.costs.add(self._buckets[self._bucket_of[batch]].batch, draft_steps, ms)

    def verified(self, draft_steps: int, correct_drafts: Iterable[int]) -> None:
        """Correct drafts of the warm requests of a verify, at the steps that it ran with."""
        if draft_steps:
            self._drafted_at = self._round
            self.acceptance.observe(draft_steps, correct_drafts)

    def decide(self) -> StepTable:
        """The next table, from what was measured so far."""
        if self._changes != self.acceptance.changes:
            self._changes = self.acceptance.changes
            for bucket in self._buckets:
                bucket.asked.clear()
                bucket.wait.clear()
        turn = self._round // PERIOD % len(self._buckets)  # the unvisited ones, one at a time
        self._account()
        for at, bucket in enumerate(self._buckets):
            if self._visits[at] or at == turn:
                bucket.chosen = self._best(bucket)
                bucket.probe = self._next_probe(bucket)
            self._visits[at] = self._probed[at] = 0
        settled = [at for at, bucket in enumerate(self._buckets) if bucket.settled]
        for at, bucket in enumerate(self._buckets):
            if settled and not bucket.settled:
                near = self._buckets[min(settled, key=lambda other: abs(other - at))].chosen
                bucket.chosen = near if near in bucket.captured else bucket.chosen
        return self._new_table()

    def _new_table(self) -> StepTable:
        return StepTable(
            self._round, self._held,
            tuple(b.chosen for b in self._buckets), tuple(b.probe for b in self._buckets),
        )  # fmt: skip

    def _rate(self, bucket: _Bucket) -> float | None:
        """Tokens per ms and request of the choice; at most, while its acceptance is unknown."""
        cost = self.costs.round(bucket.batch, bucket.chosen)
        if cost is None:
            return None
        length = self.acceptance.accept_length(bucket.chosen)
        return (length.value if length else self.acceptance.most(bucket.chosen)) / cost.value

    def _best(self, bucket: _Bucket) -> int:
        """Every captured step count is compared: costs need not be monotone in steps or batch."""
        rate = self._rate(bucket)
        if rate is None:
            return bucket.chosen
        bucket.settled = True
        best, least = bucket.chosen, rate * (1 + HYSTERESIS)
        for steps in bucket.captured:
            cost = self.costs.round(bucket.batch, steps)
            length = self.acceptance.accept_length(steps)
            if cost and length and length.value / cost.value > least:
                best, least = steps, length.value / cost.value
        return best

    def _next_probe(self, bucket: _Bucket) -> int:
        """The cheapest step count worth a look, unknown costs first, if it is affordable."""
        rate = self._rate(bucket)
        if rate is None:
            return NO_PROBE
        due = []
        blind = bucket.chosen == 0 and self._round - self._drafted_at >= _BLIND
        for steps in bucket.captured:
            cost = self.costs.round(bucket.batch, steps)
            wait = _SOON
            if cost is not None:
                if self.acceptance.most(steps) / cost.low > rate:
                    bucket.wait[steps] = _LATER
                wait = bucket.wait.setdefault(steps, _LATER)
            since = self._round - bucket.asked.get(steps, -_LATEST)
            if steps != bucket.chosen and (since >= wait or blind):
                due.append((cost is not None, self._loss(bucket, steps), steps))
        for _, loss, steps in sorted(due)[:1]:
            if min(PROBE_ROUNDS * loss, _SAVE) * bucket.batch <= self._budget:
                return steps
        return NO_PROBE

    def _loss(self, bucket: _Bucket, steps: int) -> float:
        """Tokens that a probe round loses, in tokens of a round of the choice."""
        costs = {k: c.value for k in bucket.captured if (c := self.costs.round(bucket.batch, k))}
        rate = self._rate(bucket)
        if rate is None:
            return _UNKNOWN_COST
        length = self.acceptance.accept_length(steps)
        cost = costs.get(steps, _UNKNOWN_COST * max(costs.values()))
        lost = cost * rate - (length.value if length else 1.0)
        return max(_LEAST_LOSS, lost / (rate * costs[bucket.chosen]))

    def _account(self) -> None:
        """What the rounds since the last table earned for probes, and what probes in them cost.

        The unit is a request's tokens in one round. A probe of unknown cost was charged by guess,
        and is charged again once its cost is known.
        """
        rounds = sum(self._visits)
        requests = sum(n * b.batch for n, b in zip(self._visits, self._buckets, strict=True))
        if rounds:
            self._budget = min(self._budget + _SPEND * requests, _SAVE * requests / rounds)
        for bucket, probed in zip(self._buckets, self._probed, strict=True):
            for steps in [k for k in bucket.owed if self.costs.round(bucket.batch, k)]:
                before, charged = bucket.owed.pop(steps)
                self._budget += charged - before * bucket.batch * self._loss(bucket, steps)
            if probed:
                steps, charge = (
                    bucket.probe,
                    probed * bucket.batch * self._loss(bucket, bucket.probe),
                )
                self._budget -= charge
                bucket.asked[steps] = self._round
                if self.costs.round(bucket.batch, steps) is None:
                    before, charged = bucket.owed.get(steps, (0, 0.0))
                    bucket.owed[steps] = before + probed, charged + charge
                else:
                    bucket.wait[steps] = min(2 * bucket.wait.get(steps, _LATER), _LATEST)
