"""The harness against stock SGLang: what it reports here is the base of every engine test.

Tokens alone prove little, greedy verify hides a broken draft: acceptance is compared as well.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import pytest

from tests.engine.scenarios import random_prompts
from tests.engine.worker import ScenarioFailed, run_scenario

pytestmark = pytest.mark.engine

PROMPTS = random_prompts(4)
LOAD: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 40, "stagger": 2}
SERVE = "tests.engine.scenarios:serve"
BADLY = "tests.engine.scenarios_that_end_badly"
VERIFY, DRAFT, DRAFT_EXTEND = "target_verify", "draft", "draft_extend"
DRAFT_EXTEND_WIDTH_IS_THE_CONFIGURED_ONE = version("sglang") == "0.5.17"  # upstream, traps T0


def speculating(pair: dict[str, str], steps: int, **changes: Any) -> dict[str, Any]:
    return {**pair, "steps": steps, **changes}


@pytest.fixture(scope="module")
def plain(pair: dict[str, str]) -> dict[str, Any]:
    """The load without speculation, eager."""
    served = run_scenario(SERVE, config={"target": pair["target"]}, **LOAD)
    assert [len(tokens) for tokens in served["tokens"]] == [40] * len(PROMPTS)
    assert served["leaked"] == 0
    return served


@pytest.fixture(scope="module")
def eager(pair: dict[str, str]) -> dict[str, Any]:
    """The load with 3 steps in an engine that has no graph."""
    return run_scenario(SERVE, config=speculating(pair, 3), **LOAD)


def test_speculation_changes_no_token(plain: dict[str, Any], eager: dict[str, Any]) -> None:
    assert eager["tokens"] == plain["tokens"]
    assert 2.5 < eager["accept_length"] < 3.1, "what a sound draft reaches on this pair"
    assert eager["captures_at_start"] == eager["captures_in_service"] == 0
    assert eager["leaked"] == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_graphs_change_neither_tokens_nor_acceptance(
    pair: dict[str, str], plain: dict[str, Any], eager: dict[str, Any], steps: int
) -> None:
    served = run_scenario(
        SERVE, config=speculating(pair, steps), graphs=True, then_eager=True, **LOAD
    )
    assert served["tokens"] == served["eager"]["tokens"] == plain["tokens"]
    assert served["histogram"] == served["eager"]["histogram"]
    if steps == 3:
        assert served["histogram"] == eager["histogram"]
    assert 1.3 < served["accept_length"] < steps + 0.9
    assert len(served["histogram"]) == steps + 1
    assert all(served["histogram"]), "every accept length occurs, so a wrong one would show"

    phases = {VERIFY, DRAFT_EXTEND} | ({DRAFT} if steps > 1 else set())
    rounds = served["replays"][VERIFY]
    assert served["replays"] == dict.fromkeys(phases, rounds)
    assert served["eager"]["replays"] == {}
    assert served["eager"]["captures_in_service"] == 0
    assert served["leaked"] == served["eager"]["leaked"] == 0


def test_plain_decode_is_graphed(pair: dict[str, str], plain: dict[str, Any]) -> None:
    graphed = run_scenario(SERVE, config={"target": pair["target"]}, graphs=True, **LOAD)
    assert graphed["tokens"] == plain["tokens"]
    assert graphed["replays"]["decode"] > 40


def test_an_unlisted_backend_drafts_in_a_graph_and_extends_without(
    pair: dict[str, str], plain: dict[str, Any]
) -> None:
    served = run_scenario(
        SERVE, config=speculating(pair, 3), graphs=True, draft_extend_graph=False, **LOAD
    )
    assert served["tokens"] == plain["tokens"]
    assert served["replays"][VERIFY] == served["replays"][DRAFT] > 0
    assert DRAFT_EXTEND not in served["replays"]


def test_a_batch_above_the_ladder_runs_eager(pair: dict[str, str], plain: dict[str, Any]) -> None:
    served = run_scenario(
        SERVE, config=speculating(pair, 3, batch_sizes=[1, 2]), graphs=True, **LOAD
    )
    assert served["tokens"] == plain["tokens"]
    assert 0 < served["replays"][VERIFY] < max(served["verifies"])
    assert {size for *_, size, _ in served["graphs"]} == {1, 2}


def test_forced_retraction_keeps_tokens(pair: dict[str, str]) -> None:
    load = {"prompts": random_prompts(6, longest=8), "max_new_tokens": 48, "stagger": 2}
    room = run_scenario(SERVE, config={"target": pair["target"]}, **load)
    eager_admission = {"schedule_conservativeness": 0.05}
    tight = speculating(pair, 3, max_total_tokens=120, server_args=eager_admission)
    served = run_scenario(SERVE, config=tight, graphs=True, **load)
    assert room["retractions"] == 0
    assert served["retractions"] > 0
    assert served["tokens"] == room["tokens"]
    assert served["leaked"] == 0


def test_stock_states_of_other_widths_can_be_built_and_applied(
    pair: dict[str, str], plain: dict[str, Any]
) -> None:
    script = [5, 3, 0, 1, 2, 4, 0, 5]
    served = run_scenario(
        "tests.engine.scenarios:switch_steps",
        config=speculating(pair, 5, batch_sizes=[2, 4]),
        script=script,
        graphs=True,
        **LOAD,
    )
    assert served["tokens"] == plain["tokens"]
    assert served["captures_in_service"] == 0
    assert served["leaked"] == 0
    replayed = {(phase, steps) for phase, steps, *_ in served["graphs"]}
    assert {steps for phase, steps in replayed if phase == VERIFY} == set(script)
    assert {steps for phase, steps in replayed if phase == DRAFT} == {2, 3, 4, 5}
    extended = {steps for phase, steps in replayed if phase == DRAFT_EXTEND}
    assert extended == ({5} if DRAFT_EXTEND_WIDTH_IS_THE_CONFIGURED_ONE else set(script))


@pytest.mark.parametrize("spoil", ["draft_kv", "hidden_states"])
def test_a_spoiled_draft_costs_acceptance_and_no_token(
    pair: dict[str, str], eager: dict[str, Any], spoil: str
) -> None:
    spoiled = run_scenario(
        "tests.engine.scenarios:serve_spoiled", config=speculating(pair, 3), spoil=spoil, **LOAD
    )
    assert spoiled["tokens"] == eager["tokens"]
    assert spoiled["accept_length"] < 0.8 * eager["accept_length"]


def test_a_failing_scenario_shows_its_output() -> None:
    with pytest.raises(ScenarioFailed, match=r"(?s)exited with 1.*no such model"):
        run_scenario(f"{BADLY}:fail", message="no such model")


def test_a_hanging_scenario_is_killed_with_its_children() -> None:
    with pytest.raises(ScenarioFailed, match=r"(?s)timed out.*child \d+") as failure:
        run_scenario(f"{BADLY}:hang", timeout=4)
    child = int(str(failure.value).split("child ")[1].split()[0])
    deadline = time.monotonic() + 5
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
