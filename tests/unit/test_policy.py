"""Which step count a round takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.policy import FixedSteps, ScriptedSteps


@given(st.integers(0, 8), st.lists(st.integers(1, 64)))
def test_fixed(steps: int, batches: list[int]) -> None:
    policy = FixedSteps(steps)
    assert all(policy.draft_steps(batch) == steps for batch in batches)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5), st.lists(st.integers(1, 64), max_size=20)
)
def test_scripted_cycles_whatever_the_batch(script: list[int], batches: list[int]) -> None:
    policy = ScriptedSteps(script)
    taken = [policy.draft_steps(batch) for batch in batches]
    assert taken == [script[n % len(script)] for n in range(len(batches))]


@given(st.lists(st.integers(0, 8), min_size=1), st.integers(0, 30))
def test_ranks_that_see_the_same_rounds_agree(script: list[int], rounds: int) -> None:
    ranks = [ScriptedSteps(script) for _ in range(2)]
    for _ in range(rounds):
        assert len({rank.draft_steps(1) for rank in ranks}) == 1
