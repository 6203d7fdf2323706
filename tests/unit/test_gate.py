"""One decision and one named reason for each forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.buckets import CapturePlan, WidthPlan, format_ranges, plan_capture
from sglang_verify_graphs.gate import BatchFacts, Decision, RejectReason, VerifyGate

EVEN_LADDER_TO_32 = (1, *range(2, 33, 2))

blockers = [name for name in BatchFacts._fields if name not in ("batch", "draft_steps")]
facts_strategy = st.builds(
    BatchFacts,
    batch=st.integers(0, 70),
    draft_steps=st.integers(-1, 6),
    **{name: st.booleans() for name in blockers},
)
plan_strategy = st.builds(
    plan_capture,
    st.sets(st.integers(0, 5), min_size=1),
    st.integers(1, 64),
    ladder=st.none() | st.sets(st.integers(1, 64), min_size=1).map(sorted),
    padding=st.booleans(),
)


def plan(**batches: tuple[int, ...]) -> CapturePlan:
    """``plan(k3=(1, 2))``: draft_steps 3 for batches 1 and 2."""
    widths = (WidthPlan(int(name[1:]), sizes) for name, sizes in batches.items())
    return CapturePlan(tuple(widths), max_batch=48)


class TestDecision:
    @given(plan_strategy, facts_strategy)
    def test_a_bucket_or_a_reason_never_both(self, plan: CapturePlan, facts: BatchFacts) -> None:
        decision = VerifyGate(plan).decide(facts)
        assert (decision.bucket is None) != (decision.reason is None)
        assert bool(decision) == (decision.bucket is not None)

    @given(plan_strategy, facts_strategy)
    def test_same_facts_same_decision(self, plan: CapturePlan, facts: BatchFacts) -> None:
        gate = VerifyGate(plan)
        first = gate.decide(facts)
        assert gate.decide(facts) == first
        assert VerifyGate(plan).decide(BatchFacts(*facts)) == first

    @given(plan_strategy, facts_strategy)
    def test_never_a_wrong_replay(self, plan: CapturePlan, facts: BatchFacts) -> None:
        bucket = VerifyGate(plan).decide(facts).bucket
        if bucket is None:
            return
        assert bucket in set(plan)
        assert bucket.draft_steps == facts.draft_steps
        assert bucket.batch >= facts.batch >= 1
        assert plan.padding or bucket.batch == facts.batch
        assert facts.is_verify
        assert not any(getattr(facts, name) for name in blockers if name != "is_verify")

    @given(plan_strategy, st.integers(1, 64), st.integers(0, 5))
    def test_what_is_captured_replays(self, plan: CapturePlan, batch: int, steps: int) -> None:
        decision = VerifyGate(plan).decide(BatchFacts(batch, steps))
        width = plan.width(steps)
        found = width and width.bucket_for(batch, padding=plan.padding)
        assert decision.bucket == (found or None)

    def test_a_replay_allocates_no_new_decision(self) -> None:
        gate = VerifyGate(plan(k3=(1, 2, 4)))
        assert gate.decide(BatchFacts(3, 3)) is gate.decide(BatchFacts(3, 3))


PLAN = plan(k3=(1, 2, 4), k1=(1, 2))
BUDGET = CapturePlan((WidthPlan(3, (1, 2), dropped=(4, 8)),), max_batch=48)
EXACT = CapturePlan((WidthPlan(3, (1, 2, 4)),), max_batch=4, padding=False)

REASONS: dict[RejectReason, tuple[CapturePlan, BatchFacts, str]] = {
    RejectReason.BATCH_ABOVE_LADDER: (PLAN, BatchFacts(5, 3), "5 > 4"),
    RejectReason.EXACT_BATCH_MISSING: (EXACT, BatchFacts(3, 3), "3 not in [1, 2, 4]"),
    RejectReason.STEPS_NOT_CAPTURED: (PLAN, BatchFacts(1, 2), "2 not in 1, 3"),
    RejectReason.MEMORY_BUDGET: (BUDGET, BatchFacts(3, 3), "3 > 2"),
    RejectReason.FORWARD_MODE: (PLAN, BatchFacts(1, 3, is_verify=False), ""),
    RejectReason.DP_PEER: (PLAN, BatchFacts(1, 3, dp_peer_blocked=True), ""),
    RejectReason.ENCODER_LENGTH_ZERO: (PLAN, BatchFacts(1, 3, encoder_length_zero=True), ""),
    RejectReason.TWO_BATCH_OVERLAP: (PLAN, BatchFacts(1, 3, overlap_blocked=True), ""),
    RejectReason.HIDDEN_MODE: (PLAN, BatchFacts(1, 3, hidden_mode_above_captured=True), ""),
    RejectReason.NGRAM_TOKEN_COUNT: (PLAN, BatchFacts(1, 3, ngram_mismatch=True), ""),
    RejectReason.REPLACED_EMBEDDINGS: (PLAN, BatchFacts(1, 3, replaced_embeddings=True), ""),
    RejectReason.RAGGED_VERIFY: (PLAN, BatchFacts(1, 3, ragged=True), ""),
}
ELSEWHERE = {
    RejectReason.NO_RUNNER: "controller",
    RejectReason.BACKEND_NOT_GRAPHED: "controller",
    RejectReason.REFUSED_UPSTREAM: "runner",
    RejectReason.GRAPH_VARIANT_MISSING: "runner",
}
"""Reasons that other modules give; ``test_runner.py`` and the engine tests reach them."""


class TestReasons:
    @pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.value)
    def test_reached(self, reason: RejectReason) -> None:
        plan, facts, detail = REASONS[reason]
        assert VerifyGate(plan).decide(facts) == Decision(None, reason, detail)

    def test_the_enum_is_closed(self) -> None:
        assert {*REASONS, *ELSEWHERE} == set(RejectReason)

    @pytest.mark.parametrize("reason", RejectReason, ids=lambda reason: reason.value)
    def test_advice(self, reason: RejectReason) -> None:
        assert reason.advice
        assert "\n" not in reason.advice
        assert reason.name == reason.value

    def test_a_width_without_any_graph(self) -> None:
        dropped = CapturePlan((WidthPlan(3, (), dropped=(1, 2)),), max_batch=2)
        assert VerifyGate(dropped).decide(BatchFacts(1, 3)).reason is RejectReason.MEMORY_BUDGET


class TestCases:
    def test_1_ceiling(self) -> None:
        """48 requests, SGLang's even ladder to 32, width 4."""
        stock = plan_capture([3], 48, ladder=EVEN_LADDER_TO_32)
        assert format_ranges(stock.uncovered(3)) == "33-48"

        ours = plan_capture([3], 48)
        assert ours.uncovered(3) == ()
        assert VerifyGate(ours).decide(BatchFacts(40, 3)).bucket is not None

        capped = VerifyGate(plan_capture([3], 48, cap=32))
        refused = capped.decide(BatchFacts(40, 3))
        assert refused == Decision(None, RejectReason.BATCH_ABOVE_LADDER, "40 > 32")
        assert "--verify-graph-max-batch" in RejectReason.BATCH_ABOVE_LADDER.advice
        assert all(capped.decide(BatchFacts(batch, 3)) for batch in range(1, 33))

    def test_4_padding_disabled(self) -> None:
        gate = VerifyGate(plan_capture([3], 4, ladder=(1, 2, 4), padding=False))
        assert gate.decide(BatchFacts(2, 3)).bucket is not None
        assert gate.decide(BatchFacts(3, 3)).reason is RejectReason.EXACT_BATCH_MISSING
        assert "--disable-cuda-graph-padding" in RejectReason.EXACT_BATCH_MISSING.advice

    def test_5_width_mismatch(self) -> None:
        """Captured for width 4, a batch arrives with width 2."""
        one = VerifyGate(plan_capture([3], 8)).decide(BatchFacts(2, 1))
        assert one == Decision(None, RejectReason.STEPS_NOT_CAPTURED, "1 not in 3")
        both = VerifyGate(plan_capture([3, 1], 8)).decide(BatchFacts(2, 1))
        assert both.bucket is not None
        assert both.bucket.width == 2
