"""What every round pays: timed with ``--benchmark-enable``, and checked to keep nothing."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from sglang_verify_graphs.buckets import VerifyBucket, plan_capture
from sglang_verify_graphs.gate import BatchFacts, Decision, Phase, RejectReason, VerifyGate
from sglang_verify_graphs.metrics import Counters
from sglang_verify_graphs.policy import PERIOD, FixedSteps, MeasuredSteps
from sglang_verify_graphs.rounds import RoundTimer
from tests.unit.fakes import Batch, Router

PLAN = plan_capture(range(5), 64)


class TestTimes:
    def test_gate(self, benchmark: BenchmarkFixture) -> None:
        gate, facts = VerifyGate(PLAN), BatchFacts(33, 3)
        assert benchmark(gate.decide, facts).bucket == VerifyBucket(3, 40)

    def test_gate_refusal(self, benchmark: BenchmarkFixture) -> None:
        gate, facts = VerifyGate(PLAN), BatchFacts(65, 3)
        assert benchmark(gate.decide, facts).reason is RejectReason.BATCH_ABOVE_LADDER

    def test_runner_verify(self, benchmark: BenchmarkFixture) -> None:
        """Both gate calls, load and replay, without what stock does in them."""
        router = Router(steps=(4, 3, 2, 1, 0), max_batch=64)
        assert benchmark(lambda: router.forward(Batch(33, 3))) == "run by 3"

    def test_counters(self, benchmark: BenchmarkFixture) -> None:
        counters, bucket = Counters(PLAN, log=False), VerifyBucket(3, 40)
        benchmark(counters.replay, Phase.VERIFY, bucket, 28)
        assert counters.replayed[Phase.VERIFY][bucket] > 0

    def test_accept(self, benchmark: BenchmarkFixture) -> None:
        counters, accepted = Counters(PLAN, log=False), [2] * 33
        benchmark(counters.accept, accepted)
        assert counters.snapshot()["accept_length"] == 3.0

    def test_round_timer(self, benchmark: BenchmarkFixture) -> None:
        timer = RoundTimer("cpu")
        passes = iter(range(10**9))
        benchmark(lambda: timer.start(33, 3, next(passes)))

    def test_policy(self, benchmark: BenchmarkFixture) -> None:
        assert benchmark(FixedSteps(3).draft_steps, 33) == 3

    def test_measured_policy(self, benchmark: BenchmarkFixture) -> None:
        assert benchmark(MeasuredSteps(PLAN, 3).draft_steps, 33) == 3

    def test_measured_policy_is_fed(self, benchmark: BenchmarkFixture) -> None:
        """What rank 0 does besides in each round, at batch 33."""
        policy, correct = MeasuredSteps(PLAN, 3), [2] * 33

        def feed() -> None:
            policy.timed(33, 3, 10.0)
            policy.verified(3, correct)

        benchmark(feed)
        found = policy.chooser.acceptance.accept_length(2)
        assert found is not None
        assert found.value == 3.0

    def test_measured_policy_decides(self, benchmark: BenchmarkFixture) -> None:
        """What rank 0 does every ``PERIOD`` rounds, at batch 33 and every cost known."""
        policy = MeasuredSteps(PLAN, 3)
        for steps in range(5):
            for _ in range(8):
                policy.timed(33, steps, 10.0 + steps)
                policy.verified(steps, [min(2, steps)] * 33)

        def decide() -> None:
            for _ in range(PERIOD):
                policy.draft_steps(33)
            policy.install(policy.decide().pack())

        benchmark(decide)
        assert policy.draft_steps(33) in range(5)


_LEAVES = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)


def containers(root: object) -> dict[int, tuple[str, int]]:
    """Every list, dict, set and tuple that can be reached, with its length."""
    found: dict[int, tuple[str, int]] = {}
    pending, seen = [root], set()
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        if isinstance(item, list | dict | set | tuple):
            found[id(item)] = (type(item).__name__, len(item))
        pending += gc.get_referents(item)
    return found


class TestNothingGrows:
    @pytest.mark.parametrize("observe", [False, True])
    def test_a_thousand_decisions(self, observe: bool) -> None:
        router = Router(steps=(3, 1, 0), max_batch=8, observe=observe)
        for stock in router.stock.values():
            stock.loaded = stock.executed = Sink()
        timer = RoundTimer("cpu")
        self.rounds(router, timer)
        before = containers([router.runner, router.counters, timer])
        for _ in range(20):
            self.rounds(router, timer)
        after = containers([router.runner, router.counters, timer])
        assert sorted(after.values()) == sorted(before.values())
        assert router.counters.total(Phase.VERIFY) > 1000

    def test_thousands_of_measured_rounds(self) -> None:
        policy = MeasuredSteps(PLAN, 3)

        def serve(rounds: int) -> None:
            for number in range(rounds):
                if policy.due:
                    policy.install(policy.decide().pack())
                batch = 1 + number // 40 % 64
                steps = policy.draft_steps(batch)
                policy.timed(batch, steps, 10.0 + steps)
                policy.verified(steps, [steps // 2] * batch)

        serve(40_000)
        before = containers(policy)
        serve(10_000)
        assert len(containers(policy)) <= len(before) + 20

    def rounds(self, router: Router, timer: RoundTimer) -> None:
        """Every batch and step count, replayed and refused."""
        for number, (size, steps) in enumerate((b, k) for b in range(1, 11) for k in range(5)):
            timer.start(size, steps, number)
            router.forward(Batch(size, steps))
            router.counters.accept([steps] * size)

    def test_the_check_sees_growth(self) -> None:
        log: list[int] = []
        before = containers([log])
        log.append(1)
        assert containers([log]).values() != before.values()

    def test_a_replayed_batch_keeps_one_shared_decision(self) -> None:
        router = Router()
        decisions = []
        for _ in range(3):
            batch = Batch(2, 3)
            router.forward(batch)
            decisions += [v for v in vars(batch).values() if isinstance(v, Decision)]
        assert len(decisions) == 3
        assert len({id(decision) for decision in decisions}) == 1


class Sink:
    """A list that keeps nothing."""

    def append(self, item: Any) -> None:
        pass
