"""The plugin on real SGLang: tokens, acceptance, coverage and switching."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from sglang_verify_graphs.compat.releases import resolve_release
from tests.engine.worker import run_plugin as run

pytestmark = pytest.mark.engine

RELEASE = resolve_release(version("sglang"), allow_untested=False)
STEPS = [0, 1, 2, 3, 4] if RELEASE.zero_steps else [1, 2, 3, 4]
BATCHES = list(range(1, 9))


@pytest.fixture(scope="session")
def without_speculation(pair: dict[str, str]) -> dict[str, Any]:
    return run("serve", {"target": pair["target"]}, requests=10)


@pytest.fixture(scope="session")
def all_steps(pair: dict[str, str]) -> dict[str, Any]:
    return run("every_batch_and_steps", {**pair, "steps": 4}, {}, steps=STEPS, batches=BATCHES)


def test_tokens_equal_plain_decode_at_every_batch_and_steps(
    pair: dict[str, str], all_steps: dict[str, Any]
) -> None:
    plain = run(
        "every_batch_and_steps", {"target": pair["target"]}, None, steps=[0], batches=BATCHES
    )
    for batch in BATCHES:
        expected = plain["results"][f"{batch}x0"]["tokens"]
        for k in STEPS:
            assert all_steps["results"][f"{batch}x{k}"]["tokens"] == expected, (batch, k)
    assert all_steps["leaked"] == 0


def test_every_verify_replays_and_the_rounds_add_up(all_steps: dict[str, Any]) -> None:
    status = all_steps["status"]
    assert status["state"] == "active"
    for name in ("draft", "verify", "draft_extend"):
        assert status["phases"][name]["eager"] == 0, status["phases"]
    assert status["phases"]["verify"]["replayed"] == status["rounds"]
    assert status["phases"]["draft_extend"]["replayed"] == status["rounds"]
    assert {b.split("x")[1] for b in status["buckets"]} == {str(k) for k in STEPS}


@pytest.mark.parametrize("k", [1, 3])
def test_acceptance_of_a_narrow_state_equals_stock(
    pair: dict[str, str], all_steps: dict[str, Any], k: int
) -> None:
    stock = run("stock_batches", {**pair, "steps": k}, batches=BATCHES)
    for batch in BATCHES:
        assert stock[str(batch)] == all_steps["results"][f"{batch}x{k}"]["histogram"], batch


def test_acceptance_is_partial(all_steps: dict[str, Any]) -> None:
    """A pair that accepts everything or nothing would hide a broken draft."""
    for k in (1, 2, 3, 4):
        histogram = all_steps["results"][f"8x{k}"]["histogram"]
        assert 0 < sum(n * i for i, n in enumerate(histogram)) < k * sum(histogram), (k, histogram)


def test_steps_that_change_every_round(
    pair: dict[str, str], without_speculation: dict[str, Any]
) -> None:
    """Prefills between rounds, batches that shrink and grow through bucket edges."""
    script = [4, 0, 1, 3, 2, 0, 4, 1, 2, 3]
    got = run("serve", {**pair, "steps": 4}, {"script": script}, requests=10)
    assert got["tokens"] == without_speculation["tokens"]
    status = got["status"]
    assert status["phases"]["verify"] == {
        "replayed": status["rounds"],
        "eager": 0,
        "reasons": {},
    }
    assert got["captured_while_serving"] == 0
    assert got["leaked"] == 0
    assert len({b.split("x")[0] for b in status["buckets"]}) >= 4
    assert got["phase_replays"]["target_verify"] == status["rounds"]


def test_forced_retraction_while_steps_change(
    pair: dict[str, str],
) -> None:
    load = {"requests": 10, "stagger": 0, "longest": 12}
    eager_admission = {"schedule_conservativeness": 0.0}
    config = {**pair, "steps": 4, "max_total_tokens": 250, "server_args": eager_admission}
    got = run("serve", config, {"script": [4, 0, 2]}, **load)
    assert got["retractions"] > 0
    assert got["tokens"] == run("serve", {"target": pair["target"]}, **load)["tokens"]
    assert got["status"]["phases"]["verify"]["eager"] == 0
    assert got["leaked"] == 0


def test_steps_wider_than_three_serve(
    pair: dict[str, str], without_speculation: dict[str, Any]
) -> None:
    """Case 11: the step list on which stock adaptive dies when three are configured."""
    got = run("serve", {**pair, "steps": 5}, {"script": [0, 1, 2, 3, 4, 5]}, requests=10)
    assert got["tokens"] == without_speculation["tokens"]
    assert got["status"]["phases"]["verify"]["eager"] == 0


def test_draft_extend_graphs_have_the_width_of_their_state(pair: dict[str, str]) -> None:
    got = run("draft_extend_widths", {**pair, "steps": 3}, {"script": [3, 1, 0, 2]})
    assert got["widths"] == {str(k): k + 1 for k in STEPS if k <= 3}
    assert got["config"] == (got["worker"] if RELEASE.switch_writes_bags else [3, 4])
    assert got["worker"] != [3, 4]
    assert got["kept"]
    assert got["current"]


def test_a_thousand_switches_grow_nothing(pair: dict[str, str]) -> None:
    got = run("switches", {**pair, "steps": 2}, {"script": [0, 2, 1]}, count=1000)
    assert got["rounds"] == 1001
    assert got["before"] == got["after"]


def test_sglang_replacing_the_runner_leaves_a_serving_server(pair: dict[str, str]) -> None:
    got = run("replaced_runner", {**pair, "steps": 3}, {"script": [3, 1]})
    assert got["steps"] == [3, 3]
    assert sum("replaced its graph runner" in line for line in got["log"]) == 1
    assert all(len(tokens) == 16 for tokens in got["tokens"])
