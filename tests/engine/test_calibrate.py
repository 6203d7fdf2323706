"""`calibrate` on a real server, and a start from the costs that it wrote."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.compat.releases import resolve_release
from sglang_verify_graphs.costs import PLAIN_DECODE, CostTable, read_costs
from tests.engine.worker import ROOT, attention, engine_env
from tests.engine.worker import run_plugin as run

RELEASE = resolve_release(version("sglang"), allow_untested=False)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(attention() != "intel_amx", reason="its kernels are interpreted: hours"),
    pytest.mark.skipif(RELEASE.one_width, reason="a release of one width has nothing to choose"),
]
LARGEST = 2
STEPS = (PLAIN_DECODE, 0, 1, 2) if RELEASE.zero_steps else (1, 2)
_MAIN = "import sys; from sglang_verify_graphs.cli import main; sys.exit(main())"


def _calibrate(pair: dict[str, str], out: Path) -> subprocess.Popen[str]:
    flags = {
        "--device": "cpu",
        "--dtype": "float32",
        "--model-path": pair["target"],
        "--attention-backend": "intel_amx",
        "--mem-fraction-static": "0.2",
        "--max-total-tokens": "2048",
        "--max-running-requests": str(LARGEST),
        "--grammar-backend": "none",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": pair["draft"],
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3",
    }
    ours = ["calibrate", "--out", str(out), "--prompt-tokens", "8", "--"]
    words = [word for flag in flags.items() for word in flag]
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, *ours, *words, "--skip-tokenizer-init"],
        cwd=ROOT, env=engine_env(graphs=True), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tables(
    pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[CostTable, CostTable, Path]:
    """The table of a run that was ended on its way, the one after another run, and its file."""
    out = tmp_path_factory.mktemp("calibrate") / "costs.json"
    first = _calibrate(pair, out)
    while not out.exists() and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate()
    assert first.returncode == 130, said
    partial = read_costs(out)
    second = _calibrate(pair, out)
    _, said = second.communicate()
    assert second.returncode == 0, said
    return partial, read_costs(out), out


def test_every_bucket_is_measured_once(tables: tuple[CostTable, CostTable, Path]) -> None:
    partial, whole, _ = tables
    assert [(row.batch, row.draft_steps) for row in whole.rows] == [
        (batch, steps) for batch in range(1, LARGEST + 1) for steps in STEPS
    ]
    assert all(row.samples == 32 for row in whole.rows)
    assert 0 < len(partial.rows) < len(whole.rows)
    assert set(partial.rows) <= set(whole.rows), "measured again"


def _policy_at_start(pair: dict[str, str], costs: Path) -> tuple[dict[str, Any], list[str]]:
    """After one request alone, which changes nothing that is known of larger batches."""
    config = {**pair, "steps": 2, "server_args": {"max_running_requests": LARGEST}}
    got = run("serve", config, {"costs": str(costs)}, requests=1)
    return got["status"], got["log"]


def test_a_server_starts_with_the_costs(
    pair: dict[str, str], tables: tuple[CostTable, CostTable, Path]
) -> None:
    _, whole, out = tables
    status, _ = _policy_at_start(pair, out)
    assert status["reasons"] == []
    known = {(c["batch"], c["draft_steps"]): c["ms"] for c in status["policy"]["costs"]}
    measured = {(row.batch, row.draft_steps): row for row in whole.rows}
    assert known.keys() == measured.keys()
    for steps in STEPS:
        row = measured[LARGEST, steps]
        assert row.low_ms <= known[LARGEST, steps] <= row.high_ms


def test_costs_of_another_server_are_refused_by_name(
    pair: dict[str, str], tables: tuple[CostTable, CostTable, Path], tmp_path: Path
) -> None:
    _, whole, _ = tables
    other = tmp_path / "other.json"
    other.write_text(replace(whole, key=replace(whole.key, gpu="NVIDIA H200")).to_json())
    status, log = _policy_at_start(pair, other)
    assert "gpu 'NVIDIA H200', here 'cpu'" in json.dumps(status["reasons"])
    assert any("learned while serving" in line for line in log)
    assert LARGEST not in {cost["batch"] for cost in status["policy"]["costs"]}
