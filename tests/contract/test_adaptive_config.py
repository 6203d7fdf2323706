"""The schedule that ``report`` writes is read by stock's own class, in every release that has one.

The class stands in one file whose imports matter to nothing that is called here.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.cli.report import report
from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.costs import CostKey, CostRow, CostTable
from tests.contract.source import Source

pytestmark = pytest.mark.contract

MODULE = "sglang.srt.speculative.adaptive_spec_params"
STANDS_IN = {
    "sglang.srt.utils": ["log_info_on_rank0"],
    "sglang.srt.arg_groups.overrides": ["resolved_view", "resolving_view"],
    "sglang.srt.runtime_context": ["attn_dp_enabled_of"],
    "sglang.srt.speculative.spec_info": ["SpeculativeAlgorithm"],
}
COSTS = {
    (1, 0): 5.0, (1, 1): 6.0, (1, 3): 6.5, (8, 0): 6.0, (8, 1): 7.5, (8, 3): 30.0,
    (32, 0): 8.0, (32, 1): 20.0, (32, 3): 40.0,
}  # fmt: skip
TABLE = CostTable(
    CostKey("gpu", 1, "m", "d", "1.2.3", "fa3", "bfloat16"),
    tuple(CostRow(batch, steps, ms, ms, ms, 32) for (batch, steps), ms in COSTS.items()),
)


@pytest.fixture
def stock(source: Source, release: Release, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    text = source.text(MODULE)
    if not release.zero_steps:
        pytest.skip("no schedule holds 0 steps in this release")
    for name, members in STANDS_IN.items():
        parts = name.split(".")
        for at in range(1, len(parts)):
            package = ".".join(parts[:at])
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member, lambda *_: None)
        monkeypatch.setitem(sys.modules, name, module)
    found: dict[str, Any] = {"__name__": "adaptive_spec_params"}
    exec(compile(text, MODULE, "exec"), found)
    return found


@pytest.mark.parametrize(
    ("assumed", "expected"),
    [
        (2.0, {1: [3], 2: [1], 8: [1], 9: [0], 32: [0], 99: [0]}),
        (None, {1: [0, 1, 3], 2: [0, 1], 8: [0, 1], 9: [0], 32: [0], 99: [0]}),
    ],
)
def test_stock_reads_it(
    stock: dict[str, Any], tmp_path: Path, assumed: float | None, expected: dict[int, list[int]]
) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(report(TABLE, {}, assumed).adaptive_config))
    steps = stock["resolve_candidate_steps_from_config"](str(path))
    assert steps == [0, 1, 3]
    params = stock["AdaptiveSpeculativeParams"](max(steps), str(path))
    for batch, candidates in expected.items():
        assert params._route(batch).candidate_steps == candidates
        assert params.get_steps_for_batch(batch) in candidates
