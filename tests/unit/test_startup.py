"""Attestation: every rank is patched alike and holds the same plan, or no rank serves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.buckets import CapturePlan, plan_capture
from sglang_verify_graphs.compat.preflight import Row, State
from sglang_verify_graphs.errors import AttestationError
from sglang_verify_graphs.settings import Settings
from sglang_verify_graphs.startup import MEETING_SECONDS, Report, _attest, _meet
from sglang_verify_graphs.support import ServerFacts

FACTS = ServerFacts("EAGLE3", 1, 3, 4, 8, tp_size=2)


class Ranks:
    """An engine on rank 0 whose other rank answers ``other``."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self._other(mine)]

    def meet(self, note: str, seconds: float) -> list[str | None]:
        assert seconds == MEETING_SECONDS
        return [note, self._other(note)]

    def tp_rank(self) -> int:
        return 0


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


def meet(other: Settings | None) -> None:
    """Rank 0 has a secret of its own in its shell, and ``SETTINGS``."""
    notes: list[str] = []
    if other is not None:
        _meet(Ranks(lambda note: notes.append(note) or note), other)  # type: ignore[arg-type,func-returns-value]
    engine: Any = Ranks(lambda note: notes[0] if notes else None)
    _meet(engine, replace(SETTINGS, nccl_shell=("NCCL_MY_TOKEN=s3cr3t",)))


SETTINGS = Settings(steps=(1, 3), nccl_env=("NCCL_ALGO=Ring", "NCCL_MY_TOKEN=s3cr3t"))


def test_ranks_that_were_started_alike_meet() -> None:
    meet(SETTINGS)
    meet(replace(SETTINGS, nccl_shell=("NCCL_SOCKET_IFNAME=eth1",)))  # nodes may differ in that


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(AttestationError, match="rank 1 did not come within 300 s"):
        meet(None)


def test_a_rank_that_was_started_otherwise_is_named_without_secrets() -> None:
    with pytest.raises(AttestationError) as caught:
        meet(replace(SETTINGS, max_batch=8, nccl_env=("NCCL_ALGO=Tree", "NCCL_MY_TOKEN=0th3r")))
    said = str(caught.value)
    assert "rank 1 on " in said
    for part in ("'max_batch': 8", "NCCL_ALGO=Tree", "'max_batch': None", "NCCL_ALGO=Ring"):
        assert part in said
    assert "steps" not in said  # alike
    assert "s3cr3t" not in said
    assert "0th3r" not in said
