"""What a verify accepted goes to the width that ran it; cold requests say nothing of a draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs import install
from sglang_verify_graphs.feedback import Feedback
from sglang_verify_graphs.metrics import Counters


class Fed:
    """Feedback of one rank, what its policy is told, and the requests that are kept uncached."""

    def __init__(self, *, first_rank: bool = True) -> None:
        self.told: list[tuple[int, list[int]]] = []
        self.uncached: list[Any] = []
        policy: Any = SimpleNamespace(verified=lambda steps, n: self.told.append((steps, list(n))))
        self.counters = Counters((), log=False)
        self.feedback = Feedback(
            self.counters, self.uncached.append, policy if first_rank else None
        )

    def round(self, steps: int, requests: list[Any], correct_drafts: list[int]) -> None:
        self.feedback.result(steps + 1, requests)
        self.feedback.verified(correct_drafts)

    @property
    def after_zero(self) -> Any:
        return self.counters.snapshot()["accept_length_after_zero"]


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(name=at) for at in range(count)]


def test_the_width_is_that_of_the_result() -> None:
    """By the time that it is known, the worker may run another; the wrapper reads the result's."""
    fed, batch = Fed(), SimpleNamespace(reqs=requests(2))
    controller = SimpleNamespace(feedback=fed.feedback)
    for width, correct in ((4, [3, 0]), (2, [1, 1])):
        result = SimpleNamespace(speculative_num_draft_tokens=width)

        def stock(result: Any, batch: Any, correct: list[int] = correct) -> str:
            fed.feedback.verified(correct)  # it reports to the worker within
            return "tokens"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(install, "report", SimpleNamespace(controller=controller))
            answer = install._resolve_spec_v2_tokens(stock, None, (result,), {"batch": batch})
        assert answer == "tokens"
    assert fed.told == [(3, [3, 0]), (1, [1, 1])]
    assert fed.counters.accepted_tokens == 3 + 0 + 1 + 1 + 4


def test_without_a_width_tokens_are_counted_and_nothing_is_told() -> None:
    """Releases of one width name none."""
    fed = Fed()
    fed.feedback.verified([3, 1])
    assert fed.counters.accepted_tokens == 6
    assert fed.told == []


class TestCold:
    @pytest.mark.parametrize("first_rank", [True, False])
    def test_marked_once_kept_uncached_and_not_counted(self, first_rank: bool) -> None:
        fed = Fed(first_rank=first_rank)
        a, b, new = requests(3)
        fed.feedback.skips_extend = True
        fed.round(0, [a, b], [0, 0])
        fed.round(0, [a, b], [0, 0])
        assert fed.uncached == [a, b]  # on every rank: their caches must stay alike
        fed.round(3, [a, new], [0, 3])
        fed.round(3, [b], [0])
        assert fed.told == ([(3, [3]), (3, [])] if first_rank else [])
        assert fed.uncached == [a, b]
        assert fed.counters.verified_requests == 7

    def test_kept_warm_nobody_is_marked(self) -> None:
        fed, (a, b) = Fed(), requests(2)
        fed.round(0, [a, b], [0, 0])
        fed.round(3, [a, b], [2, 3])
        assert fed.uncached == []
        assert fed.told == [(3, [2, 3])]

    def test_a_round_that_skipped_before_the_switch_counts_after_it(self) -> None:
        """Results are one round late: the first after the switch belongs to before it."""
        fed, (a, late, warm) = Fed(), requests(3)
        fed.feedback.skips_extend = True
        fed.round(0, [a], [0])
        fed.feedback.skips_extend = False
        fed.round(0, [late], [0])
        fed.round(0, [warm], [0])
        assert fed.uncached == [a, late]


class TestAfterZero:
    def test_sixteen_rounds_are_told_apart(self) -> None:
        fed, batch = Fed(), requests(1)
        fed.round(3, batch, [0])
        assert fed.after_zero is None
        for _ in range(2):
            fed.round(0, batch, [0])
        for _ in range(15):
            fed.round(3, batch, [3])
        fed.round(3, batch, [1])
        assert fed.after_zero == (15 * 4 + 2) / 16
        fed.round(3, batch, [0])
        assert fed.after_zero == (15 * 4 + 2) / 16

    def test_rounds_without_drafts_start_it_again(self) -> None:
        fed, batch = Fed(), requests(1)
        fed.round(0, batch, [0])
        fed.round(3, batch, [3])
        fed.round(0, batch, [0])
        for _ in range(16):
            fed.round(3, batch, [3])
        fed.round(3, batch, [0])
        assert fed.after_zero == 4.0
