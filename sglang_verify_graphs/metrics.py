"""Counts of replayed and eager forwards, by phase, bucket and reason.

Every counter is made at start-up: counting on the hot path adds to an integer and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_verify_graphs.buckets import VerifyBucket
from sglang_verify_graphs.gate import Decision, Phase, RejectReason

logger = logging.getLogger("sglang_verify_graphs")

_SHARE_AFTER = 64
"""Eager forwards of a phase after which their share is worth one warning."""


class Counters:
    """Replays per bucket and eager forwards per reason, for each phase of a round."""

    def __init__(self, buckets: Iterable[VerifyBucket], *, log: bool) -> None:
        self._log = log
        buckets = tuple(buckets)
        self.replayed = {phase: dict.fromkeys(buckets, 0) for phase in Phase}
        self.eager = {phase: dict.fromkeys(RejectReason, 0) for phase in Phase}
        self.padded_rows = 0
        """Of verify; a row of a draft forward is another thing."""
        self.rounds = 0
        self.accepted: Counter[int] = Counter()
        """Verified requests by their correct drafts."""
        self._after_zero = [0, 0]
        """Tokens and requests of the first rounds with drafts after some without."""
        self._warned: set[Phase] = set()

    def replay(self, phase: Phase, bucket: VerifyBucket, batch: int) -> None:
        """Count a replay of ``bucket`` with ``batch`` requests in it."""
        counts = self.replayed[phase]
        counts[bucket] = counts.get(bucket, 0) + 1
        if phase is Phase.VERIFY:
            self.padded_rows += bucket.padded_rows(batch)

    def refuse(self, phase: Phase, decision: Decision) -> None:
        """Count an eager forward; say each reason once, and once how large the eager share is."""
        reason = decision.reason or RejectReason.REFUSED_UPSTREAM
        counts = self.eager[phase]
        counts[reason] += 1
        if not self._log:
            return
        if counts[reason] == 1:
            detail = f" ({decision.detail})" if decision.detail else ""
            logger.warning(
                "[verify-graphs] a %s ran eager: %s%s; %s",
                phase.value, reason.value, detail, reason.advice,
            )  # fmt: skip
        if phase not in self._warned and sum(counts.values()) >= _SHARE_AFTER:
            self._warned.add(phase)
            eager, total = sum(counts.values()), self.total(phase)
            reasons = ", ".join(f"{r.value} {n}" for r, n in counts.items() if n)
            main = max(counts, key=lambda r: counts[r])
            logger.warning(
                "[verify-graphs] %d%% of %d %s forwards so far ran eager: %s; %s",
                round(100 * eager / total), total, phase.value, reasons, main.advice,
            )  # fmt: skip

    def accept(self, correct_drafts: Iterable[int]) -> None:
        """Count the correct drafts of each request of a verify."""
        self.accepted.update(correct_drafts)

    def accept_after_zero(self, correct_drafts: Sequence[int]) -> None:
        """Count again what was accepted just after rounds without drafts."""
        self._after_zero[0] += sum(correct_drafts) + len(correct_drafts)
        self._after_zero[1] += len(correct_drafts)

    @property
    def verified_requests(self) -> int:
        return sum(self.accepted.values())

    @property
    def accepted_tokens(self) -> int:
        """What verify committed: correct drafts, and the bonus token of each request."""
        return sum((drafts + 1) * n for drafts, n in self.accepted.items())

    def accepted_by_position(self) -> list[int]:
        """Requests whose first draft was correct, whose first two were, and so on."""
        deepest = max(self.accepted, default=0)
        return [
            sum(n for drafts, n in self.accepted.items() if drafts >= position)
            for position in range(1, deepest + 1)
        ]

    def total(self, phase: Phase) -> int:
        return sum(self.replayed[phase].values()) + sum(self.eager[phase].values())

    def snapshot(self) -> dict[str, Any]:
        """Plain data for ``status()`` and ``/server_info``."""
        phases = {
            phase.value: {
                "replayed": sum(self.replayed[phase].values()),
                "eager": sum(self.eager[phase].values()),
                "reasons": {r.value: n for r, n in self.eager[phase].items() if n},
            }
            for phase in Phase
        }
        return {
            "phases": phases,
            "buckets": {
                f"{b.batch}x{b.draft_steps}": n for b, n in self.replayed[Phase.VERIFY].items() if n
            },
            "padded_rows": self.padded_rows,
            "rounds": self.rounds,
            "verified_requests": self.verified_requests,
            "accepted_by_position": self.accepted_by_position(),
            "accept_length": _mean(self.accepted_tokens, self.verified_requests),
            "accept_length_after_zero": _mean(*self._after_zero),
        }


def _mean(tokens: int, requests: int) -> float | None:
    return round(tokens / requests, 4) if requests else None
