"""How many draft steps the next decode round takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sglang_verify_graphs.buckets import CapturePlan
from sglang_verify_graphs.chooser import NO_PROBE, PROBE_ROUNDS, StepChooser
from sglang_verify_graphs.costs import PLAIN_DECODE, RoundCosts
from sglang_verify_graphs.errors import AttestationError

PERIOD = 8
"""Rounds between two tables: 400 verified requests are 8 rounds of a batch of 48."""
DWELL = 4
"""Least rounds from one switch to the next, so that a batch between two buckets cannot flap."""


class Policy(Protocol):
    """Asked once at the head of each decode round, on every rank alike."""

    @property
    def due(self) -> bool:
        """Whether rank 0's decision must reach every rank before this round."""
        ...

    def draft_steps(self, batch: int) -> int:
        """Steps for a round of ``batch`` requests; must be one of the captured step counts."""
        ...


class FixedSteps:
    """The same step count always: SGLang's own behaviour without ``--speculative-adaptive``."""

    due = False

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def draft_steps(self, batch: int) -> int:
        return self._steps


class ScriptedSteps:
    """Cycles through a list, one entry a round, so that tests reach every switch."""

    due = False

    def __init__(self, script: Sequence[int]) -> None:
        self._script = tuple(script)
        self._round = -1

    def draft_steps(self, batch: int) -> int:
        self._round = (self._round + 1) % len(self._script)
        return self._script[self._round]


@dataclass(frozen=True)
class StepTable:
    """What every rank does until the next table; one entry per bucket, ascending."""

    round: int
    """Decode rounds before the first one under this table."""
    held: int
    """Step count of the round before."""
    steps: tuple[int, ...]
    probes: tuple[int, ...]
    """Tried in the first ``PROBE_ROUNDS`` rounds instead, unless ``NO_PROBE``."""

    def pack(self) -> list[int]:
        """For a broadcast: as many integers for every table of one plan."""
        return [self.round, self.held, *self.steps, *self.probes]

    @classmethod
    def unpack(cls, payload: Sequence[int]) -> StepTable:
        half = 1 + len(payload) // 2
        return cls(payload[0], payload[1], tuple(payload[2:half]), tuple(payload[half:]))


class MeasuredSteps:
    """The step count that commits most tokens per second, by measured cost and acceptance.

    Rank 0 is fed and decides; every rank looks up. At the head of each decode round a rank calls
    ``install`` with rank 0's ``decide().pack()`` when ``due``, and then ``draft_steps``.
    """

    def __init__(self, plan: CapturePlan, configured: int, costs: RoundCosts | None = None) -> None:
        self.chooser = StepChooser(plan, configured, costs or RoundCosts())
        batches = self.chooser.batches
        self._bucket_of = [bisect_left(batches, batch) for batch in range(batches[-1] + 1)]
        self._visits = [0] * len(batches)
        self._probed = [0] * len(batches)
        self._round = 0
        self._held = configured
        self._held_until = 0
        self.table = StepTable(0, configured, *self.chooser.chosen)

    @property
    def due(self) -> bool:
        """Whether a table must be installed before this round: by its number, never by need."""
        return self._round % PERIOD == 0

    def install(self, payload: Sequence[int]) -> None:
        """Take rank 0's table over; a rank that has seen other rounds stops."""
        table = StepTable.unpack(payload)
        here = (self._round, self._held, len(self._visits))
        if here != (table.round, table.held, len(table.steps)):
            raise AttestationError(
                f"ranks disagree on the draft steps: decode round {here[0]}, {here[1]} steps and "
                f"{here[2]} buckets here, round {table.round}, {table.held} steps and "
                f"{len(table.steps)} buckets on rank 0; restart the server and report it"
            )
        self.table = table

    def draft_steps(self, batch: int) -> int:
        number, bucket, table = self._round, self._bucket_of[batch], self.table
        self._round = number + 1
        self._visits[bucket] += 1
        probe = table.probes[bucket]
        if probe != NO_PROBE and number < table.round + PROBE_ROUNDS:
            self._probed[bucket] += 1
            return probe
        steps = table.steps[bucket]
        if steps != self._held and (
            number >= self._held_until or self._held not in self.chooser.captured[bucket]
        ):
            self._held = steps
            self._held_until = number + DWELL
        return self._held

    def timed(self, batch: int, draft_steps: int, ms: float) -> None:
        """Rank 0: a served round of ``batch`` requests took ``ms``, start to start.

        ``PLAIN_DECODE`` for draft steps is a round of 0 without draft extend.
        """
        bucket = self.chooser.batches[self._bucket_of[batch]]
        self.chooser.costs.add(bucket, draft_steps, ms)

    def verified(self, draft_steps: int, correct_drafts: Sequence[int]) -> None:
        """Rank 0: correct drafts of the warm requests of a verify, at the steps that it ran."""
        self.chooser.verified(draft_steps, correct_drafts)

    def skip_extend_at_zero(self, skips: bool) -> None:
        """Rounds of 0 steps cost what a plain decode round does, or pay for the draft extend."""
        self.chooser.zero = PLAIN_DECODE if skips else 0

    def break_even(self) -> dict[tuple[int, int], float]:
        """Accept length that earns nothing over 0 steps, by (batch, draft steps), where known."""
        chooser = self.chooser
        return {
            (batch, steps): found.value
            for batch, captured in zip(chooser.batches, chooser.captured, strict=True)
            for steps in captured
            if steps and (found := chooser.costs.break_even(batch, steps, chooser.zero))
        }

    def snapshot(self) -> dict[str, Any]:
        """What is known and chosen, as plain data."""
        chooser = self.chooser
        return {
            "batches": list(chooser.batches),
            "chosen": dict(zip(map(str, chooser.batches), self.table.steps, strict=True)),
            "costs": [asdict(row) for row in chooser.costs.rows()],
            "accept_length": {
                str(steps): found and list(found)
                for steps in range(chooser.acceptance.max_steps + 1)
                for found in (chooser.acceptance.accept_length(steps),)
            },
            "break_even_accept_length": {
                f"{batch}x{steps}": round(length, 4)
                for (batch, steps), length in self.break_even().items()
            },
            "verified_requests": chooser.acceptance.observed,
        }

    def decide(self) -> StepTable:
        """Rank 0: the next table, from what was measured so far."""
        self.chooser.choose(self._round, self._visits, self._probed)
        for bucket in range(len(self._visits)):
            self._visits[bucket] = self._probed[bucket] = 0
        return StepTable(self._round, self._held, *self.chooser.chosen)
