"""Every batch up to the maximum is captured or has a reason, at every step count."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.buckets import (
    CapturePlan,
    VerifyBucket,
    WidthPlan,
    batch_ladder,
    format_ranges,
    plan_capture,
)
from sglang_verify_graphs.gate import BatchFacts, RejectReason, VerifyGate

steps_strategy = st.sets(st.integers(0, 8), min_size=1)
ladders = st.sets(st.integers(1, 80), min_size=1).map(sorted)
plans = st.builds(
    plan_capture,
    steps_strategy,
    st.integers(1, 64),
    cap=st.none() | st.integers(1, 80),
    ladder=st.none() | ladders,
    padding=st.booleans(),
    alignment=st.sampled_from([1, 2, 3, 4, 8]),
)


class TestPlan:
    @given(plans)
    def test_every_batch_is_captured_or_has_a_reason(self, plan: CapturePlan) -> None:
        gate = VerifyGate(plan)
        buckets = set(plan)
        for draft_steps in plan.steps:
            uncovered = plan.uncovered(draft_steps)
            for batch in range(1, plan.max_batch + 1):
                decision = gate.decide(BatchFacts(batch, draft_steps))
                if batch in uncovered:
                    assert decision.reason in (
                        RejectReason.BATCH_ABOVE_LADDER,
                        RejectReason.EXACT_BATCH_MISSING,
                    )
                else:
                    assert decision.bucket in buckets
                    assert decision.bucket.batch >= batch
                    assert decision.bucket.draft_steps == draft_steps

    @given(plans)
    def test_the_smallest_bucket_that_holds_the_batch(self, plan: CapturePlan) -> None:
        for width in plan.widths:
            for batch in range(1, plan.max_batch + 1):
                found = width.bucket_for(batch)
                holding = [size for size in width.batches if size >= batch]
                assert (found.batch if found else None) == min(holding, default=None)

    @given(plans)
    def test_widest_first_largest_first(self, plan: CapturePlan) -> None:
        order = [(bucket.draft_steps, bucket.batch) for bucket in plan]
        assert order == sorted(set(order), reverse=True)
        assert plan.steps == tuple(sorted(plan.steps, reverse=True))

    @given(steps_strategy, st.integers(1, 300))
    def test_the_default_plan_covers_everything(self, steps: set[int], max_batch: int) -> None:
        plan = plan_capture(steps, max_batch)
        assert all(plan.uncovered(k) == () for k in steps)
        assert max(bucket.batch for bucket in plan) == max_batch

    @given(steps_strategy, st.integers(1, 64))
    def test_without_padding_every_batch_has_its_own(self, steps: set[int], max_batch: int) -> None:
        plan = plan_capture(steps, max_batch, padding=False)
        assert all(plan.uncovered(k) == () for k in steps)

    @given(steps_strategy, st.integers(1, 64), st.integers(1, 64), st.booleans())
    def test_cap(self, steps: set[int], max_batch: int, cap: int, padding: bool) -> None:
        plan = plan_capture(steps, max_batch, cap=cap, padding=padding)
        above = tuple(range(cap + 1, max_batch + 1))
        assert all(plan.uncovered(k) == above for k in steps)
        assert all(bucket.batch <= cap for bucket in plan)

    @given(st.integers(0, 8), st.integers(1, 100), st.sampled_from([2, 3, 4, 8]))
    def test_alignment(self, steps: int, batch: int, alignment: int) -> None:
        """A batch is rounded up, no further than its width needs."""
        plan = plan_capture([steps], 200, ladder=[batch], alignment=alignment)
        (bucket,) = plan
        sizes = (size for size in range(batch, 200) if size * (steps + 1) % alignment == 0)
        assert bucket.batch == next(sizes)

    def test_a_given_ladder_is_cut_at_the_top(self) -> None:
        ladder = (0, 1, 4, 8, 16)
        assert plan_capture([3], 8, ladder=ladder).widths[0].batches == (1, 4, 8)
        assert plan_capture([3], 8, ladder=ladder, cap=4).widths[0].batches == (1, 4)

    def test_an_unknown_step_count_is_uncovered(self) -> None:
        assert plan_capture([3], 4).uncovered(2) == (1, 2, 3, 4)

    @given(plans, st.data())
    def test_replace_width(self, plan: CapturePlan, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(plan.widths))
        new = old.fit(0, 1.0)
        after = plan.replace_width(new)
        assert after.width(old.draft_steps) == new
        assert [w for w in after.widths if w != new] == [w for w in plan.widths if w != old]


class TestFit:
    @given(ladders, st.integers(0, 100), st.just(0.0) | st.floats(1e-3, 10))
    def test_the_largest_are_dropped(
        self, ladder: list[int], free: int, bytes_per_graph: float
    ) -> None:
        whole = WidthPlan(2, tuple(ladder))
        fitted = whole.fit(free, bytes_per_graph)
        assert fitted.batches + fitted.dropped == whole.batches
        assert len(fitted.batches) * bytes_per_graph <= free or not fitted.batches
        if fitted.dropped and bytes_per_graph:
            assert (len(fitted.batches) + 1) * bytes_per_graph > free

    def test_no_room_at_all(self) -> None:
        assert WidthPlan(2, (1, 2)).fit(-5, 1.0) == WidthPlan(2, (), (1, 2))

    def test_graphs_that_cost_nothing(self) -> None:
        assert WidthPlan(2, (1, 2)).fit(0, 0.0) == WidthPlan(2, (1, 2))


class TestLadder:
    def test_examples(self) -> None:
        assert batch_ladder(1) == (1,)
        assert batch_ladder(3) == (1, 2, 3)
        assert batch_ladder(48) == (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48)

    @given(st.integers(1, 4096))
    def test_shape(self, max_batch: int) -> None:
        ladder = batch_ladder(max_batch)
        assert ladder[0] == 1
        assert ladder[-1] == max_batch
        assert all(a < b for a, b in pairwise(ladder))

    @given(st.integers(1, 4096))
    def test_above_12_at_most_a_quarter_is_padding(self, max_batch: int) -> None:
        for smaller, size in pairwise(batch_ladder(max_batch)):
            if smaller >= 12:
                assert size - (smaller + 1) <= size / 4

    def test_case_3_the_maximum_itself_is_captured(self) -> None:
        assert batch_ladder(100)[-1] == 100


class TestBucket:
    def test_rows(self) -> None:
        bucket = VerifyBucket(draft_steps=3, batch=8)
        assert bucket.width == 4
        assert bucket.rows == 32
        assert bucket.padded_rows(5) == 12

    @given(plans)
    def test_mean_padded_rows(self, plan: CapturePlan) -> None:
        for width in plan.widths:
            rows = []
            for batch in range(1, plan.max_batch + 1):
                holding = [size for size in width.batches if size >= batch]
                if holding:
                    rows.append((min(holding) - batch) * (width.draft_steps + 1))
            expected = sum(rows) / len(rows) if rows else 0.0
            assert width.mean_padded_rows(plan.max_batch) == pytest.approx(expected)


@given(st.sets(st.integers(1, 200)))
def test_format_ranges(batches: set[int]) -> None:
    back: set[int] = set()
    for part in format_ranges(sorted(batches)).split(", "):
        if part:
            first, _, last = part.partition("-")
            back |= set(range(int(first), int(last or first) + 1))
    assert back == batches
    assert format_ranges([1, 2, 3, 40]) == "1-3, 40"


def test_a_tree_is_as_wide_as_its_nodes() -> None:
    plan = plan_capture([3], 4, draft_tokens=6, alignment=4)
    assert [b.width for b in plan] == [6] * len(list(plan))
    assert all(bucket.rows % 4 == 0 for bucket in plan)
    assert plan.widths[0].bucket_for(1) == VerifyBucket(3, 2, 6)
