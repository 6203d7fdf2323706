"""What changes while serving: by live control, and by the policy that serves by default."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from sglang_verify_graphs.compat.releases import resolve_release
from tests.engine.scenarios import random_prompts
from tests.engine.worker import run_plugin as run

pytestmark = pytest.mark.engine

if not resolve_release(version("sglang"), allow_untested=False).zero_steps:
    pytest.skip("this SGLang release verifies no round without drafts", allow_module_level=True)

PIN, MODE, COLD = "verify_graph_steps", "verify_graphs", "verify_graph_cold_zero"
OFF, ON, OBSERVE = 0, 1, 2


@pytest.fixture(scope="module")
def plain(pair: dict[str, str]) -> list[list[int]]:
    prompts = random_prompts(4)
    return list(run("plain", {"target": pair["target"]}, prompts=prompts, max_new_tokens=120))


def steered(pair: dict[str, str], *changes: tuple[int, dict[str, int]]) -> dict[str, Any]:
    return run("steered", {**pair, "steps": 3}, {}, changes=list(changes))  # type: ignore[no-any-return]


def steps_of(part: dict[str, Any]) -> set[int]:
    return {steps for _, steps in part["rounds"]}


def test_every_change_holds_from_the_next_round_on(
    pair: dict[str, str], plain: list[list[int]]
) -> None:
    got = steered(
        pair, (4, {PIN: 1}), (8, {PIN: 9}), (12, {MODE: OBSERVE}), (16, {MODE: OFF}),
        (20, {MODE: ON}), (24, {PIN: -1}), (44, {PIN: 0, MODE: ON}),
    )  # fmt: skip
    assert got["tokens"] == plain
    first, pinned, refused, observed, off, on, resumed, zero = got["parts"]
    assert [part.get("updated") for part in got["parts"][1:]] == [1, 0, 1, 1, 1, 1, 1]
    assert steps_of(pinned) == steps_of(refused) == {1}
    assert "it must be one of -1, 0, 1, 2, 3" in "".join(got["log"])
    assert steps_of(observed) == steps_of(off) == {3}
    assert [part["stock_runner"] for part in (observed, off, on)] == [False, True, False]
    assert (observed["counted"], off["counted"], on["counted"]) == (4, 0, 4)
    assert off["replays"]["target_verify"] == 4
    assert steps_of(on) == {1}
    assert len(steps_of(resumed)) > 1
    assert steps_of(zero) == {0}
    assert zero["replays"]["draft_extend"] == len(zero["rounds"])
    verify = got["status"]["phases"]["verify"]
    assert verify["eager"] == 0
    assert got["status"]["control"] == "pinned"
    assert first["observed"] > 0
    assert got["leaked"] == 0


def test_acceptance_after_rounds_without_drafts(
    pair: dict[str, str], plain: list[list[int]]
) -> None:
    """Case 14: kept warm it is what it was; skipped, it is told, and nobody inherits the holes."""
    always = steered(pair, (0, {PIN: 3}))
    warm, cold = (
        steered(pair, (0, {PIN: 3}), (10, {PIN: 0, COLD: skips}), (40, {PIN: 3}))
        for skips in (0, 1)
    )
    for got, skips in ((warm, False), (cold, True)):
        assert got["tokens"] == plain
        _, before, zero, after = got["parts"]
        assert zero["replays"].get("draft_extend", 0) == (0 if skips else 30)
        assert before["observed"] == 40
        assert (after["observed"] == 0) is skips
        assert got["uncached"] == [skips] * 4
        assert got["leaked"] == 0
    returned = warm["status"]["accept_length_after_zero"]
    assert returned > 0.95 * always["accept_length"]
    assert returned > 1.05 * cold["status"]["accept_length_after_zero"]
