"""Acceptance per draft position: censored, decayed, and quick to see that the traffic changed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.acceptance import Acceptance


def draw(rng: random.Random, chances: list[float], steps: int) -> int:
    """Correct drafts of one request."""
    return next((at for at in range(steps) if rng.random() >= chances[at]), steps)


def feed(
    acceptance: Acceptance, rng: random.Random, chances: list[float], requests: int,
    steps: int = 3, batch: int = 1,
) -> None:  # fmt: skip
    for _ in range(requests // batch):
        acceptance.observe(steps, [draw(rng, chances, steps) for _ in range(batch)])


def length_of(chances: list[float], steps: int) -> float:
    length, reached = 1.0, 1.0
    for chance in chances[:steps]:
        reached *= chance
        length += reached
    return length


def known(acceptance: Acceptance, steps: int) -> float:
    found = acceptance.accept_length(steps)
    assert found is not None
    return found.value


@given(st.integers(1, 7))
def test_accept_length_counts_the_bonus_token(steps: int) -> None:
    for correct, length in ((steps, steps + 1), (0, 1)):
        acceptance = Acceptance(7)
        acceptance.observe(steps, [correct] * 100)
        if correct:
            assert known(acceptance, steps) == length
        else:
            assert acceptance.accept_length(steps) is None or steps == 1
        assert acceptance.accept_length(0) == (1.0, 1.0, 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=30),
    st.integers(1, 3), st.integers(0, 3),
)  # fmt: skip
def test_a_narrow_round_says_nothing_of_deeper_drafts(
    rounds: list[tuple[int, int]], narrow: int, correct: int
) -> None:
    acceptance = Acceptance(4)
    for steps, accepted in rounds:
        acceptance.observe(steps, [min(accepted, steps)] * 4)
    deeper = range(narrow + 1, 5)
    before = [acceptance.probability(position) for position in deeper]
    changes = acceptance.changes
    acceptance.observe(narrow, [min(correct, narrow)] * 3)
    after = [acceptance.probability(position) for position in deeper]
    assert after == before or acceptance.changes > changes


def test_a_request_that_rejected_says_nothing_of_later_drafts() -> None:
    acceptance = Acceptance(3)
    acceptance.observe(3, [0] * 100 + [3] * 20)
    first, second = acceptance.probability(1), acceptance.probability(2)
    assert first is not None
    assert second is not None
    assert first.value == pytest.approx(20 / 120)
    assert second.value == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_censoring_is_unbiased(seed: int) -> None:
    """Step counts that change from round to round leave every probability where it is."""
    rng = random.Random(seed)
    chances = [0.7, 0.5, 0.8, 0.3]
    sums, runs = [0.0] * 4, 40
    for _ in range(runs):
        acceptance = Acceptance(4)
        for _ in range(400):
            steps = rng.choice([1, 1, 2, 3, 4])
            acceptance.observe(steps, [draw(rng, chances, steps)])
        for at in range(4):
            found = acceptance.probability(at + 1)
            assert found is not None
            sums[at] += found.value
    for total, chance in zip(sums, chances, strict=True):
        assert total / runs == pytest.approx(chance, abs=0.04)


def test_the_interval_holds_the_truth() -> None:
    rng, chances, inside = random.Random(1), [0.7, 0.6, 0.5], 0
    for _ in range(300):
        acceptance = Acceptance(3)
        feed(acceptance, rng, chances, 200)
        found = acceptance.accept_length(3)
        assert found is not None
        assert 1 <= found.low <= found.value <= found.high <= 4
        inside += found.low <= length_of(chances, 3) <= found.high
    assert inside >= 0.9 * 300


def test_unknown_stays_unknown() -> None:
    acceptance = Acceptance(3)
    assert acceptance.probability(1) is None
    assert acceptance.accept_length(1) is None
    assert acceptance.expected() == [(1.0, 1.0), (None, 2.0), (None, 3.0), (None, 4.0)]
    acceptance.observe(1, [1] * 50)
    assert acceptance.accept_length(1) is not None
    assert acceptance.accept_length(2) is None
    values, most = zip(*acceptance.expected(), strict=True)
    assert values == (1.0, 2.0, None, None)
    assert most[3] <= 4.0


def test_old_traffic_is_forgotten() -> None:
    """A change too small for an alarm still wears in."""
    acceptance, rng = Acceptance(1), random.Random(0)
    feed(acceptance, rng, [0.6], 3000, steps=1, batch=4)
    feed(acceptance, rng, [0.55], 3000, steps=1, batch=4)
    assert known(acceptance, 1) == pytest.approx(1.55, abs=0.05)


@pytest.mark.parametrize("batch", [1, 8, 48])
@pytest.mark.parametrize(("before", "after"), [(0.85, 0.35), (0.35, 0.85), (0.7, 0.5)])
def test_a_change_is_seen_within_400_requests(batch: int, before: float, after: float) -> None:
    errors = []
    for seed in range(12):
        acceptance, rng = Acceptance(3), random.Random(seed)
        feed(acceptance, rng, [before] * 3, 1000, batch=batch)
        feed(acceptance, rng, [after] * 3, 400, batch=batch)
        errors.append(abs(known(acceptance, 3) / length_of([after] * 3, 3) - 1))
    assert sum(errors) / len(errors) < 0.07


def test_deeper_drafts_are_expected_to_follow_an_earlier_one() -> None:
    """Traffic changed while only the first draft was taken: the others are not what they were."""
    acceptance, rng = Acceptance(3), random.Random(0)
    feed(acceptance, rng, [0.3] * 3, 3000)
    before, _ = acceptance.expected()[3]
    feed(acceptance, rng, [0.85], 400, steps=1)
    after, most = acceptance.expected()[3]
    assert before is not None
    assert after is not None
    assert after > before + 0.9
    assert most > length_of([0.85] * 3, 3)


def test_a_possible_rise_raises_what_may_be_accepted_before_what_is_expected() -> None:
    acceptance, rng = Acceptance(1), random.Random(0)
    feed(acceptance, rng, [0.3], 3000, steps=1)
    expected, most = acceptance.expected()[1]
    acceptance.observe(1, [1] * 4)
    then_expected, then_most = acceptance.expected()[1]
    assert then_most > most + 0.2
    assert expected is not None
    assert then_expected == pytest.approx(expected, abs=0.02)


def test_steady_traffic_raises_few_alarms() -> None:
    acceptance, rng = Acceptance(1), random.Random(3)
    feed(acceptance, rng, [0.6], 50_000, steps=1, batch=16)
    assert known(acceptance, 1) == pytest.approx(1.6, rel=0.06)
    assert acceptance.changes <= 20


@pytest.mark.parametrize("correct", [0, 1])
def test_certain_drafts_are_steady(correct: int) -> None:
    """Always or never accepted: no evidence of a change, and never unknown."""
    acceptance = Acceptance(1)
    for _ in range(500):
        acceptance.observe(1, [correct] * 32)
        assert known(acceptance, 1) == 1 + correct
    assert acceptance.changes == 0


@pytest.mark.parametrize("usual", [0, 1])
def test_one_exception_among_certain_drafts_is_no_change(usual: int) -> None:
    acceptance = Acceptance(1)
    for number in range(500):
        acceptance.observe(1, [1 - usual if number % 50 == 25 else usual, *[usual] * 7])
        assert abs(known(acceptance, 1) - (1 + usual)) < 0.05
    assert acceptance.changes == 0


class TestDraftsThatDieQuietly:
    """Case 14 of the field, the estimator's half: steps go to 0 and back up."""

    def test_rounds_without_drafts_change_nothing(self) -> None:
        acceptance, rng = Acceptance(3), random.Random(0)
        feed(acceptance, rng, [0.7] * 3, 2000)
        before, changes = known(acceptance, 3), acceptance.changes
        for _ in range(10_000):
            acceptance.observe(0, [0] * 8)
        assert known(acceptance, 3) == before
        feed(acceptance, rng, [0.7] * 3, 400)
        assert known(acceptance, 3) == pytest.approx(before, rel=0.1)
        assert acceptance.changes == changes

    def test_a_collapse_after_the_return_is_noticed(self) -> None:
        acceptance, rng = Acceptance(3), random.Random(0)
        feed(acceptance, rng, [0.7] * 3, 2000)
        known(acceptance, 3)
        changes = acceptance.changes
        feed(acceptance, rng, [0.05] * 3, 60)
        assert known(acceptance, 3) < 1.5
        assert acceptance.changes > changes
