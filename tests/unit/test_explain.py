"""``explain`` names the right cause in every log of ``tests/fixtures/logs``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_verify_graphs.cli import main
from sglang_verify_graphs.cli.explain import UNTOLD, Finding, explain
from sglang_verify_graphs.costs import PLAIN_DECODE, CostKey, CostRow, CostTable
from tests.unit.test_serverlog import AT, LOGS, fixture, read

ABOVE = {"replayed": "BATCH_ABOVE_LADDER", "ladder": "BATCH_ABOVE_LADDER"}
NO_GRAPH = {"draft_extend": "BACKEND_NOT_GRAPHED"}
NOT_EXACT = {"replayed": "EXACT_BATCH_MISSING"}
LATE = {"NCCL": "NCCL_NOT_REACHED"}

CAUSES: dict[str, dict[str, str]] = {
    "0.5.9-tp8-fa3": {**ABOVE, **NO_GRAPH},
    "0.5.13.post1-attention-dp": {},
    "0.5.13.post1-graphs-off": {"captured": "NO_RUNNER", "replayed": "NO_RUNNER"},
    "0.5.14-no-padding": NOT_EXACT,
    "0.5.17-nccl-late": LATE,
    "0.5.17-nccl-one-rank": LATE,
    "0.5.17-nccl-overridden": LATE,
    "0.5.17-nccl-seen": {},
    "0.5.17-node0": {},
    "0.5.17-node1": {"captured": "NO_RUNNER"},
    "0.5.17-node0 0.5.17-node1": {"captured": "RANK_WITHOUT_GRAPHS"},
    "0.5.17-node1 0.5.17-node0": {"captured": "RANK_WITHOUT_GRAPHS"},
    "0.5.17-out-of-memory": {"captured": "CAPTURE_FAILED"},
    "0.5.17-plugin-capped": dict.fromkeys(
        ("replayed", "ladder", "draft", "draft_extend"), "BATCH_ABOVE_LADDER"
    ),
    "0.5.17-plugin-draft-extend": NO_GRAPH,
    "0.5.17-plugin-fine": {},
    "0.5.17-plugin-memory": {"captured": "MEMORY_BUDGET"},
    "0.5.17-plugin-no-speculation": {"speculation": "NO_SPECULATION", "plugin": "PLUGIN_OFF"},
    "0.5.17-plugin-observe": dict.fromkeys(
        ("replayed", "draft", "draft_extend"), "EXACT_BATCH_MISSING"
    ),
    "0.5.17-plugin-tree": {},
    "0.5.17-plugin-untested": {"plugin": "PLUGIN_OFF"},
    "0.5.17-plugin-whitelist": {"plugin": "PLUGIN_NOT_LOADED"},
    "0.5.17-ranks-missing": {"plugin": "RANKS_DISAGREE"},
    "0.5.17-stock-adaptive-wide": {"captured": "CAPTURE_FAILED"},
    "0.5.17-stock-fine": {},
    "0.5.17-stock-no-padding": NOT_EXACT,
    "0.5.17-stock-no-speculation": {"speculation": "NO_SPECULATION"},
    "0.5.17-stock-tiny-ladder": ABOVE,
    "0.5.17-stock-wrong-draft": {"accept length": "DRAFT_ACCEPTS_NOTHING"},
    "0.5.23-plugin-fine": {},
    "0.5.23-stock-adaptive": {},
    "0.5.23-stock-draft-extend": NO_GRAPH,
    "0.5.23-torn": ABOVE,
    "not-installed": {"plugin": "PLUGIN_NOT_LOADED"},
}
"""What is wrong, by question; logs of several nodes are read together."""

UNSETTLED = {
    "0.5.13.post1-attention-dp": {"replayed", "ladder"},
    "0.5.13.post1-graphs-off": {"ladder"},
    "0.5.17-node1": {"replayed", "ladder"},
    "0.5.17-out-of-memory": {"replayed", "ladder"},
    "0.5.17-plugin-whitelist": {"captured", "replayed", "ladder"},
    "0.5.17-ranks-missing": {"captured", "replayed", "ladder"},
    "0.5.17-stock-adaptive-wide": {"replayed"},
    "0.5.23-torn": {"captured"},
    "not-installed": {"captured", "replayed", "ladder"},
}
"""Questions that these logs cannot settle, but for break-even and NCCL, of which few tell."""
_OFTEN = {"accept length", "NCCL"}


def found_in(*names: str) -> list[Finding]:
    return explain(read(*map(fixture, names)))


def wrong(found: list[Finding]) -> dict[str, str]:
    return {one.question: one.cause for one in found if one.wrong}


def test_every_log_has_its_causes() -> None:
    assert {log.stem for log in LOGS} == {name for names in CAUSES for name in names.split()}


@pytest.mark.parametrize("names", CAUSES)
def test_causes(names: str) -> None:
    found = found_in(*names.split())
    assert wrong(found) == CAUSES[names]
    unsettled = {one.question for one in found if one.wrong is None} - _OFTEN
    assert unsettled == UNSETTLED.get(names, set())


@pytest.mark.parametrize("names", CAUSES)
def test_each_answer_shows_lines_that_stand_there(names: str) -> None:
    lines = [fixture(name).decode(errors="replace").split("\n") for name in names.split()]
    for one in found_in(*names.split()):
        if one.wrong:
            assert one.proof
            assert one.change
        for file, number, text in one.proof:
            there = lines[int(file[0])][number - 1]
            made = ("server_args: ", "/server_info: ", "error: unrecognized")
            assert text in there or text.startswith(made)


@pytest.mark.parametrize(
    ("name", "question", "words"),
    [
        ("0.5.9-tp8-fa3", "captured", "TP7: width 4, batches 1-2, 4, 8, 12, 16, 24"),
        ("0.5.9-tp8-fa3", "replayed", "2 of 6 logged rounds ran eager, at batch 31-32 > 24"),
        ("0.5.14-no-padding", "replayed", "captured ones too: a defect of some SGLang releases"),
        ("0.5.17-plugin-fine", "accept length", "batch 2: best is 2 steps, gaining"),
        ("0.5.17-plugin-memory", "captured", "by draft_steps: 1: 1-6"),
        ("0.5.17-nccl-one-rank", "NCCL", "allreduce:ring on node0:8101; not set on node0:8102"),
        ("0.5.17-nccl-seen", "NCCL", "NCCL_ALGO=Ring (flag): in use"),
        ("0.5.23-stock-adaptive", "captured", "draft_steps 1 as well"),
        ("0.5.23-torn", "captured", "not on TP3"),
        ("0.5.23-torn", "input", "6 of 21 lines"),
    ],
)
def test_answers(name: str, question: str, words: str) -> None:
    answers = [one.answer for one in found_in(name) if one.question == question]
    assert any(words in answer for answer in answers), answers


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("0.5.17-out-of-memory", "--mem-fraction-static"),
        ("0.5.17-stock-adaptive-wide", "widest candidate as --speculative-num-steps"),
        ("0.5.17-nccl-overridden", "--nccl-reapply"),
        ("0.5.17-plugin-whitelist", "SGLANG_PLUGINS"),
        ("0.5.17-plugin-untested", "--verify-graph-allow-untested"),
    ],
)
def test_what_to_change(name: str, words: str) -> None:
    assert any(words in one.change for one in found_in(name) if one.wrong)


def settled(log: bytes, *others: bytes) -> tuple[dict[str, str], set[str]]:
    """What is wrong, and questions that are not settled."""
    found = explain(read(log, *others))
    return wrong(found), {one.question for one in found if one.wrong is None} - _OFTEN


def without(log: bytes, words: bytes) -> bytes:
    return b"".join(line for line in log.splitlines(True) if words not in line)


def test_a_log_claims_no_more_than_it_shows() -> None:
    no_padding, node1 = fixture("0.5.17-stock-no-padding"), fixture("0.5.17-node1")
    rounds = without(without(no_padding, b"server_args="), b"Capture")
    assert settled(rounds) == ({}, {"captured", "replayed", "ladder"})
    rotated = without(node1, b"server_args=")
    assert settled(fixture("0.5.17-node0"), rotated) == ({}, {"captured"})


def test_a_scheduler_that_ends_while_it_serves() -> None:
    end = AT + b"Scheduler hit an exception: Traceback (most recent call last):\nIndexError: no\n"
    found = explain(read(fixture("0.5.17-stock-fine") + end))
    assert wrong(found) == {"server": "SCHEDULER_DIED"}
    assert found[0].proof[1].text == "IndexError: no"


def test_another_condition_is_not_named_after_a_flag() -> None:
    """Batch 2 is captured and replays elsewhere in this log."""
    log = fixture("0.5.17-stock-no-padding").replace(
        b"#token: 118", b"#token: 118, cuda graph: False"
    )
    assert settled(log) == (NOT_EXACT, {"replayed"})


def test_a_batch_above_the_ladder_that_replays() -> None:
    """The ladder is not all told, or the batch shrank before its line was written."""
    log = fixture("0.5.17-stock-fine").replace(b"#running-req: 5", b"#running-req: 7")
    assert settled(log) == ({}, {"ladder"})


@pytest.mark.parametrize("name", ["0.5.17-nccl-seen", "0.5.17-plugin-fine"])
def test_rounds_of_several_step_counts_say_nothing_of_the_draft(name: str) -> None:
    """The plugin may have chosen 0 steps in all of them, which accept nothing by design."""
    log = re.sub(rb"accept len: [\d.]+", b"accept len: 1.00", fixture(name))
    log = re.sub(rb'("[12]"): \[[\d., ]+\]', rb"\1: null", log)
    assert settled(log) == ({}, set())


def costs(verify_ms: float) -> CostTable:
    """Plain decode takes 1 ms."""
    key = CostKey("H200", 1, "m", "d", "0.5.17", "fa3", "bfloat16")
    rows = ((batch, steps) for batch in (1, 2, 6) for steps in (PLAIN_DECODE, 2))
    cost = {PLAIN_DECODE: 1.0, 2: verify_ms}
    return CostTable(key, tuple(CostRow(b, k, *[cost[k]] * 3, samples=9) for b, k in rows))


@pytest.mark.parametrize(
    ("verify_ms", "cause", "words"),
    [
        (3.0, "BELOW_BREAK_EVEN", "batch 2: 2.42, needed 3.00: losing 19%"),
        (1.5, "FINE", "batch 2: 2.42, needed 1.50: gaining 61%"),
    ],
)
def test_against_break_even(verify_ms: float, cause: str, words: str) -> None:
    """Batches 1 and 5 have two logged rounds, too few to judge."""
    found = explain(read(fixture("0.5.17-stock-fine")), costs(verify_ms))
    (one,) = (one for one in found if one.question == "accept length")
    assert one.cause == cause
    assert one.answer.split("; ")[1:] == [words]


def test_costs_of_other_batches_are_no_answer() -> None:
    (other,) = (row for row in costs(3.0).rows if (row.batch, row.draft_steps) == (1, 2))
    log = fixture("0.5.17-stock-fine")
    garbled = log.replace(b"speculative_num_steps=2", b"speculative_num_steps=2x")
    for told, table in (
        (log, CostTable(costs(3.0).key, (other,))), (garbled, costs(3.0)),
    ):  # fmt: skip
        found = explain(read(told), table)
        assert ("accept length", UNTOLD) in [(one.question, one.cause) for one in found]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["explain", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fine, above, none = (tmp_path / name for name in ("fine", "above", "none"))
    fine.write_bytes(fixture("0.5.17-plugin-fine"))
    above.write_bytes(fixture("0.5.17-stock-tiny-ladder"))
    none.write_bytes(b"a log of something else\n" * 9)
    assert run(capsys, fine)[0] == 0
    assert run(capsys, above)[0] == 1
    table = tmp_path / "costs.json"
    for bad, error in (
        ((none,), "none of 9 lines"), ((fine, tmp_path / "absent"), "absent"),
        ((tmp_path,), "directory"), (("--costs", table, fine), "calibrate"),
    ):  # fmt: skip
        status, out, err = run(capsys, *bad)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert error in err
    table.write_text(costs(3.0).to_json())
    fine.write_bytes(fixture("0.5.17-stock-fine"))
    assert run(capsys, "--costs", table, fine)[0] == 1


@pytest.mark.parametrize("name", ["0.5.9-tp8-fa3", "0.5.23-torn"])
def test_no_secret_is_shown(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    secrets = b"node0:1:1 [0] NCCL INFO NCCL_API_KEY set by environment to not-to-be-shown\n"
    wrong_flag = (
        b"serve: error: unrecognized arguments: --x not-to-be-shown --enable-verify-graphs\n"
    )
    log.write_bytes(fixture(name) + b"\n" + secrets + wrong_flag)
    assert log.read_bytes().count(b"not-to-be-shown") == 3
    for options in ([], ["--json"]):
        assert "not-to-be-shown" not in run(capsys, log, *options)[1]


def test_nothing_controls_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(AT + b"[verify-graphs] off: \x1b[2J\xc2\x9b; \x1b]0;x\n")
    out = run(capsys, log)[1]
    assert "off: ?[2J?" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    log = next(log for log in LOGS if log.stem == "0.5.23-torn")
    told = json.loads(run(capsys, "--json", log)[1])
    assert (told["lines"], told["unreadable"]) == (21, 6)
    first = told["findings"][0]
    assert (first["cause"], first["proof"][0]["file"]) == ("BATCH_ABOVE_LADDER", str(log))
