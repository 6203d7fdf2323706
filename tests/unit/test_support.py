"""The refusal matrix: every row can be reached, and the page says what the rows say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.support import LIMITS, Limit, ServerFacts, limits_of

ROOT = Path(__file__).resolve().parents[2]

SERVED = ServerFacts(
    algorithm="EAGLE3", topk=1, draft_steps=3, draft_tokens=4, max_running_requests=48
)

REACHED_BY: dict[str, list[dict[str, Any]]] = {
    "no speculation": [{"algorithm": None}],
    "other speculative algorithm": [{"algorithm": "NGRAM"}, {"algorithm": "STANDALONE"}],
    "multi-layer EAGLE / MTP": [{"multi_layer": True}, {"worker": "MultiLayerEagleWorkerV2"}],
    "decode graphs disabled": [{"decode_graphs": False}],
    "--speculative-adaptive": [{"adaptive": True}],
    "attention DP": [{"attention_dp": True}],
    "SGLang of before its adaptive v2 worker": [{"one_width": True}],
    "PD disaggregation": [{"disaggregation": "prefill"}, {"disaggregation": "decode"}],
    "pipeline parallelism": [{"pp_size": 2}],
    "two-batch overlap": [{"two_batch_overlap": True}],
    "PD multiplexing": [{"pdmux": True}],
    "hybrid (mamba, linear attention) model": [{"mamba": True}],
    "LoRA": [{"lora": True}],
    "HiSparse": [{"hisparse": True}],
    "plan stream": [{"plan_stream": True}],
    "prefill graphs with captured attention metadata": [{"captured_prefill_metadata": True}],
    "tree drafts (topk > 1)": [{"topk": 2, "draft_tokens": 6}, {"draft_tokens": 8}],
    "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": [{"skip_zero_extend": True}],
    "deterministic inference": [{"deterministic": True}],
    "--enable-return-hidden-states": [{"return_hidden_states": True}],
}
NO_LIMIT = {
    "max_running_requests", "tp_size", "padding", "alignment", "draft_steps", "zero_steps",
}  # fmt: skip
"""Facts that size the plan and refuse nothing."""

CASES = [(mode, change) for mode, changes in REACHED_BY.items() for change in changes]


def test_the_plain_server_is_served() -> None:
    assert limits_of(SERVED) == ()
    assert limits_of(replace(SERVED, algorithm="EAGLE", tp_size=8, padding=False)) == ()


@pytest.mark.parametrize(("mode", "change"), CASES, ids=str)
def test_row_is_reached_alone(mode: str, change: dict[str, Any]) -> None:
    found = [limit.mode for limit in limits_of(replace(SERVED, **change))]
    assert found == [mode]


def test_every_row_is_reached() -> None:
    assert sorted(REACHED_BY) == sorted(limit.mode for limit in LIMITS)


def test_every_fact_decides_something() -> None:
    used = {name for _, change in CASES for name in change}
    assert used | NO_LIMIT == {field.name for field in fields(ServerFacts)}
    assert used & NO_LIMIT == set()


def test_what_switches_off_comes_first() -> None:
    found = limits_of(replace(SERVED, topk=2, deterministic=True, lora=True))
    assert [limit.fixed_width for limit in found] == [False, True, True]
    assert found[0].mode == "LoRA"


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.mode)
def test_message(limit: Limit) -> None:
    """One line: what happens, the mode, why, what to do."""
    start = "only the configured draft steps are captured" if limit.fixed_width else "off"
    assert limit.message == f"{start}: {limit.mode}: {limit.why}; {limit.fix}"
    assert "\n" not in limit.message
    assert all((limit.mode, limit.why, limit.fix))


def test_page() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "support_matrix.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
