"""Memory budget, live control and what ranks share, on an engine that only counts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.buckets import plan_capture
from sglang_verify_graphs.compat.engine import StepState
from sglang_verify_graphs.control import COLD_ZERO, MODE, RESUME, STEPS, Mode
from sglang_verify_graphs.controller import DraftStepsController
from sglang_verify_graphs.costs import PLAIN_DECODE, CostKey, RoundCosts
from sglang_verify_graphs.errors import CaptureError, SettingsError
from sglang_verify_graphs.policy import (
    NO_PROBE,
    PERIOD,
    FixedSteps,
    Policy,
    ScriptedSteps,
    StepTable,
)
from sglang_verify_graphs.support import ServerFacts
from tests.unit.fakes import StockRunner, read_facts

KEY = CostKey("a GPU", 1, "model", "draft", "release", "fa3", "bfloat16")


class Engine:
    """Captured the configured width for ``gb``; everything after it costs nothing."""

    def __init__(self, gb: float = 0.1, rank: int = 0, **facts: Any) -> None:
        self.worker = SimpleNamespace(speculative_num_steps=3)
        self.model_runner = SimpleNamespace(device="cpu", forward_pass_id=0)
        self.gb, self.rank = gb, rank
        self.facts = ServerFacts("EAGLE3", 1, 3, 4, 8, **facts)
        self.built: list[int] = []
        self.stock = self.runner = StockRunner(3)
        """What SGLang put there at start-up, and what it asks now."""
        self.steps = 3
        self.skips: list[bool] = []
        self.sent: list[list[int]] = []

    def server_facts(self) -> ServerFacts:
        return self.facts

    def cost_key(self) -> CostKey:
        return KEY

    def tp_rank(self) -> int:
        return self.rank

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_rank_0(self, numbers: list[int]) -> list[int]:
        self.sent.append(numbers)
        return numbers

    # -- capture -----------------------------------------------------------------------------------

    def graph_usage(self) -> tuple[float, float]:
        return self.gb, 1.0

    def largest(self, value: float) -> float:
        return value

    def free_gb(self) -> float:
        return 100.0

    def stock_ladder(self) -> list[int]:
        return [1, 2, 4]

    def capturing(self, batches: Sequence[int]) -> Any:
        return nullcontext()

    def start_up_state(self) -> StepState:
        return self._state(3, self.stock)

    def build_state(self, draft_steps: int, batches: Any) -> StepState:
        self.built.append(draft_steps)
        return self._state(draft_steps, StockRunner(draft_steps))

    def _state(self, draft_steps: int, runner: Any) -> StepState:
        return StepState(draft_steps, draft_steps + 1, None, None, None, runner, None, None)

    # -- serving -----------------------------------------------------------------------------------

    def seat(self, controller: Any) -> None:
        self.seated = controller

    def find_by_size(self, states: Any) -> None:
        pass

    def facts_reader(self, *_: Any) -> Any:
        return read_facts

    def verify_runner(self) -> Any:
        return self.runner

    def switch(self) -> Any:
        def apply(state: StepState) -> None:
            self.steps, self.runner = state.draft_steps, state.target_graphs

        return apply

    def kv_reserved_per_decode(self) -> int:
        return 4

    def skip_extend_at_zero(self, skips: bool) -> None:
        self.skips.append(skips)


def built(gb: float, memory_gb: float | None) -> list[int]:
    engine: Any = Engine(gb, rank=1)
    plan = plan_capture([3, 2, 1, 0], 8)
    DraftStepsController(engine, plan, FixedSteps(3), memory_gb=memory_gb).init_states()
    return list(engine.built)


@pytest.mark.parametrize("gb", [0.1, 0.0, -0.3])
def test_a_budget_holds_whatever_was_measured(gb: float) -> None:
    """Nothing measured is not "free of charge": another process may have freed memory meanwhile."""
    assert built(gb, 1e-6) == []


@pytest.mark.parametrize("gb", [0.1, 0.0, -0.3])
def test_all_widths_without_a_budget(gb: float) -> None:
    assert built(gb, None) == [2, 1, 0]


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("CUDA out of memory\nTried to"), "CUDA out of memory;"),
     (MemoryError(), "MemoryError;")],
)  # fmt: skip
def test_a_width_that_cannot_be_captured_is_named(error: Exception, told: str) -> None:
    engine: Any = Engine()

    def fail(*_: Any) -> Any:
        raise error

    engine.build_state = fail
    controller = DraftStepsController(engine, plan_capture([3, 1], 8), FixedSteps(3))
    with pytest.raises(CaptureError, match=f"^capturing draft_steps 1 .* failed: {told}") as raised:
        controller.init_states()
    assert raised.value.__cause__ is error


def test_no_width_goes_above_the_configured_one() -> None:
    """Buffers are sized by the configured width, whatever a narrower graph would cost."""
    engine: Any = Engine(1e-9)
    plan = plan_capture([3, 1], 8)
    controller = DraftStepsController(engine, plan, FixedSteps(3), memory_gb=1e-6)
    assert controller.fit_configured_width() == (1, 2, 4)
    for width in controller.plan.widths:
        assert (width.batches, width.dropped) == ((1, 2, 4), (6, 8))


class Served:
    """A controller of 3, 1 and 0 steps that serves, and what its engine ran in each round."""

    def __init__(
        self, engine: Any, policy: Policy | None = None, memory_gb: float | None = None
    ) -> None:
        self.engine = engine
        plan = plan_capture([3, 1, 0], 8)
        self.controller = DraftStepsController(
            engine, plan, policy or FixedSteps(3), memory_gb=memory_gb
        )
        self.controller.register(None)
        self.controller.init_states()
        self.controller.install(None if policy else RoundCosts())
        self.router = engine.runner

    def rounds(self, count: int = 1) -> list[int]:
        ran = []
        for _ in range(count):
            self.controller.activate_step_by_batch(1)
            self.engine.model_runner.forward_pass_id += 1
            ran.append(self.engine.steps)
        return ran

    def asks(self, count: int = 1, **asked: int) -> list[int]:
        """The rounds after a request."""
        self.controller.change({_KEYS[name]: value for name, value in asked.items()})
        return self.rounds(count)


_KEYS = {"mode": MODE, "pin": STEPS, "cold": COLD_ZERO}


class TestLiveControl:
    def test_a_change_waits_for_the_next_round(self) -> None:
        served = Served(Engine())
        served.rounds()
        served.controller.change({STEPS: 1})
        assert (served.controller.control.name, served.engine.steps) == ("pinned", 3)
        assert served.rounds(3) == [1, 1, 1]
        assert served.asks(2, pin=0) == [0, 0]

    def test_resumed_the_policy_chooses_again(self) -> None:
        served = Served(Engine())
        policy = served.controller.policy
        served.asks(pin=1)
        assert served.asks(2, pin=RESUME) == [3, 3]
        assert served.controller.policy is policy is served.controller.measured

    def test_what_was_refused_changes_nothing(self) -> None:
        served = Served(Engine())
        served.asks(pin=1)
        with pytest.raises(SettingsError):
            served.asks(mode=Mode.OFF, pin=2)
        assert served.rounds() == [1]

    def test_observe_and_back(self) -> None:
        served = Served(Engine())
        served.asks(pin=1)
        assert served.asks(2, mode=Mode.OBSERVE) == [3, 3]
        assert served.router.observe
        assert served.controller.counters.rounds == 3
        assert served.asks(2, mode=Mode.ON) == [1, 1]
        assert not served.router.observe
        assert served.engine.runner is served.router

    def test_off_is_stock_and_on_is_what_it_was(self) -> None:
        engine = Engine()
        served = Served(engine)
        served.asks(pin=1)
        assert served.asks(5, mode=Mode.OFF) == [3] * 5
        assert engine.runner is engine.stock is not served.router
        served.controller.on_verify_complete([2])
        assert served.controller.counters.rounds == 1
        assert served.controller.counters.verified_requests == 0
        assert served.asks(2, mode=Mode.ON) == [1, 1]
        assert engine.runner is served.router
        served.controller.on_verify_complete([2])
        assert served.controller.counters.rounds == 3
        assert served.controller.counters.verified_requests == 1

    def test_from_off_to_observe(self) -> None:
        served = Served(Engine())
        served.asks(mode=Mode.OFF)
        assert served.asks(mode=Mode.OBSERVE) == [3]
        assert served.engine.runner is served.router
        assert served.router.observe

    def test_cold_zero(self) -> None:
        """The engine skips, requests are marked, and such a round is timed as plain decode."""
        served = Served(Engine())
        served.controller.change({COLD_ZERO: 1, STEPS: 0})
        assert served.engine.skips == []
        assert served.rounds(20) == [0] * 20
        assert served.engine.skips == [True]
        assert served.controller.feedback.skips_extend
        assert served.controller.measured is not None
        assert served.controller.measured.chooser.zero == PLAIN_DECODE
        assert set(served.controller.timer.snapshot()) == {f"1x{PLAIN_DECODE}"}
        served.asks(20, cold=0)
        assert served.engine.skips == [True, False]
        assert not served.controller.feedback.skips_extend
        assert served.controller.measured.chooser.zero == 0
        assert "1x0" in served.controller.timer.snapshot()

    def test_a_runner_that_sglang_replaced_is_left_alone(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        served = Served(Engine())
        served.rounds()
        theirs = served.engine.runner = StockRunner(3)
        for change in ({"pin": 1}, {"mode": Mode.OFF}, {"mode": Mode.ON}, {"pin": 0}):
            assert served.asks(2, **change) == [3, 3]
            assert served.engine.runner is theirs
        (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "SGLang replaced its graph runner" in error.message
        assert served.controller.replaced


class TestRanks:
    def test_tables_go_out_by_the_number_of_the_round(self) -> None:
        """Never when something changed: the other ranks would not come to the broadcast."""
        served = Served(Engine())
        sent = served.engine.sent
        served.rounds(2 * PERIOD + 1)
        assert [table[0] for table in sent] == [0, PERIOD, 2 * PERIOD]
        for change in ({"pin": 1}, {"mode": Mode.OBSERVE}, {"mode": Mode.OFF}):
            served.asks(2 * PERIOD, **change)
        assert len(sent) == 3
        served.asks(PERIOD, mode=Mode.ON, pin=RESUME)
        assert [table[0] for table in sent[3:]] == [3 * PERIOD]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_every_rank_does_what_rank_0_sent(self, rank: int) -> None:
        engine = Engine(rank=rank)
        engine.from_rank_0 = lambda own: StepTable(0, 3, (1,) * 5, (NO_PROBE,) * 5).pack()  # type: ignore[method-assign]
        assert Served(engine).rounds(PERIOD) == [1] * PERIOD

    @pytest.mark.parametrize("rank", [0, 1])
    def test_only_rank_0_is_told_of_rounds(self, rank: int) -> None:
        served = Served(Engine(rank=rank))
        served.asks(20, pin=3)
        served.controller.feedback.result(4, [SimpleNamespace()] * 4)
        served.controller.on_verify_complete([3, 3, 3, 3])
        assert served.controller.measured is not None
        chooser = served.controller.measured.chooser
        assert chooser.acceptance.observed == (0 if rank else 4)
        assert bool(chooser.costs.rows()) == (rank == 0)
        assert served.controller.counters.verified_requests == 4


class TestDropped:
    def test_its_rounds_take_the_configured_steps(self) -> None:
        served = Served(Engine(rank=1), ScriptedSteps([1, 0]), memory_gb=1e-6)
        assert served.engine.built == []
        assert served.rounds(4) == [3] * 4

    def test_it_cannot_be_pinned(self) -> None:
        served = Served(Engine(rank=1), memory_gb=1e-6)
        with pytest.raises(SettingsError, match="must be one of -1, 3;"):
            served.asks(pin=1)
