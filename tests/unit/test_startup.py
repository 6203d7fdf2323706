"""Attestation: every rank is patched alike and holds the same plan, or no rank serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.buckets import CapturePlan, plan_capture
from sglang_verify_graphs.compat.preflight import Row, State
from sglang_verify_graphs.errors import AttestationError
from sglang_verify_graphs.startup import Report, _attest
from sglang_verify_graphs.support import ServerFacts

FACTS = ServerFacts("EAGLE3", 1, 3, 4, 8, tp_size=2)


class Ranks:
    """An engine on rank 0 whose other rank answers ``other``."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self._other(mine)]


def attest(other: Any, *, reserved: int = 4, in_place: bool = True) -> Report:
    plan: CapturePlan = plan_capture([3, 1], 8)
    controller: Any = SimpleNamespace(
        plan=plan, least_kv_reserved=lambda: reserved, in_place=lambda: in_place
    )
    report = Report(
        sglang="1", preflight=(Row("patch", "a:A.f"), Row("call", "b:g", State.NOT_NEEDED, "why"))
    )
    engine: Any = Ranks(other)
    _attest(engine, controller, FACTS, report)
    return report


def test_equal_ranks_pass() -> None:
    assert attest(lambda mine: mine).ranks == 2


def test_a_rank_with_another_plan_is_named() -> None:
    with pytest.raises(AttestationError, match="rank 1 captured") as caught:
        attest(lambda mine: ("", mine[1][:1], mine[2]))
    assert "same flags and free memory" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (lambda mine: ("SGLang 2", *mine[1:]), "rank 1 has SGLang 2, rank 0 SGLang 1"),
        (lambda mine: mine[:-1], "rank 1 has None, rank 0 b:g not needed: why"),
        (lambda mine: (*mine, "c:h applied"), "rank 1 has c:h applied, rank 0 None"),
    ],
)
def test_a_rank_that_is_patched_otherwise_is_named(table: Any, found: str) -> None:
    with pytest.raises(AttestationError, match=found) as caught:
        attest(lambda mine: (*mine[:2], table(mine[2])))
    assert "on every node" in str(caught.value)


def test_trouble_on_another_rank_stops_this_one() -> None:
    with pytest.raises(AttestationError, match="rank 1: the verify runner is not in place"):
        attest(lambda mine: ("the verify runner is not in place", *mine[1:]))


def test_a_runner_that_is_not_ours() -> None:
    with pytest.raises(AttestationError, match="rank 0: the verify runner is not in place"):
        attest(lambda mine: mine, in_place=False)


def test_kv_reserved_for_less_than_the_widest() -> None:
    with pytest.raises(AttestationError, match="reserved for 3 tokens a round but 4"):
        attest(lambda mine: mine, reserved=3)
