"""Live control: a request is taken as a whole or refused as a whole, in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs import install
from sglang_verify_graphs.control import COLD_ZERO, KEYS, MODE, RESUME, STEPS, Control, Mode
from sglang_verify_graphs.errors import SettingsError

CAPTURED = (3, 1, 0)
PINNED = Control(pinned=1)


@pytest.mark.parametrize(
    ("before", "asked", "after", "name"),
    [
        (Control(), {MODE: 0}, Control(Mode.OFF), "off"),
        (Control(), {MODE: 2.0}, Control(Mode.OBSERVE), "observe"),
        (Control(Mode.OFF), {MODE: 1}, Control(), "policy"),
        (Control(), {STEPS: 1}, PINNED, "pinned"),
        (Control(), {STEPS: 0}, Control(pinned=0), "pinned"),
        (PINNED, {STEPS: RESUME}, Control(), "policy"),
        (PINNED, {MODE: 0}, Control(Mode.OFF, 1), "off"),
        (Control(Mode.OFF, 1), {MODE: 1}, PINNED, "pinned"),
        (Control(), {COLD_ZERO: 1}, Control(cold_zero=True), "policy"),
        (Control(cold_zero=True), {COLD_ZERO: 0}, Control(), "policy"),
        (PINNED, {MODE: 2, STEPS: 3, COLD_ZERO: 1}, Control(Mode.OBSERVE, 3, True), "observe"),
        (PINNED, {}, PINNED, "pinned"),
    ],
)
def test_change(before: Control, asked: dict[str, float], after: Control, name: str) -> None:
    changed = before.change(asked, CAPTURED)
    assert changed == after
    assert changed.name == name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({MODE: 3}, f"{MODE} 3: it must be one of 0, 1, 2;"),
        ({MODE: -1}, f"{MODE} -1"),
        ({STEPS: 2}, f"{STEPS} 2: it must be one of -1, 0, 1, 3;"),
        ({STEPS: 0.5}, f"{STEPS} 0.5"),
        ({COLD_ZERO: 2}, f"{COLD_ZERO} 2: it must be one of 0, 1;"),
        ({MODE: 0, STEPS: 9}, f"{STEPS} 9"),
    ],
)
def test_a_bad_value(asked: dict[str, float], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PINNED.change(asked, CAPTURED)
    assert str(caught.value).startswith(said)


def test_no_cold_rounds_where_0_steps_are_not_captured() -> None:
    with pytest.raises(SettingsError, match=f"{COLD_ZERO} 1: it must be one of 0;"):
        Control().change({COLD_ZERO: 1}, (3, 1))
    assert Control().change({COLD_ZERO: 0}, (3, 1)) == Control()


VALUES = st.integers(-3, 6) | st.floats() | st.booleans() | st.none() | st.text(max_size=5)


@given(
    st.sets(st.integers(0, 4), min_size=1), st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES))
)
def test_any_sequence_is_refused_unchanged_or_valid(
    captured: set[int], requests: list[dict[str, Any]]
) -> None:
    """Older releases of SGLang pass on what JSON holds, not numbers alone."""
    control = Control()
    for asked in requests:
        before = control
        try:
            control = control.change(asked, captured)
        except SettingsError as error:
            message = str(error)
            assert len(message.splitlines()) == 1
            assert message.endswith("nothing was changed")
            continue
        now = {MODE: control.mode, STEPS: control.pinned, COLD_ZERO: control.cold_zero}
        was = {MODE: before.mode, STEPS: before.pinned, COLD_ZERO: before.cold_zero}
        for key in KEYS:
            resumed = key == STEPS and asked.get(key) == RESUME
            assert now[key] == (None if resumed else asked.get(key, was[key]))
        assert type(control.mode) is Mode
        assert control.pinned is None or type(control.pinned) is int
        assert control.pinned is None or control.pinned in captured
        assert type(control.cold_zero) is bool
        assert not control.cold_zero or 0 in captured


class TestRequest:
    """``Scheduler.set_internal_state``; up to 0.5.14 stock answers "updated" whatever it did."""

    @staticmethod
    def answer(monkeypatch: pytest.MonkeyPatch, ours: bool, **asked: float) -> tuple[Any, Any]:
        """What is answered, and what stock was asked."""
        told = SimpleNamespace(change=lambda _: ours)
        monkeypatch.setattr(install, "report", told)
        request = SimpleNamespace(server_args=dict(asked))
        stock = SimpleNamespace(updated=True)
        answer = install._set_internal_state(lambda _: stock, None, (request,), {})
        return answer.updated, request.server_args

    def test_stock_is_not_asked_for_what_we_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = {MODE: 0, "pp_max_micro_batch_size": 8}
        assert self.answer(monkeypatch, True, **asked) == (True, {"pp_max_micro_batch_size": 8})

    def test_what_we_refuse_is_refused_on_every_release(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.answer(monkeypatch, False, **{STEPS: 9}) == (False, {STEPS: 9})

    def test_what_is_not_ours_is_stocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.answer(monkeypatch, False, other=1) == (True, {"other": 1})
