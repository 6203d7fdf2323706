"""The choice by measured cost and acceptance: the best, found cheaply, alike on all ranks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_verify_graphs.buckets import CapturePlan, WidthPlan, plan_capture
from sglang_verify_graphs.chooser import HYSTERESIS, NO_PROBE, PROBE_ROUNDS
from sglang_verify_graphs.costs import CostKey, CostRow, CostTable, RoundCosts
from sglang_verify_graphs.errors import AttestationError
from sglang_verify_graphs.policy import DWELL, PERIOD, MeasuredSteps, StepTable

STEPS = (0, 1, 2, 3)
LATE = 7


@dataclass
class Served:
    """Serves rounds as an engine does: timings some rounds late, acceptance one round late."""

    policy: MeasuredSteps
    cost: Callable[[int, int], float]
    """Of a batch and its steps, in ms."""
    chance: float
    """Of every draft, given those before it."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    steps: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    drafted: int = 0
    _timings: deque[tuple[int, int, float]] = field(default_factory=deque)
    _correct: list[int] = field(default_factory=list)

    def run(self, batches: Iterable[int]) -> None:
        for batch in batches:
            if self.policy.due:
                self.policy.install(self.policy.decide().pack())
            steps = self.policy.draft_steps(batch)
            if self.steps:
                if (self.batches[-1], self.steps[-1]) == (batch, steps):
                    self._timings.append((batch, steps, self._time(batch, steps)))
                if len(self._timings) > LATE:
                    self.policy.timed(*self._timings.popleft())
                self.policy.verified(self.steps[-1], self._correct)
            self._correct = [self._draw(steps) for _ in range(batch)]
            self.drafted += batch if steps else 0
            self.steps.append(steps)
            self.batches.append(batch)

    def _time(self, batch: int, steps: int) -> float:
        return self.cost(batch, steps) * self.rng.lognormvariate(0.0, 0.03)

    def _draw(self, steps: int) -> int:
        return next((at for at in range(steps) if self.rng.random() >= self.chance), steps)

    def rate(self, batch: int, steps: int) -> float:
        """Expected tokens per ms and request."""
        return sum(self.chance**at for at in range(steps + 1)) / self.cost(batch, steps)

    def lost_to_probes(self, batches: Sequence[int]) -> float:
        """Serve; the largest share of all tokens that other steps than the choice lost in 1,000
        rounds."""
        lost, tokens = [], []
        for start in range(0, len(batches), PERIOD):
            period = batches[start : start + PERIOD]
            self.run(period)
            choice = self.policy._held
            for batch, steps in zip(period, self.steps[-len(period) :], strict=True):
                got = self.rate(batch, steps)
                lost.append(batch * self.cost(batch, steps) * (self.rate(batch, choice) - got))
                tokens.append(batch * self.cost(batch, steps) * got)
        return max(
            sum(lost[at : at + 1000]) / sum(tokens[at : at + 1000])
            for at in range(0, len(lost) - 999, 100)
        )

    def of_best(self, since: int) -> float:
        """Tokens over those of the best step count in every round, in the same time."""
        got, best = 0.0, 0.0
        for batch, steps in zip(self.batches[since:], self.steps[since:], strict=True):
            ms = self.cost(batch, steps) * batch
            got += ms * self.rate(batch, steps)
            best += ms * max(self.rate(batch, k) for k in self.policy.chooser.captured[-1])
        return got / best


def line(decode: float, step: float) -> Callable[[int, int], float]:
    return lambda batch, steps: decode + step * steps


def served(cost: Callable[[int, int], float], chance: float, max_batch: int = 8) -> Served:
    return Served(MeasuredSteps(plan_capture(STEPS, max_batch), 3), cost, chance)


COSTS = st.fixed_dictionaries({k: st.floats(10.0, 34.0) for k in STEPS})
CHANCES = st.floats(0.1, 0.9)


class TestChoice:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(COSTS, min_size=5, max_size=5), CHANCES)
    def test_known_costs_give_the_best_in_every_bucket(
        self, costs: list[dict[int, float]], chance: float
    ) -> None:
        """Costs need not be monotone in the steps, nor choices in the batch."""
        plan = plan_capture(STEPS, 8)
        ladder = plan.widths[0].batches
        rows = [
            CostRow(batch, k, ms, ms, ms, 9)
            for batch, of_steps in zip(ladder, costs, strict=True)
            for k, ms in of_steps.items()
        ]
        table = CostTable(CostKey("", 1, "", "", "", "", ""), tuple(rows))
        policy = MeasuredSteps(plan, 3, RoundCosts(table))
        accepted = [round(1000 * chance**at) for at in range(5)]
        policy.verified(
            3, [at for at in range(4) for _ in range(accepted[at] - (at < 3) * accepted[at + 1])]
        )
        for _ in range(len(ladder) + 1):
            policy.install(policy.decide().pack())
            for _ in range(PERIOD):
                policy.draft_steps(1)
        values = policy.chooser.acceptance.expected()
        for at, of_steps in enumerate(costs):
            rates = {k: (values[k][0] or 0.0) / ms for k, ms in of_steps.items()}
            chosen = policy.decide().steps[at]
            assert rates[chosen] * (1 + HYSTERESIS) >= max(rates.values()) * (1 - 1e-9)

    @settings(max_examples=15, deadline=None)
    @given(COSTS, CHANCES, st.sampled_from([1, 8]))
    def test_it_finds_the_best_and_probes_cost_little(
        self, costs: dict[int, float], chance: float, batch: int
    ) -> None:
        world = served(lambda _, steps: costs[steps], chance)
        assert world.lost_to_probes([batch] * 2500) <= 0.02
        assert world.of_best(since=1500) >= 0.97

    @pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
    def test_dear_probes_keep_to_their_budget(self, chance: float) -> None:
        """Each draft step costs as much as two rounds without, and none of that is known."""
        assert served(line(10.0, 20.0), chance).lost_to_probes([1] * 2500) <= 0.02

    def test_losing_speculation_is_switched_off_and_looked_at_again(self) -> None:
        """8 GPUs over PCIe: decode 12 ms, verify of 3 tokens 29 ms, accept length about 2."""
        world = served(line(12.0, 8.5), 0.62)
        world.run([1] * 1000)
        assert world.policy._held == 0
        assert {1, 2} & set(world.steps[-600:])
        world.chance = 0.95
        world.run([1] * 3000)
        assert world.of_best(since=3000) >= 0.97

    def test_one_slow_first_verify_does_not_lock_speculation_out(self) -> None:
        """Case 15 of the field: five times too slow, for every step count."""
        slow = set(STEPS)

        def cost(batch: int, steps: int) -> float:
            factor = 5.0 if steps in slow else 1.0
            slow.discard(steps)
            return factor * (10.0 + steps)

        world = served(cost, 0.8)
        world.run([1] * 400)
        assert world.policy._held == 3

    @pytest.mark.parametrize("batch", [1, 8, 48])
    @pytest.mark.parametrize(("before", "after"), [(0.85, 0.3), (0.8, 0.5), (0.3, 0.85)])
    def test_within_3_percent_400_verified_requests_after_a_change(
        self, batch: int, before: float, after: float
    ) -> None:
        """The table after them counts; costs are known by then, the change is in the traffic."""
        rates = []
        for seed in range(6):
            world = served(line(12.0, 4.0), before, max_batch=48)
            world.rng.seed(seed)
            world.run([batch] * 800)
            world.chance, verified = after, world.drafted
            while world.drafted < verified + 400:
                world.run([batch])
            world.run([batch] * (PERIOD + 1))
            best = max(world.rate(batch, k) for k in STEPS)
            rates.append(world.rate(batch, world.policy._held) / best)
        assert sum(rates) / len(rates) >= 0.97

    def test_unknown_costs_choose_nothing(self) -> None:
        """A batch that changes every round is never timed: the configured steps stay."""
        world = served(line(12.0, 8.5), 0.2)
        world.run([1, 2, 4, 6] * 200)
        assert set(world.steps) == {3}

    def test_only_captured_steps_are_taken(self) -> None:
        wide = WidthPlan(3, (1, 2, 4, 8))
        plan = CapturePlan((wide, WidthPlan(1, (1, 2)), WidthPlan(0, (1, 2, 4))), 8)
        world = Served(MeasuredSteps(plan, 3), line(10.0, 10.0), 0.1)
        for batch, allowed in ((1, {0, 1, 3}), (4, {0, 3}), (8, {3})):
            since = len(world.steps)
            world.run([batch] * 500)
            assert set(world.steps[since:]) <= allowed
            assert world.policy._held == min(allowed)

    def test_batches_above_the_ladder_are_measured_as_one_bucket(self) -> None:
        world = Served(MeasuredSteps(plan_capture(STEPS, 8, cap=4), 3), line(10.0, 10.0), 0.2)
        world.run([8] * 500)
        assert world.policy._held == 0


class TestCliff:
    """Case 13 of the field: the best steps change at batch 5; the batch goes between 4 and 6."""

    @pytest.mark.parametrize("stay", [1, 3, 20])
    def test_within_5_percent_of_the_better_neighbour(self, stay: int) -> None:
        def cost(batch: int, steps: int) -> float:
            return 10.0 + steps * (1.0 if batch < 5 else 7.0)

        world = served(cost, 0.75)
        world.run([4] * 300 + [6] * 300)
        since = len(world.steps)
        switches = 0.1
        batches = ([4] * stay + [6] * stay) * (1200 // stay)
        world.run(batches)
        taken = world.steps[since:]
        spent = sum(cost(b, k) for b, k in zip(batches, taken, strict=True))
        spent += switches * sum(a != b for a, b in pairwise(taken))
        got = sum(b * world.rate(b, k) * cost(b, k) for b, k in zip(batches, taken, strict=True))
        fixed = max(
            sum(b * world.rate(b, k) * cost(b, k) for b in batches)
            / sum(cost(b, k) for b in batches)
            for k in STEPS
        )
        assert got / spent >= 0.95 * fixed

    @given(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=1, max_size=200))
    def test_the_batch_alone_switches_no_faster_than_the_dwell(self, batches: list[int]) -> None:
        policy = MeasuredSteps(plan_capture(STEPS, 8), 3)
        table = StepTable(0, 3, (3, 2, 1, 0, 3), (NO_PROBE,) * 5)
        policy.install(table.pack())
        taken = [policy.draft_steps(batch) for batch in batches]
        switched = [at for at in range(1, len(taken)) if taken[at] != taken[at - 1]]
        assert all(b - a >= DWELL for a, b in pairwise(switched))


class TestRanks:
    PLAN = plan_capture(STEPS, 8)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.integers(1, 8), min_size=1, max_size=300), CHANCES, st.integers(0, 2**32))
    def test_a_rank_that_only_gets_the_tables_does_the_same(
        self, batches: list[int], chance: float, seed: int
    ) -> None:
        first, other = (MeasuredSteps(self.PLAN, 3) for _ in range(2))
        rng = random.Random(seed)
        lengths = set()
        for batch in batches:
            assert first.due == other.due
            if first.due:
                payload = first.decide().pack()
                assert all(-1 <= number < 2**31 for number in payload)
                lengths.add(len(payload))
                first.install(payload)
                other.install(payload)
            steps = first.draft_steps(batch)
            assert other.draft_steps(batch) == steps
            first.timed(batch, steps, 10 + 5 * steps + rng.random())
            first.verified(steps, [rng.randint(0, steps) for _ in range(batch)])
        assert lengths == {2 + 2 * 5}

    @settings(max_examples=10, deadline=None)
    @given(CHANCES)
    def test_the_same_inputs_give_the_same_tables(self, chance: float) -> None:
        worlds = [served(line(12.0, 5.0), chance) for _ in range(2)]
        for world in worlds:
            world.run([1, 1, 1, 4, 4, 4, 4, 4] * 50)
        assert worlds[0].steps == worlds[1].steps
        assert worlds[0].policy.decide() == worlds[1].policy.decide()

    @given(
        st.integers(0, 2**62), st.integers(0, 8),
        st.lists(st.tuples(st.integers(0, 8), st.integers(-1, 8)), min_size=1, max_size=40),
    )  # fmt: skip
    def test_payload_roundtrip(self, number: int, held: int, rows: list[tuple[int, int]]) -> None:
        steps, probes = zip(*rows, strict=True)
        table = StepTable(number, held, steps, probes)
        assert StepTable.unpack(table.pack()) == table
        assert len(table.pack()) == 2 + 2 * len(rows)

    def test_a_rank_that_saw_other_rounds_stops_with_both_values(self) -> None:
        first, other = (MeasuredSteps(self.PLAN, 3) for _ in range(2))
        for _ in range(PERIOD):
            first.draft_steps(1)
        for _ in range(2 * PERIOD):
            other.draft_steps(1)
        with pytest.raises(AttestationError, match=r"decode round 16, .* here, round 8, .* rank 0"):
            other.install(first.decide().pack())

    def test_a_rank_that_holds_other_steps_stops(self) -> None:
        other = MeasuredSteps(self.PLAN, 3)
        table = MeasuredSteps(self.PLAN, 2).decide()
        with pytest.raises(AttestationError, match=r"3 steps and 5 buckets here, .* 2 steps"):
            other.install(table.pack())

    def test_probes_run_in_the_first_rounds_of_a_table(self) -> None:
        policy = MeasuredSteps(self.PLAN, 3)
        policy.install(StepTable(0, 3, (3,) * 5, (1, *[NO_PROBE] * 4)).pack())
        assert [policy.draft_steps(1) for _ in range(PERIOD)] == [1] * PROBE_ROUNDS + [3] * 5
