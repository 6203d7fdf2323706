"""How many draft steps the next decode round takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """Asked once at the head of each decode round, on every rank alike."""

    def draft_steps(self, batch: int) -> int:
        """Steps for a round of ``batch`` requests; must be one of the captured step counts."""
        ...


class FixedSteps:
    """The same step count always: SGLang's own behaviour without ``--speculative-adaptive``."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def draft_steps(self, batch: int) -> int:
        return self._steps


class ScriptedSteps:
    """Cycles through a list, one entry a round, so that tests reach every switch."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = tuple(script)
        self._round = -1

    def draft_steps(self, batch: int) -> int:
        self._round = (self._round + 1) % len(self._script)
        return self._script[self._round]
