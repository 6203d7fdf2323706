"""``plan``: what a command line would capture, what stock leaves eager, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.buckets import plan_capture
from sglang_verify_graphs.cli import main
from sglang_verify_graphs.cli.plan import MEASURED, Prediction, predict
from sglang_verify_graphs.compat.releases import RELEASES
from sglang_verify_graphs.controller import DraftStepsController
from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.policy import FixedSteps
from tests.unit.test_controller import Engine

ROOT = Path(__file__).resolve().parents[2]
NEWEST = RELEASES[-1].version
SPECULATIVE = (
    "--model-path m --speculative-algorithm EAGLE3 --speculative-draft-model-path d "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
RUN = """
import sys
from sglang_verify_graphs.cli import main
main()
print([name for name in ("torch", "sglang") if name in sys.modules])
"""


def plan(words: str = "", gpu_gb: float | None = 48, sglang: str = NEWEST) -> Prediction:
    return predict(f"{SPECULATIVE} {words}".split(), sglang, gpu_gb)


def ladders(found: Prediction) -> dict[int, tuple[int, ...]]:
    return {width.draft_steps: width.batches for width in found.widths}


@pytest.mark.parametrize(("gpu_gb", "holes"), [(48, tuple(range(33, 49))), (141, ())])
def test_holes_of_stock_and_none_of_ours(gpu_gb: float, holes: tuple[int, ...]) -> None:
    found = plan(gpu_gb=gpu_gb)
    assert found.planned
    assert found.stock_uncovered == holes
    assert [width.uncovered for width in found.widths] == [()] * 4
    assert ladders(found) == {w.draft_steps: w.batches for w in plan_capture(range(4), 48).widths}
    assert found.buckets == 52


def test_our_flags() -> None:
    steps = ladders(plan("--verify-graph-steps 1 --verify-graph-max-batch 8"))
    assert steps == {3: (1, 2, 4, 6, 8), 1: (1, 2, 4, 6, 8)}
    observed = plan("--verify-graph-observe")
    assert (observed.planned, observed.widths) == (True, ())
    assert observed.stock_uncovered == tuple(range(33, 49))


def test_a_pasted_command_line() -> None:
    pasted = (
        "python -m sglang.launch_server --model-path m --speculative-algo NEXTN "
        "--speculative-num-steps=2 --speculative-eagle-topk 1 --tp 4 --max-running-requests 200 "
        "--chunked-prefill-size -1 --enable-verify-graphs --no-such-flag x y"
    )
    found = predict(pasted.split(), NEWEST, 48)
    assert (found.planned, found.max_running_requests) == (True, 200)
    assert found.stock_uncovered == tuple(range(161, 201))
    assert list(ladders(found)) == [2, 1, 0]


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ("--speculative-algorithm NGRAM", "other speculative algorithm"),
        ("--enable-multi-layer-eagle", "multi-layer EAGLE / MTP"),
        ("--disable-cuda-graph", "decode graphs disabled"),
        ("--cuda-graph-backend-decode disabled", "decode graphs disabled"),
        ('--cuda-graph-config {"decode":{"backend":"disabled"}}', "decode graphs disabled"),
        ("--attention-backend torch_native", "decode graphs disabled"),
        ("--speculative-adaptive", "--speculative-adaptive"),
        ("--dp-size 2 --enable-dp-attention", "attention DP"),
        ("--attn-dp-size 2", "attention DP"),
        ("--disaggregation-mode decode", "PD disaggregation"),
        ("--pp 2", "pipeline parallelism"),
        ("--enable-two-batch-overlap", "two-batch overlap"),
        ("--enable-pdmux", "PD multiplexing"),
        ("--lora-paths a=b", "LoRA"),
        ("--enable-hisparse", "HiSparse"),
    ],
)
def test_refused(words: str, mode: str) -> None:
    found = plan(words)
    assert (found.planned, found.widths) == (False, ())
    assert [reason.split(": ")[:2] for reason in found.reasons] == [["off", mode]]


@pytest.mark.parametrize(
    "words",
    [
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
        "--enable-return-hidden-states",
        "--enable-deterministic-inference",
        "--rl-on-policy-target x",
    ],
)
def test_one_width(words: str) -> None:
    found = plan(words)
    assert (found.planned, list(ladders(found))) == (True, [3])
    assert found.reasons[0].startswith("only the configured draft steps are captured")
    strict = plan(f"{words} --verify-graph-strict --verify-graph-steps 1")
    assert (strict.planned, strict.widths) == (False, ())


def test_what_the_release_decides() -> None:
    (one_width,) = plan(sglang=RELEASES[0].version).widths
    assert one_width.draft_steps == 3
    without_zero = next(r for r in RELEASES if not r.one_width)
    assert list(ladders(plan(sglang=without_zero.version))) == [3, 2, 1]
    untested = plan(sglang="99.0")
    assert not untested.planned
    assert plan("--verify-graph-allow-untested", sglang="99.0").planned


def test_the_environment_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    assert "plan stream" in plan().reasons[0]


@pytest.mark.parametrize("words", ["--moe-a2a-backend deepep --tp 8", ""])
def test_what_only_sglang_knows_is_said(words: str) -> None:
    """Our own ladder does not hang on it."""
    found = plan(words, gpu_gb=None)
    assert (found.planned, found.stock, found.stock_uncovered) == (True, None, None)
    assert any("configured by SGLang at start" in note for note in found.notes)
    assert all(batch * 3 % 8 == 0 for batch in ladders(found)[2]) == bool(words)


@pytest.mark.parametrize("budget", [0.01, 0.06, 0.2, 0.3, 0.45, 5.0])
def test_the_budget_drops_what_the_controller_drops(budget: float) -> None:
    """Where each graph takes what was measured at most."""
    configured, narrower = (cost.mib.high / 1024 for cost in MEASURED["fa3"])
    full = plan_capture(range(4), 60)

    class Capturing(Engine):
        taken = 0.0

        def stock_ladder(self) -> list[int]:
            return [*range(1, 33)]

        def free_gb(self) -> float:
            return 100.0 - self.taken

        def build_state(self, draft_steps: int, batches: Any) -> Any:
            self.taken += narrower * len(batches)
            return super().build_state(draft_steps, batches)

    engine: Any = Capturing()
    controller = DraftStepsController(engine, full, FixedSteps(3), memory_gb=budget)
    engine.gb = configured * len(controller.fit_configured_width())
    controller.init_states()
    found = plan(
        f"--max-running-requests 60 --attention-backend fa3 --verify-graph-memory-gb {budget}"
    )
    assert ladders(found) == {w.draft_steps: w.batches for w in controller.plan.widths}
    assert [w.dropped for w in found.widths] == [w.dropped for w in controller.plan.widths]


def test_the_figures_are_those_of_the_results() -> None:
    """Every report of a width lies in its range, and no range is wider by more than a tenth."""
    seen: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("serve-h200-*.json"):
        for row in json.loads(path.read_text())["capture"]:
            if row["source"] == "report" and row["role"].startswith("verify-graphs"):
                each = row["gb"] * 1024 / row["batches"], row["seconds"] * 1000 / row["batches"]
                seen.setdefault((row["attention"], row["draft_steps"] == 3), []).append(each)
    assert {backend for backend, _ in seen} == set(MEASURED)
    for (backend, configured), rows in seen.items():
        of_kind = MEASURED[backend][not configured]
        for found, real in zip(of_kind, zip(*rows, strict=True), strict=True):
            assert 0.9 * min(real) <= found.low <= min(real)
            assert max(real) <= found.high <= 1.1 * max(real)


def test_cost_by_backend() -> None:
    assert set(plan().cost) == set(MEASURED)
    (cost,) = plan("--attention-backend fa3").cost.values()
    assert cost["gib"].low < 0.33 < cost["gib"].high  # the whole of it, as measured on 8B
    unknown = plan("--attention-backend trtllm_mha")
    assert unknown.cost == {}
    assert any("not known on trtllm_mha" in note for note in unknown.notes)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--tp two", "--tp-size"),
        ("--max-running-requests 0", "--max-running-requests"),
        ("--speculative-num-steps", "--speculative-num-steps"),
        ("--cuda-graph-config {", "--cuda-graph-config"),
        ('--cuda-graph-config {"decode":{"bs":[0]}}', "--cuda-graph-config"),
        ("--config server.yaml", "--config"),
        ("--speculative-eagle-topk 4 --speculative-num-draft-tokens", "draft-tokens"),
        ("--verify-graph-steps 5", "--speculative-num-steps 5"),
        ("--verify-graph-max-batch none", "--verify-graph-max-batch"),
        ("--verify-graph-cold-zero --verify-graph-steps 1", "--verify-graph-cold-zero"),
    ],
)
def test_a_bad_argument_is_one_line(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "--sglang", NEWEST, "--", *SPECULATIVE.split(), *words.split()]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("error: ")) == ("", 1, True)
    assert named in err


@pytest.mark.parametrize("gpu_gb", [0.0, -1.0, float("nan"), float("inf")])
def test_a_gpu_without_memory(gpu_gb: float) -> None:
    with pytest.raises(SettingsError, match="--gpu-memory-gb"):
        plan(gpu_gb=gpu_gb)


def test_steps_that_sglang_chooses() -> None:
    with pytest.raises(SettingsError, match="configured by SGLang at start"):
        predict(["--speculative-algorithm", "EAGLE"], NEWEST, 48)


def test_without_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sglang_verify_graphs.cli.plan.sglang_version", lambda: None)
    assert main(["plan", "--", *SPECULATIVE.split()]) == 2
    assert "--sglang" in capsys.readouterr().err


def test_text_and_json_of_the_process() -> None:
    """Nothing heavy is imported, and both say the same."""

    def run(*options: str) -> list[str]:
        argv = ["plan", "--sglang", NEWEST, "--gpu-memory-gb", "48", *options, "--"]
        done = subprocess.run(
            [sys.executable, "-c", RUN, *argv, *SPECULATIVE.split()],
            capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ),
        )  # fmt: skip
        *lines, heavy = done.stdout.splitlines()
        assert heavy == "[]"
        return lines

    found = json.loads("\n".join(run("--json")))
    assert found == json.loads(json.dumps(asdict(plan())))
    text = run()
    assert text[0] == f"SGLang {NEWEST}, 48 running requests"
    assert text[2] == "stock verifies eager: 33-48"
    assert text[-1] == "planned"
    rows = [line.split()[:3] for line in text if line[:11].strip().isdecimal()]
    assert rows == [[str(steps), "13", "none"] for steps in (3, 2, 1, 0)]
    assert all(f"note: {note}" in text for note in found["notes"])


def test_refused_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--sglang", NEWEST, "--", "--model-path", "m"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"SGLang {NEWEST}"
    assert lines[1].startswith("off: no speculation")
    assert lines[-1] == "off; stock behaviour stays"
