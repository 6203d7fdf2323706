"""The memory budget of narrower widths, on an engine that only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.buckets import plan_capture
from sglang_verify_graphs.controller import DraftStepsController
from sglang_verify_graphs.policy import FixedSteps


class Engine:
    """Captured the configured width for ``gb``; everything after it costs nothing."""

    def __init__(self, gb: float) -> None:
        self.worker = SimpleNamespace(speculative_num_steps=3)
        self.model_runner = SimpleNamespace(device="cpu")
        self.gb = gb
        self.built: list[int] = []

    def graph_usage(self) -> tuple[float, float]:
        return self.gb, 1.0

    def largest(self, value: float) -> float:
        return value

    def free_gb(self) -> float:
        return 100.0

    def stock_ladder(self) -> list[int]:
        return [1, 2, 4]

    def tp_rank(self) -> int:
        return 1

    def build_state(self, draft_steps: int, batches: Any) -> Any:
        self.built.append(draft_steps)
        return SimpleNamespace(draft_extend_graphs=None)


def built(gb: float, memory_gb: float | None) -> list[int]:
    engine: Any = Engine(gb)
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


def test_no_width_goes_above_the_configured_one() -> None:
    """Buffers are sized by the configured width, whatever a narrower graph would cost."""
    engine: Any = Engine(1e-9)
    plan = plan_capture([3, 1], 8)
    controller = DraftStepsController(engine, plan, FixedSteps(3), memory_gb=1e-6)
    assert controller.fit_configured_width() == (1, 2, 4)
    for width in controller.plan.widths:
        assert (width.batches, width.dropped) == ((1, 2, 4), (6, 8))
