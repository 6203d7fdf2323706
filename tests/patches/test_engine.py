"""Real SGLang with the patches and without the plugin; then both, who have to agree."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.cli.doctor import diagnose
from sglang_verify_graphs.compat.source import installed
from tests.engine.worker import run_scenario

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SERIES = {
    re.findall(r"^Patch-Name: (.*)$", path.read_text(), re.M)[0]
    for path in ROOT.glob(f"patches/{version('sglang')}/*.patch")
}
WITHOUT_PLUGIN = {"SGLANG_PLUGINS": "cpu_engine"}
LADDER = [1, 2, 4, 8]
CANDIDATES = {"1": [1, 5], "4": [0, 1, 3]}
"""By batch; 3 steps are configured, so 5 is wider and the rest narrower."""
BATCHES = [2, 6]
TOKENS = 40


def run(scenario: str, *, plugin: bool = False, **kwargs: Any) -> Any:
    env = {} if plugin else WITHOUT_PLUGIN
    return run_scenario(f"tests.patches.scenarios:{scenario}", graphs=True, env=env, **kwargs)


@pytest.fixture(scope="module")
def adaptive(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    candidates = tmp_path_factory.mktemp("adaptive") / "candidates.json"
    quick = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 0.9, "down_hysteresis": 1.5}
    entries = {batch: {"candidate_steps": steps} for batch, steps in CANDIDATES.items()}
    candidates.write_text(json.dumps(quick | entries))
    flags = {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(candidates),
        "max_running_requests": 8,
    }
    config = {**pair, "steps": 3, "batch_sizes": LADDER, "server_args": flags}
    return run("adaptive", config=config, batches=BATCHES, max_new_tokens=TOKENS, rounds=200)


def captured(got: dict[str, Any], phase: str) -> dict[int, set[tuple[int, int]]]:
    """By step count, the (width, batch) of every graph of a phase."""
    found: dict[int, set[tuple[int, int]]] = {}
    for name, steps, width, size, _ in got["captured"]:
        if name == phase:
            found.setdefault(steps, set()).add((width, size))
    return found


def served(got: dict[str, Any]) -> set[int]:
    return {steps for name, steps, *_ in got["graphs"] if name == "target_verify"}


def test_candidates_wider_than_configured_serve(
    adaptive: dict[str, Any], pair: dict[str, str]
) -> None:
    target = {"target": pair["target"], "batch_sizes": LADDER}
    plain = run("plain", config=target, batches=BATCHES, max_new_tokens=TOKENS)
    assert adaptive["tokens"] == plain
    assert adaptive["leaked"] == 0
    assert served(adaptive) == {0, 1, 3, 5}


def test_draft_extend_is_captured_and_replayed_at_the_width_of_its_state(
    adaptive: dict[str, Any],
) -> None:
    graphs = captured(adaptive, "draft_extend")
    assert set(graphs) == {0, 1, 3, 5}
    for steps, shapes in graphs.items():
        assert {width for width, _ in shapes} == {steps + 1}
    assert sum(adaptive["draft_extends"].values()) == adaptive["verifies"] > 0


def test_a_state_captures_the_batches_that_can_reach_it(adaptive: dict[str, Any]) -> None:
    reached = {0: {4, 8}, 1: {1, 2, 4, 8}, 3: {1, 2, 4, 8}, 5: {1, 2}}  # 3 is the start-up state
    for phase in ("target_verify", "draft_extend"):
        graphs = captured(adaptive, phase)
        assert {k: {size for _, size in shapes} for k, shapes in graphs.items()} == reached


def test_pruned_states_leave_nothing_eager(adaptive: dict[str, Any]) -> None:
    assert adaptive["graph_rejects"] == {}
    assert adaptive["captured_while_serving"] == 0


def test_switches_keep_nothing(adaptive: dict[str, Any]) -> None:
    assert adaptive["overrides_grown"] == 0
    assert adaptive["chains_of_a_state"] == 1


CEILING = {
    "batch_sizes": [1, 2, 4, 8, 16],
    "server_args": {"max_running_requests": 24},
    "max_total_tokens": 8192,
}
LOAD = {"requests": 20, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def ceiling(pair: dict[str, str]) -> Any:
    return run("serve", config={**pair, **CEILING}, **LOAD)


def test_reasons_are_counted_and_said_once(ceiling: dict[str, Any]) -> None:
    (reason,) = ceiling["graph_rejects"]
    assert reason == "batch_above_ladder"
    assert ceiling["graph_rejects"][reason] > 1
    said = [line for line in ceiling["warnings"] if reason in line]
    assert len(said) == 1
    assert "largest captured=16" in said[0]


def test_start_up_names_the_batches_without_a_graph(ceiling: dict[str, Any]) -> None:
    assert sum("17-24" in line for line in ceiling["warnings"]) == 1, ceiling["warnings"]


def test_the_nccl_environment_is_reported(ceiling: dict[str, Any]) -> None:
    (report,) = ceiling["nccl"]
    assert report["rank"] == 0
    assert all(name.startswith("NCCL_") for name in report["env"])


SAME_REASON = {
    "BATCH_ABOVE_LADDER": "batch_above_ladder",
    "EXACT_BATCH_MISSING": "batch_not_captured",
}


@pytest.fixture(
    scope="module",
    params=[
        CEILING,
        {
            "batch_sizes": [1, 2, 4],
            "server_args": {"disable_cuda_graph_padding": True, "max_running_requests": 4},
        },
    ],
    ids=["ceiling", "no padding"],
)
def observed(request: pytest.FixtureRequest, pair: dict[str, str]) -> Any:
    load = LOAD if request.param is CEILING else {"requests": 3, "max_new_tokens": 12}
    config = {**pair, **request.param}
    return run("plugin_and_patch", plugin=True, config=config, settings={"observe": True}, **load)


def test_plugin_and_patch_refuse_the_same_batches(observed: dict[str, Any]) -> None:
    verify = observed["plugin"]["phases"]["verify"]
    assert verify["eager"] == len(observed["patch_said"]) > 0
    named = {SAME_REASON[reason]: count for reason, count in verify["reasons"].items()}
    assert named == observed["patch"]
    assert observed["leaked"] == 0


@pytest.fixture(scope="module")
def both(pair: dict[str, str]) -> Any:
    """The plugin, at work, on the patched SGLang."""
    settings = {"script": [3, 1, 0]}
    config = {**pair, **CEILING}
    return run("plugin_and_patch", plugin=True, config=config, settings=settings, **LOAD)


def test_the_plugin_serves_on_patched_sglang(both: dict[str, Any], ceiling: dict[str, Any]) -> None:
    assert both["plugin"]["state"] == "active"
    assert both["plugin"]["phases"]["verify"]["eager"] == 0
    assert both["patch"] == {}
    assert both["tokens"] == ceiling["tokens"]
    assert both["leaked"] == 0


def test_plugin_and_doctor_step_aside(both: dict[str, Any]) -> None:
    rows = both["plugin"]["preflight"]
    assert {name for name, state in rows.items() if state.startswith("not needed")} == SERIES
    found = diagnose(installed(), version("sglang")).rows
    assert {row.name for row in found if row.kind == "patched"} == SERIES
    mended = [row for row in found if "SGLang carries the patch" in row.reason]
    assert {row.state.value for row in mended} == {"not needed"}
