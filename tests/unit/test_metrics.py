"""Counts, and few words about them in the log."""

from __future__ import annotations

import json
import logging

import pytest

from sglang_verify_graphs.buckets import VerifyBucket, plan_capture
from sglang_verify_graphs.gate import BatchFacts, Decision, Phase, RejectReason, VerifyGate
from sglang_verify_graphs.metrics import Counters

LOGGER = "sglang_verify_graphs"


def refusal(reason: RejectReason) -> Decision:
    return Decision(None, reason)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class TestWarnings:
    def test_case_2_tiny_ladder(self, caplog: pytest.LogCaptureFixture) -> None:
        """Graphs up to batch 2, 20 clients: one warning for the share, never one a round."""
        plan = plan_capture([3], 20, cap=2)
        gate, counters = VerifyGate(plan), Counters(plan, log=True)
        for verify in range(2000):
            decision = gate.decide(BatchFacts(20 if verify % 20 else 2, 3))
            if decision.bucket:
                counters.replay(Phase.VERIFY, decision.bucket, decision.bucket.batch)
            else:
                counters.refuse(Phase.VERIFY, decision)
        said = warnings(caplog)
        shares = [text for text in said if "%" in text]
        assert len(shares) == 1
        assert len(said) <= 2
        assert all("--verify-graph-max-batch" in text for text in said)
        assert "BATCH_ABOVE_LADDER" in shares[0]
        assert int(shares[0].split("%")[0].split()[-1]) > 90
        assert counters.snapshot()["phases"]["verify"]["eager"] == 1900

    def test_each_reason_once(self, caplog: pytest.LogCaptureFixture) -> None:
        counters = Counters((), log=True)
        for _ in range(20):
            counters.refuse(Phase.VERIFY, refusal(RejectReason.DP_PEER))
            counters.refuse(Phase.VERIFY, refusal(RejectReason.RAGGED_VERIFY))
        assert len(warnings(caplog)) == 2
        assert "DP_PEER" in warnings(caplog)[0]
        assert RejectReason.RAGGED_VERIFY.advice in warnings(caplog)[1]

    def test_phases_are_told_apart(self, caplog: pytest.LogCaptureFixture) -> None:
        counters = Counters((), log=True)
        for phase in Phase:
            counters.refuse(phase, refusal(RejectReason.BACKEND_NOT_GRAPHED))
        said = warnings(caplog)
        assert all(f"a {p.value} ran eager" in text for p, text in zip(Phase, said, strict=True))

    def test_a_quiet_rank(self, caplog: pytest.LogCaptureFixture) -> None:
        counters = Counters((), log=False)
        for _ in range(100):
            counters.refuse(Phase.VERIFY, refusal(RejectReason.DP_PEER))
        assert warnings(caplog) == []
        assert counters.total(Phase.VERIFY) == 100

    def test_the_detail_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        plan = plan_capture([3], 48, cap=32)
        counters = Counters(plan, log=True)
        counters.refuse(Phase.VERIFY, VerifyGate(plan).decide(BatchFacts(40, 3)))
        assert "(40 > 32)" in warnings(caplog)[0]


class TestSnapshot:
    def test_fresh(self) -> None:
        snapshot = Counters(plan_capture([3, 0], 4), log=False).snapshot()
        assert snapshot["accept_length"] is None
        assert snapshot["buckets"] == {}
        assert snapshot["rounds"] == snapshot["padded_rows"] == 0
        assert set(snapshot["phases"]) == {"draft", "verify", "draft_extend"}

    def test_counts(self) -> None:
        counters = Counters(plan_capture([3], 4), log=False)
        for _ in range(3):
            counters.replay(Phase.VERIFY, VerifyBucket(3, 4), 3)
        counters.replay(Phase.DRAFT, VerifyBucket(3, 4), 1)
        counters.refuse(Phase.VERIFY, refusal(RejectReason.DP_PEER))
        snapshot = counters.snapshot()
        assert snapshot["buckets"] == {"4x3": 3}
        assert snapshot["padded_rows"] == 12
        assert snapshot["phases"]["verify"] == {
            "replayed": 3,
            "eager": 1,
            "reasons": {"DP_PEER": 1},
        }
        assert snapshot["phases"]["draft"]["replayed"] == 1

    def test_accept_length_counts_the_bonus_token(self) -> None:
        counters = Counters((), log=False)
        counters.accept([0, 3])
        counters.accept([2])
        assert counters.snapshot()["accept_length"] == pytest.approx((1 + 4 + 3) / 3, abs=1e-4)

    def test_a_refusal_without_a_reason_is_still_named(self) -> None:
        counters = Counters((), log=False)
        counters.refuse(Phase.VERIFY, Decision(None))
        assert counters.snapshot()["phases"]["verify"]["reasons"] == {"REFUSED_UPSTREAM": 1}

    def test_json(self) -> None:
        counters = Counters(plan_capture([3], 4), log=False)
        counters.replay(Phase.VERIFY, VerifyBucket(3, 4), 4)
        counters.accept([1])
        assert json.loads(json.dumps(counters.snapshot())) == counters.snapshot()
