"""The simulator's account of stock's adaptive rule decides as stock's own class does.

That class stands in one file that needs a logger and nothing else, so this file alone is executed.
"""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.engines import STOCK_SCHEDULE, StockAdaptive
from sglang_verify_graphs.compat.releases import RELEASES
from tests.contract.conftest import source_of

pytestmark = pytest.mark.contract

RELEASE = next(release for release in RELEASES if release.version == "0.5.17")
FILE = "sglang/srt/speculative/adaptive_spec_params.py"


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    utils = types.ModuleType("sglang.srt.utils")
    utils.log_info_on_rank0 = lambda *_: None
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    path = source_of(RELEASE).root / FILE
    found: dict[str, Any] = {"__name__": "adaptive_spec_params"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), found)
    return found


@pytest.mark.parametrize("schedule", [STOCK_SCHEDULE, {1: (0, 1, 2, 3, 5, 7)}])
def test_the_same_steps_in_every_round(
    stock: dict[str, Any], schedule: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps({str(b): {"candidate_steps": k} for b, k in schedule.items()}))
    default = schedule is STOCK_SCHEDULE
    for seed in range(20):
        rng = random.Random(seed)
        theirs = stock["AdaptiveSpeculativeParams"](3, None if default else str(config))
        ours = StockAdaptive(3, schedule)
        for number in range(300):
            batch = rng.choice([1, 4, 9, 33, 48, 70])
            steps = theirs.get_steps_for_batch(batch)
            assert ours.draft_steps(batch) == steps
            chance = (number // 75 % 4) / 4 + 0.1
            drafts = [sum(rng.random() < chance for _ in range(steps)) for _ in range(batch)]
            theirs.on_verify_complete(drafts, batch)
            ours.verified(steps, drafts)
