"""Live control: what ``/set_internal_state`` changes while serving, the kill switch among it.

SGLang accepts numbers alone there, and hands a request to all ranks between the same two rounds; a
change takes effect at the head of the next decode round, alike on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from sglang_verify_graphs.errors import SettingsError

MODE, STEPS, COLD_ZERO = "verify_graphs", "verify_graph_steps", "verify_graph_cold_zero"
KEYS = (MODE, STEPS, COLD_ZERO)
RESUME = -1
"""In place of a step count: back to the policy."""


class Mode(IntEnum):
    """What the package does with a round."""

    OFF = 0
    """Nothing: stock's own runners, the configured draft steps."""
    ON = 1
    OBSERVE = 2
    """Stock's answers and the configured draft steps; counts and reasons only."""


@dataclass(frozen=True)
class Control:
    """What is asked for; the default is what a server starts with."""

    mode: Mode = Mode.ON
    pinned: int | None = None
    """Draft steps of every round; None leaves them to the policy."""
    cold_zero: bool = False
    """Rounds of 0 steps skip the draft extend."""

    @property
    def name(self) -> str:
        if self.mode is not Mode.ON:
            return self.mode.name.lower()
        return "policy" if self.pinned is None else "pinned"

    def change(self, asked: Mapping[str, float], captured: Collection[int]) -> Control:
        """This control with other values; a bad one changes nothing and is a ``SettingsError``."""
        changed = self
        for key, value in asked.items():
            allowed: Collection[int]
            if key == MODE:
                allowed = tuple(Mode)
            elif key == COLD_ZERO:
                allowed = (0, 1) if 0 in captured else (0,)
            else:
                allowed = (RESUME, *sorted(captured))
            if value not in allowed:
                choices = ", ".join(str(int(v)) for v in allowed)
                raise SettingsError(
                    f"{key} {value!r}: it must be one of {choices}; nothing was changed"
                )
            number = int(value)
            if key == MODE:
                changed = replace(changed, mode=Mode(number))
            elif key == COLD_ZERO:
                changed = replace(changed, cold_zero=bool(number))
            else:
                changed = replace(changed, pinned=None if number == RESUME else number)
        return changed
