"""The router: right runner, one answer a round, every eager verify named."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.buckets import plan_capture
from tests.unit.fakes import Batch, Router


class TestRouting:
    @given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), max_size=30))
    def test_each_verify_goes_to_its_width(self, batches: list[tuple[int, int]]) -> None:
        router = Router(steps=(3, 1, 0), max_batch=8)
        for size, steps in batches:
            captured = steps in router.stock and size <= 8
            expected = f"run by {steps}" if captured else "eager"
            assert router.forward(Batch(size, steps)) == expected
        total = router.verify["replayed"] + router.verify["eager"]
        assert total == len(batches)

    def test_arguments_and_results_pass_through(self) -> None:
        router = Router()
        batch = Batch(2, 1)
        assert router.runner.can_run_graph(batch)
        assert router.runner.load_batch(batch, pp_proxy_tensors=None) == "loaded by 1"
        assert router.runner.execute(batch, "a", b="c") == "run by 1"
        assert router.stock[1].executed == [(batch, ("a",), {"b": "c"})]

    def test_other_attributes_are_the_active_runners(self) -> None:
        router = Router()
        assert router.runner.buffers == "buffers of 3"
        router.forward(Batch(2, 1))
        assert router.runner.buffers == "buffers of 1"
        with pytest.raises(AttributeError):
            _ = router.runner.no_such_thing

    def test_execute_without_load(self) -> None:
        """SGLang may replay a batch that another call prepared."""
        router = Router()
        batch = Batch(2, 0)
        assert router.runner.can_run_graph(batch)
        assert router.runner.execute(batch) == "run by 0"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("CUDA error: an illegal memory access\nCompile with ..."), "CUDA error: an"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_replay_that_fails_is_named_and_raised(
    caplog: pytest.LogCaptureFixture, error: Exception, told: str
) -> None:
    router = Router()
    router.stock[1].raises = error
    with caplog.at_level(logging.ERROR), pytest.raises(type(error)) as raised:
        router.forward(Batch(3, 1))
    assert raised.value is error
    (line,) = caplog.messages
    failed = "[verify-graphs] replaying verify failed at draft_steps 1, batch 4 (3 requests): "
    assert line.startswith(failed + told)
    assert "\n" not in line


class TestOneAnswer:
    def test_both_calls_of_a_round_agree(self) -> None:
        """Stock changes its mind between the calls; the round must not."""
        router = Router()
        batch = Batch(2, 3)
        assert router.runner.can_run_graph(batch)
        router.stock[3].refuses = True
        assert router.runner.can_run_graph(batch)
        assert router.stock[3].asked == 1

    def test_a_refusal_stays_a_refusal(self) -> None:
        router = Router(refuses=True)
        batch = Batch(2, 3)
        assert not router.runner.can_run_graph(batch)
        router.stock[3].refuses = False
        assert not router.runner.can_run_graph(batch)
        assert router.verify["eager"] == 1

    def test_the_next_round_is_asked_anew(self) -> None:
        router = Router(refuses=True)
        assert not router.runner.can_run_graph(Batch(2, 3))
        router.stock[3].refuses = False
        assert router.runner.can_run_graph(Batch(2, 3))


class TestReasons:
    def test_refused_upstream(self) -> None:
        router = Router(refuses=True)
        assert router.forward(Batch(2, 3)) == "eager"
        assert router.verify == {"replayed": 0, "eager": 1, "reasons": {"REFUSED_UPSTREAM": 1}}

    def test_our_refusal_does_not_ask_stock(self) -> None:
        router = Router(steps=(3,))
        assert router.forward(Batch(2, 1)) == "eager"
        assert router.stock[3].asked == 0
        assert router.verify["reasons"] == {"STEPS_NOT_CAPTURED": 1}

    def test_case_5_never_a_wrong_replay(self) -> None:
        router = Router(steps=(3,))
        router.forward(Batch(2, 1))
        assert router.stock[3].executed == []

    def test_padding_is_counted(self) -> None:
        router = Router(steps=(3,), plan=plan_capture([3], 8, ladder=(8,)))
        router.forward(Batch(5, 3))
        assert router.counters.snapshot()["padded_rows"] == 3 * 4
        assert router.counters.snapshot()["buckets"] == {"8x3": 1}


class TestObserve:
    def test_stock_decides(self) -> None:
        """What stock replays, replays, even where our plan has no bucket for it."""
        router = Router(steps=(3,), plan=plan_capture([3], 2), observe=True)
        assert router.forward(Batch(5, 3)) == "run by 3"
        assert router.verify["replayed"] == 1

    def test_the_reason_of_a_refusal_is_ours(self) -> None:
        router = Router(steps=(3,), plan=plan_capture([3], 2), observe=True, refuses=True)
        assert router.forward(Batch(5, 3)) == "eager"
        assert router.verify["reasons"] == {"BATCH_ABOVE_LADDER": 1}

    def test_an_unexplained_refusal(self) -> None:
        router = Router(steps=(3,), observe=True, refuses=True)
        router.forward(Batch(2, 3))
        assert router.verify["reasons"] == {"REFUSED_UPSTREAM": 1}
