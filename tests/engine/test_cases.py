"""Cases from the field, the refusals, and what a server says of them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worker import ScenarioFailed, run_scenario
from tests.engine.worker import run_plugin as run

pytestmark = pytest.mark.engine


def verify(got: dict[str, Any]) -> dict[str, Any]:
    phase: dict[str, Any] = got["status"]["phases"]["verify"]
    return phase


def test_ceiling_capped_by_the_user(pair: dict[str, str]) -> None:
    """Case 1: 48 requests may run, 32 are captured, 40 come."""
    config = {**pair, "server_args": {"max_running_requests": 48}, "max_total_tokens": 8192}
    load = {"requests": 40, "stagger": 0, "longest": 8, "max_new_tokens": 8}
    got = run("serve", config, {"max_batch": 32, "steps": [3]}, **load)
    assert verify(got)["reasons"] == {"BATCH_ABOVE_LADDER": verify(got)["eager"]}
    assert verify(got)["eager"] > 0
    assert verify(got)["replayed"] > 0
    assert verify(got)["replayed"] + verify(got)["eager"] == got["status"]["rounds"]
    assert any("40 > 32" in line for line in got["log"])
    assert any("33-48" in line for line in got["log"]), got["log"]
    assert max(int(b.split("x")[0]) for b in got["status"]["buckets"]) <= 32


def test_ceiling_covered_by_the_plan(pair: dict[str, str]) -> None:
    """Case 1: stock's ladder ends at 32; the plan does not."""
    config = {
        **pair,
        "server_args": {"max_running_requests": 48},
        "max_total_tokens": 8192,
        "batch_sizes": [1, 2, 4, 8, 16, 32],
    }
    load = {"requests": 40, "stagger": 0, "longest": 8, "max_new_tokens": 8}
    stock = run("serve", config, {"observe": True}, **load)
    assert verify(stock)["reasons"]["BATCH_ABOVE_LADDER"] == verify(stock)["eager"] > 0
    assert any("uncovered 33-48" in line for line in stock["log"])
    covered = run("serve", config, {"steps": [3]}, **load)
    for phase in ("draft", "verify", "draft_extend"):
        counts = covered["status"]["phases"][phase]
        assert (counts["eager"], counts["replayed"] > 0) == (0, True), phase
    assert "40x3" in covered["status"]["buckets"]
    assert covered["tokens"] == stock["tokens"]
    assert covered["histogram"] == stock["histogram"]


def test_tiny_ladder_is_one_warning(pair: dict[str, str]) -> None:
    """Case 2: over 90% eager in stock, said once with the setting to change."""
    config = {
        **pair,
        "server_args": {"max_running_requests": 20},
        "max_total_tokens": 8192,
        "batch_sizes": [1, 2],
    }
    load = {"requests": 120, "stagger": 0, "longest": 8, "max_new_tokens": 24}
    got = run("serve", config, {"observe": True}, **load)
    assert verify(got)["eager"] > 0.9 * got["status"]["rounds"]
    shares = [line for line in got["log"] if "% of" in line and "verify forwards" in line]
    assert len(shares) == 1
    assert "--cuda-graph-max-bs" in shares[0]
    assert len([line for line in got["log"] if "WARNING" in line]) <= 6
    rounds = got["status"]["round_ms"]["20x3"]
    assert rounds["rounds"] > 5
    assert 0 < rounds["least_ms"] <= rounds["mean_ms"]


def test_padding_disabled(pair: dict[str, str]) -> None:
    """Case 4: batches 1, 2 and 4 captured; 2 replays, 3 is refused by name."""
    config = {
        **pair,
        "batch_sizes": [1, 2, 4],
        "server_args": {"disable_cuda_graph_padding": True, "max_running_requests": 4},
    }
    got = run("every_batch_and_steps", config, {"observe": True}, steps=[3], batches=[2, 3])
    phase = got["status"]["phases"]["verify"]
    assert phase["reasons"] == {"EXACT_BATCH_MISSING": phase["eager"]}
    assert phase["eager"] > 0
    assert got["status"]["buckets"]["2x3"] > 0
    assert "3x3" not in got["status"]["buckets"]
    planned = run("every_batch_and_steps", config, {}, steps=[3], batches=[2, 3])
    assert planned["status"]["phases"]["verify"]["eager"] == 0
    assert planned["status"]["buckets"]["3x3"] > 0


def test_a_width_nobody_captured_is_refused(pair: dict[str, str]) -> None:
    """Case 5: never a crash, never a wrong replay, the same answer twice, counted once."""
    got = run("odd_width", {**pair, "steps": 3}, {"steps": [3]})
    assert got["answers"] == [False, False]
    assert got["status"]["phases"]["verify"]["reasons"] == {"STEPS_NOT_CAPTURED": 1}


@pytest.mark.parametrize("settings", [{}, {"observe": True}])
def test_draft_extend_in_the_dark(pair: dict[str, str], settings: dict[str, Any]) -> None:
    """Case 8: verify and draft replay, draft extend does not, and the report says so."""
    got = run("serve", {**pair, "steps": 3}, settings, requests=3, draft_extend_graph=False)
    phases = got["status"]["phases"]
    assert phases["verify"]["eager"] == 0
    assert phases["draft"]["eager"] == 0
    assert phases["draft_extend"]["reasons"] == {"BACKEND_NOT_GRAPHED": got["status"]["rounds"]}


def test_observing_changes_nothing(pair: dict[str, str]) -> None:
    load = {"requests": 6}
    stock = run("serve", {**pair, "steps": 3}, None, **load)
    got = run("serve", {**pair, "steps": 3}, {"observe": True}, **load)
    for name in ("tokens", "histogram", "phase_replays", "graphs"):
        assert got[name] == stock[name]
    assert got["status"]["state"] == "observe"
    assert verify(got)["replayed"] == got["phase_replays"]["target_verify"]


def test_a_memory_budget_drops_buckets_by_name(pair: dict[str, str]) -> None:
    config = {**pair, "steps": 3, "server_args": {"max_running_requests": 8}}
    got = run("serve", config, {"memory_gb": 1e-6}, requests=4)
    status = got["status"]
    assert status["state"] == "active"
    assert set(status["dropped"]) == {"2", "1", "0"}
    assert sum("MEMORY_BUDGET" in line for line in got["log"]) == 1
    assert any("--verify-graph-memory-gb" in line for line in got["log"])
    assert verify(got)["eager"] == 0


def test_internal_state_tells_what_runs(pair: dict[str, str]) -> None:
    got = run("serve", {**pair, "steps": 2}, {"script": [2, 0]}, requests=4)
    assert got["internal_state"] == {
        k: v for k, v in got["status"].items() if k not in ("settings", "patched")
    }
    assert got["internal_state"]["accept_length"] == pytest.approx(got["accept_length"], rel=0.2)


REFUSED = [
    (
        "tree drafts",
        {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
        {},
        "active",
    ),
    (
        "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
        {},
        {"SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "1"},
        "active",
    ),
    ("plan stream", {}, {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}, "off"),
]


@pytest.mark.parametrize(("mode", "server_args", "env", "state"), REFUSED)
def test_modes_are_refused_by_name(
    pair: dict[str, str],
    mode: str,
    server_args: dict[str, Any],
    env: dict[str, str],
    state: str,
) -> None:
    config = {**pair, "steps": 3, "server_args": server_args}
    got = run("start_only", config, {}, env=env)
    assert got["status"]["state"] == state
    assert mode in got["status"]["reasons"][0]
    assert len([line for line in got["log"] if mode in line]) == 1, got["log"]
    if state == "active":
        assert list(got["status"]["plan"]) == ["3"]


def test_adaptive_is_refused_and_served_by_stock(pair: dict[str, str], tmp_path: Path) -> None:
    candidates = tmp_path / "adaptive.json"
    candidates.write_text('{"1": {"candidate_steps": [1, 3]}}')
    adaptive = {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(candidates),
    }
    got = run("start_only", {**pair, "steps": 3, "server_args": adaptive}, {})
    assert got["status"]["state"] == "off"
    assert "--speculative-adaptive" in got["status"]["reasons"][0]


def test_stock_adaptive_dies_on_the_step_list_that_serves_here(
    pair: dict[str, str], tmp_path: Path
) -> None:
    """Case 11, upstream #35275 (fixed in 0.5.19): candidates wider than configured."""
    if version("sglang") != "0.5.17":
        pytest.skip("fixed upstream in this release")
    candidates = tmp_path / "adaptive.json"
    candidates.write_text('{"1": {"candidate_steps": [0, 1, 2, 3, 4, 5]}}')
    adaptive = {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(candidates),
    }
    config = {**pair, "steps": 3, "server_args": adaptive}
    with pytest.raises(ScenarioFailed, match="shared logits buffer holds"):
        run("serve", config)


def test_no_speculation_is_off_with_one_line(pair: dict[str, str]) -> None:
    got = run("start_only", {"target": pair["target"]}, {})
    assert got["status"]["state"] == "off"
    assert [line for line in got["log"] if "ERROR" in line] == got["log"]
    assert "no speculation" in got["log"][0]
    assert "--speculative-algorithm" in got["log"][0]


def test_strict_does_not_start(pair: dict[str, str]) -> None:
    got = run("start_only", {"target": pair["target"]}, {"strict": True})
    assert "no speculation" in got["exit"]


def test_steps_above_the_configured_maximum(pair: dict[str, str]) -> None:
    got = run("start_only", {**pair, "steps": 3}, {"steps": [0, 5]})
    assert got["status"]["state"] == "off"
    assert "--speculative-num-steps 5" in got["status"]["reasons"][0]


def test_a_tree_serves_at_its_one_width(pair: dict[str, str]) -> None:
    """A tree's width is its number of nodes, not steps + 1."""
    tree = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    config = {**pair, "steps": 3, "server_args": tree}
    got = run("serve", config, {}, requests=4)
    assert got["tokens"] == run("serve", {"target": pair["target"]}, requests=4)["tokens"]
    assert verify(got) == {"replayed": got["status"]["rounds"], "eager": 0, "reasons": {}}


def test_disabled_graphs_are_explained(pair: dict[str, str]) -> None:
    settings = {"observe": True}
    config = {**pair, "steps": 3}
    serve = "tests.engine.plugin:serve"
    got = run_scenario(serve, graphs=False, config=config, settings=settings, requests=3)
    rounds = got["status"]["rounds"]
    for phase in ("draft", "verify", "draft_extend"):
        assert got["status"]["phases"][phase]["reasons"] == {"NO_RUNNER": rounds}


def test_steps_whose_buckets_were_dropped_fall_back(pair: dict[str, str]) -> None:
    settings = {"memory_gb": 1e-6, "script": [3, 1, 0]}
    got = run("serve", {**pair, "steps": 3}, settings, requests=3)
    assert {b.split("x")[1] for b in got["status"]["buckets"]} == {"3"}
    assert verify(got)["eager"] == 0


def test_batches_above_the_stock_ladder_need_room(pair: dict[str, str]) -> None:
    """A small budget takes nothing from stock's own reach, and says what it left out."""
    config = {**pair, "batch_sizes": [1, 2, 4], "server_args": {"max_running_requests": 8}}
    got = run("serve", config, {"memory_gb": 1e-6, "steps": [3]}, requests=8, stagger=0)
    assert got["status"]["plan"]["3"] == [1, 2, 4]
    assert got["status"]["dropped"]["3"] == [6, 8]
    assert set(verify(got)["reasons"]) == {"MEMORY_BUDGET"}
    assert verify(got)["replayed"] > 0
