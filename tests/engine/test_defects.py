"""Faults of SGLang that this package removes, each on stock and with the plugin.

The releases that have a fault are named by version: the suite runs on several. Faults that a CPU
does not show are in ``tests/contract/test_defects.py``.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.engine.worker import ScenarioFailed
from tests.engine.worker import run_plugin as run

pytestmark = pytest.mark.engine

SGLANG = version("sglang")
LOAD: dict[str, Any] = {"steps": [0, 1], "batches": [1, 2]}


@pytest.fixture(scope="module")
def stock(pair: dict[str, str]) -> dict[str, Any]:
    return run("states_of_stock", {**pair, "steps": 3}, **LOAD)


@pytest.fixture(scope="module")
def ours(pair: dict[str, str]) -> dict[str, Any]:
    return run("states_of_ours", {**pair, "steps": 3}, {"steps": [3]}, **LOAD)


def test_adding_a_wider_step_count(pair: dict[str, str], tmp_path: Path) -> None:
    """0.5.16 to 0.5.18 (upstream #35275): buffers have the configured width; case 11.

    The plugin adds narrower step counts to the widest and refuses wider ones by name.
    """
    candidates = tmp_path / "candidates.json"
    candidates.write_text(json.dumps({"1": {"candidate_steps": [1, 3]}}))
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": str(candidates)}
    config = {**pair, "steps": 1, "server_args": adaptive}
    if SGLANG in ("0.5.16", "0.5.17", "0.5.18"):
        with pytest.raises(ScenarioFailed, match="logits buffer"):
            run("stock_batches", config, batches=[1])
    else:
        assert run("stock_batches", config, batches=[1])["1"]
    refused = run("start_only", {**pair, "steps": 1}, {"steps": [3], "strict": True})
    assert "--speculative-num-steps 3" in refused["exit"]


def test_draft_extend_of_a_narrower_step_count(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    """0.5.17: captured at the configured width, and refused in every round after."""
    wrong = SGLANG == "0.5.17"
    assert {k: s["draft_extend_width"] for k, s in stock.items()} == (
        {"0": 4, "1": 4} if wrong else {"0": 1, "1": 2}
    )
    assert {k: s["draft_extend_width"] for k, s in ours.items()} == {"0": 1, "1": 2}


def test_batches_of_a_step_count_are_pruned(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    """0.5.14 to 0.5.23: stock is told 1 and 2 and captures its whole ladder for each step count."""
    assert {k: s["batches"] for k, s in stock.items()} == {"0": [1, 2, 4, 8], "1": [1, 2, 4, 8]}
    assert {k: s["batches"] for k, s in ours.items()} == {"0": [1, 2], "1": [1, 2]}


@pytest.mark.skipif(SGLANG != "0.5.16", reason="later releases raise in place of capturing")
def test_whole_ladder_captured_in_mid_serving(pair: dict[str, str]) -> None:
    """To 0.5.16; the plugin answers HIDDEN_MODE, so that no runner ever sees the batch."""
    config = {**pair, "steps": 3}
    assert run("hidden_mode", config)["captured"] == 1
    got = run("hidden_mode", config, {})
    assert not got["answer"]
    assert got["status"]["phases"]["verify"]["reasons"] == {"HIDDEN_MODE": 1}
