"""``explain``: what a server's logs say of its verify graphs, each answer with its proof.

Judging is pure: a ``ServerLog`` in, findings out. What a log does not tell is said to be unknown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_verify_graphs.buckets import format_ranges
from sglang_verify_graphs.cli.report import of_server, report
from sglang_verify_graphs.compat.serverlog import Line, ServerLog, read_server_log
from sglang_verify_graphs.costs import PLAIN_DECODE, CostTable, break_even, read_costs, verdict
from sglang_verify_graphs.errors import CostsError
from sglang_verify_graphs.estimate import Estimate
from sglang_verify_graphs.gate import Phase, RejectReason
from sglang_verify_graphs.nccl.compare import mismatches
from sglang_verify_graphs.nccl.evidence import SHELL, UNKNOWN, RankEvidence, Variable
from sglang_verify_graphs.nccl.status import judge
from sglang_verify_graphs.settings import FLAG
from sglang_verify_graphs.support import LIMITS

FINE, UNTOLD = "FINE", "UNTOLD"
"""Causes of a finding that asks for nothing, and of one that the log cannot settle."""
_CANNOT = "cannot be told from this log"
_OBSERVE = f"start with {FLAG} --verify-graph-observe, which names and counts every reason"
_HARDLY = 1.1
"""Accept length below which no drafts pay: each of their rounds costs more than a plain one."""
_SEVERAL = 8
"""Batches that are named one by one."""


@dataclass(frozen=True)
class Finding:
    """One answer; ``wrong``: whether something is to be changed, None where it cannot be told."""

    question: str
    cause: str
    wrong: bool | None
    answer: str
    proof: tuple[Line, ...] = ()
    change: str = ""


def explain(log: ServerLog, costs: CostTable | None = None) -> list[Finding]:
    """Every answer that the log allows: what is wrong first, and a cause before its effects."""
    found = [finding for judge_one in _JUDGES for finding in judge_one(log)]
    found += _acceptance(log, costs)
    if log.unreadable:
        answer = f"{log.unreadable} of {log.lines} lines are cut, damaged or beyond what is kept"
        found.append(Finding("input", "DAMAGED", False, answer))
    return sorted(found, key=lambda f: (f.wrong is not True, f.wrong is False))


def _speculation(log: ServerLog) -> Iterator[Finding]:
    if log.arguments.get("speculative_algorithm") == "None":
        proof = log.first("arguments")
        yield Finding("speculation", "NO_SPECULATION", True, LIMITS[0].why, proof, LIMITS[0].fix)


def _capture(log: ServerLog) -> Iterator[Finding]:
    graphs = {key: one for key, one in log.captures.items() if key[1] is Phase.VERIFY}
    done = {rank: one.end for (rank, _, _), one in graphs.items() if one.end}
    lacking = [rank for rank in log.ranks if rank and rank not in done]
    started = log.first("arguments", "running")
    say = Finding("captured", FINE, False, "", tuple(filter(None, done.values()))[:2])
    if failed := log.first("fault"):
        memory = "out of memory" in failed[0].text
        change = "lower --mem-fraction-static or --cuda-graph-max-bs" if memory else _OBSERVE
        if log.arguments.get("speculative_adaptive") == "True" and not memory:
            change = "configure the widest candidate as --speculative-num-steps"
        answer = f"capture failed{' for want of memory' * memory}"
        yield Finding("captured", "CAPTURE_FAILED", True, answer, failed, change)
    elif _disabled(log) or (not done and not graphs and started and log.decodes):
        answer = "no: graphs are switched off" if _disabled(log) else "no rank captured any"
        reason = RejectReason.NO_RUNNER
        yield Finding("captured", reason.value, True, answer, started[:1], reason.advice)
    elif lacking and done and log.decodes:
        answer = f"not on {', '.join(lacking)}; on {', '.join(done)}"
        change = "start every rank with the same flags, and look for an error above in its log"
        yield Finding("captured", "RANK_WITHOUT_GRAPHS", True, answer, say.proof, change)
    elif not done or len(done) < len({rank for rank, _, _ in graphs}):
        begun = tuple(one.begin for one in graphs.values() if not one.end)[:2]
        answer = "the log ends before a capture does" if begun else "it lacks the server's start"
        yield Finding("captured", UNTOLD, None, f"{_CANNOT}: {answer}", begun)
    else:
        widths = sorted({width for _, _, width in graphs})
        ranks = ", ".join(rank or "the only rank" for rank in done)
        yield Finding(
            "captured", FINE, False,
            f"by {ranks}: width {', '.join(str(w or UNKNOWN) for w in widths)}, "
            f"batches {format_ranges(log.ladder) or UNKNOWN}"
            + "".join(f"; draft_steps {k} to {top}" for k, (top, _) in log.widths.items()),
            say.proof,
        )  # fmt: skip
    if proof := log.first("memory"):
        reason, gaps = RejectReason.MEMORY_BUDGET, {k: gap for k, (_, gap) in log.widths.items()}
        answer = f"batches without a graph, by draft_steps: {gaps or UNKNOWN}"
        yield Finding("captured", reason.value, True, answer, proof, reason.advice)


def _disabled(log: ServerLog) -> bool:
    told = log.arguments
    return told.get("disable_cuda_graph") == "True" or told.get("decode graphs") == "disabled"


def _plugin(log: ServerLog) -> Iterator[Finding]:
    for kind, cause in (
        ("unloaded", "PLUGIN_NOT_LOADED"), ("ranks", "RANKS_DISAGREE"), ("off", "PLUGIN_OFF"),
    ):  # fmt: skip
        for line in log.proofs.get(kind, ())[:1]:
            said = line.text.partition("[verify-graphs] ")[2] or line.text
            why, _, change = said.rpartition("; ")
            named = "PLUGIN_NOT_LOADED" if "SGLANG_PLUGINS" in said else cause
            change = change if why else "pip install sglang-verify-graphs beside this SGLang"
            yield Finding("plugin", named, True, why or said, (line,), change)
    if proof := log.first("observe", "active"):
        answer = "it observes stock" if "observe" in log.proofs else "active"
        yield Finding("plugin", FINE, False, answer, proof)


def _replay(log: ServerLog) -> Iterator[Finding]:
    total = sum(one.replayed + one.eager for one in log.decodes.values())
    eager = {size: one for size, one in log.decodes.items() if one.eager}
    replays = tuple(one.replay for one in log.decodes.values() if one.replay)[:1]
    named = [(r, line) for (phase, r), line in log.eager.items() if phase == Phase.VERIFY.value]
    for name, said in named:
        advice = _advice(name)
        wrong = "expected" not in advice
        yield Finding("replayed", name, wrong, "a verify ran eager", (said,), advice)
    if not total:
        yield Finding("replayed", UNTOLD, None, f"{_CANNOT}: it holds no decode line")
        return
    share = f"{sum(one.eager for one in eager.values())} of {total} logged rounds ran eager"
    if not eager:
        yield Finding("replayed", FINE, False, f"yes: {share}", replays)
    reasons = Counter[str]()
    for size, one in eager.items():
        reasons[_reason(log, size)] += one.eager
    for cause, count in reasons.most_common() if not named else ():
        sizes = [size for size in sorted(eager) if _reason(log, size) == cause]
        proof = tuple(line for size in sizes if (line := eager[size].refusal))[:2]
        at, known = f"{share}, {count} of them at batch {format_ranges(sizes)}", cause != UNTOLD
        if cause == RejectReason.BATCH_ABOVE_LADDER.value:
            at += f" > {max(log.ladder)}, the largest captured"
        if cause == RejectReason.EXACT_BATCH_MISSING.value and set(sizes) & set(log.ladder):
            at += ", captured ones too: a defect of this SGLang release, which the plugin mends"
        at = at if known else f"{at}: which condition failed {_CANNOT}"
        change = _advice(cause) if known else _OBSERVE
        yield Finding("replayed", cause, known or None, at, proof, change)


def _reason(log: ServerLog, size: int) -> str:
    """Why a verify of this batch ran eager, as far as stock's log tells."""
    told = log.arguments
    if _disabled(log) or (log.first("arguments") and not log.captures and not log.widths):
        return RejectReason.NO_RUNNER.value
    if log.ladder and size > max(log.ladder):
        return RejectReason.BATCH_ABOVE_LADDER.value
    if told.get("disable_cuda_graph_padding") == "True":
        return RejectReason.EXACT_BATCH_MISSING.value
    return UNTOLD


def _advice(name: str) -> str:
    return RejectReason[name].advice if name in RejectReason.__members__ else _OBSERVE


def _ladder(log: ServerLog) -> Iterator[Finding]:
    if not log.ladder:
        yield Finding("ladder", UNTOLD, None, f"{_CANNOT}: it names no captured batch")
        return
    top, seen = max(log.ladder), max(log.decodes, default=0)
    reason, asked = RejectReason.BATCH_ABOVE_LADDER, log.arguments.get("cuda_graph_max_bs", "")
    answer = f"largest captured {top}, largest logged {seen or UNKNOWN}"
    if asked.isdecimal() and int(asked) > top:
        answer += f", asked for {asked}"
    if seen > top:
        proof = tuple(filter(None, (log.decodes[seen].refusal or log.decodes[seen].replay,)))
        yield Finding("ladder", reason.value, True, f"above: {answer}", proof, reason.advice)
    elif log.running > top:
        answer += f"; {top + 1}-{log.running} would run eager"
        yield Finding("ladder", FINE, False, answer, log.first("running"), reason.advice)
    else:
        yield Finding("ladder", FINE, False, f"not above: {answer}", log.first("running"))


def _phases(log: ServerLog) -> Iterator[Finding]:
    """Draft forwards and draft extend; rank 0 alone logs their captures."""
    told, reason = log.arguments, RejectReason.BACKEND_NOT_GRAPHED
    named = {phase: (r, line) for (phase, r), line in log.eager.items()}
    phases = {rank_phase[1]: one for rank_phase, one in log.captures.items() if one.end}
    first = any(re.search(r"\bTP0\b", rank) or "TP" not in rank for rank, _, _ in log.captures)
    judged = first and log.decodes and told.get("speculative_algorithm") in ("EAGLE", "EAGLE3")
    wanted = [Phase.DRAFT] * (told.get("speculative_num_steps") != "1") + [Phase.DRAFT_EXTEND]
    for phase in wanted:
        if phase.value in named:
            name, line = named[phase.value]
            yield Finding(phase.value, name, True, "it ran eager", (line,), _advice(name))
        elif judged and phase not in phases and Phase.VERIFY in phases:
            answer = (
                f"no graph of {phase.value} was captured on attention backend "
                f"{told.get('attention_backend', UNKNOWN)}: it runs eager in every round, "
                "whatever the decode lines say, which speak of verify alone"
            )
            proof = tuple(filter(None, (phases[Phase.VERIFY].end,)))
            yield Finding(phase.value, reason.value, True, answer, proof, reason.advice)
        elif phase in phases:
            proof = tuple(filter(None, (phases[phase].end,)))
            yield Finding(phase.value, FINE, False, "captured", proof)


def _acceptance(log: ServerLog, costs: CostTable | None) -> Iterator[Finding]:
    told = {size: one for size, one in log.decodes.items() if one.told}
    rounds = sum(one.told for one in told.values())
    proof = log.first("accept")
    if not rounds:
        return
    mean = sum(one.accepted for one in told.values()) / rounds
    answer = f"{mean:.2f} over {rounds} logged rounds"
    if mean < _HARDLY and rounds > 2:
        yield Finding(
            "accept length", "DRAFT_ACCEPTS_NOTHING", True, answer, proof,
            "the draft does not fit the target; check --speculative-draft-model-path, and that "
            "EAGLE3 is the algorithm of an EAGLE-3 draft",
        )  # fmt: skip
        return
    policy: dict[int, Estimate] = {}
    try:
        if costs is None and log.report:
            info = {"internal_states": [{"verify_graphs": log.report}]}
            costs, policy = of_server(info)
        if costs is None:
            raise CostsError("no round costs; give --costs, or a line of /server_info")
        lines = list(_against(log, costs, policy))
    except CostsError as error:
        answer += f"; against break-even {_CANNOT}: {error}"
        yield Finding("accept length", UNTOLD, None, answer, proof)
        return
    losing = any(": losing" in line for line in lines) and not policy
    cause = "BELOW_BREAK_EVEN" if losing else FINE
    change = "fewer --speculative-num-steps, or none: see sglang-verify-graphs report"
    answer = "; ".join((answer, *lines[:_SEVERAL]))
    yield Finding("accept length", cause, losing, answer, proof, change * losing)


def _against(log: ServerLog, costs: CostTable, policy: dict[int, Estimate]) -> Iterator[str]:
    """What each batch earns; the plugin's own policy chooses its steps, so of the best ones."""
    if policy:
        for at in report(costs, policy).batches:
            for row in at.steps:
                if row.draft_steps == at.best_steps:
                    yield f"batch {at.batch}: best is {row.draft_steps} steps, {row.verdict}"
        return
    known = {(row.batch, row.draft_steps): row for row in costs.rows}
    steps = int(log.arguments.get("speculative_num_steps", "-1").replace("None", "-1"))
    for size, one in sorted(log.decodes.items()):
        bucket = min((b for b, k in known if k == steps and b >= size), default=0)
        spent, plain = known.get((bucket, steps)), known.get((bucket, PLAIN_DECODE))
        plain = plain or known.get((bucket, 0))
        if one.told and spent and plain:
            needed = break_even(
                Estimate(spent.ms, spent.low_ms, spent.high_ms),
                Estimate(plain.ms, plain.low_ms, plain.high_ms),
            )
            length = one.accepted / one.told
            value = f"{needed.value:.2f}" if needed else UNKNOWN
            yield f"batch {size}: {length:.2f}, needed {value}: {verdict(needed, length)}"


def _nccl(log: ServerLog) -> Iterator[Finding]:
    for line in log.proofs.get("nccl problem", ()):
        answer = line.text.partition("NCCL: ")[2]
        change = "set it with --nccl-env, before the first communicator; see ranks"
        yield Finding("NCCL", "NCCL_NOT_REACHED", True, answer, (line,), change)
    if proof := log.first("nccl"):
        yield Finding("NCCL", FINE, False, proof[0].text.partition("NCCL ")[2], proof)
    heard = {at: one for at, one in log.nccl.items() if one.communicators or one.read}
    ranks = judge([
        RankEvidence(
            rank, len(heard), f"{process.host}:{process.pid}", one.version, None, None, True,
            tuple(_variable(name, one.read.get(name)) for name in {**one.read, **one.refused}),
            one,
        )
        for rank, ((_, process), one) in enumerate(heard.items())
    ])  # fmt: skip
    faults = {(m.what, m.text) for m in mismatches([ranks])}
    faults |= {
        (name, f"{name}={v.effective}: {v.evidence}")
        for rank in ranks
        for name, v in rank.variables.items()
        if v.in_use is False and v.read_by_nccl is True
    }
    change = "start every rank with the same NCCL_* values; see ranks"
    for what, text in sorted(faults)[:_SEVERAL]:
        yield Finding("NCCL", "NCCL_NOT_REACHED", True, text, log.first(what), change)
    if ranks and not faults:
        names = sorted({name for rank in ranks for name in rank.variables})
        answer = f"{len(ranks)} process(es) read {', '.join(names) or 'no variable'}"
        yield Finding("NCCL", FINE, False, answer, log.first(*names)[:1])


def _variable(name: str, value: str | None) -> Variable:
    return Variable(name, None, value or UNKNOWN, SHELL, value or UNKNOWN)


_JUDGES: tuple[Callable[[ServerLog], Iterator[Finding]], ...] = (
    _speculation, _capture, _plugin, _replay, _ladder, _phases, _nccl,
)  # fmt: skip


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "explain",
        help="what server logs say: captured, replayed or why not, accepted, seen by NCCL",
        description="Reads logs of SGLang servers, with the plugin or without, and of NCCL: exit 0 "
        "where nothing is to be changed, 1 where something is, 2 where nothing can be read.",
    )
    parser.add_argument("logs", metavar="LOG", nargs="+", type=Path, help="- is standard input")
    parser.add_argument("--costs", type=Path, help="costs.json of calibrate, for the break-even")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    log = ServerLog()
    try:
        costs = read_costs(arguments.costs) if arguments.costs else None
        for path in arguments.logs:
            if str(path) == "-":
                read_server_log(log, sys.stdin.buffer, "-")
            else:
                with path.open("rb") as stream:
                    read_server_log(log, stream, str(path))
    except (OSError, CostsError) as error:
        print(_clean(f"error: {error}"), file=sys.stderr)
        return 2
    if not log.recognised:
        print(f"error: none of {log.lines} lines is SGLang's or NCCL's", file=sys.stderr)
        return 2
    found = explain(log, costs)
    if arguments.json:
        counts = {"lines": log.lines, "unreadable": log.unreadable}
        findings = [asdict(f) | {"proof": [p._asdict() for p in f.proof]} for f in found]
        print(json.dumps({**counts, "findings": findings}, indent=2))
    else:
        print(*map(_clean, _lines(found)), sep="\n")
    return int(any(f.wrong for f in found))


def _lines(found: list[Finding]) -> Iterator[str]:
    for one in found:
        mark = "!" if one.wrong else "?" if one.wrong is None else " "
        cause = "" if one.cause in (FINE, UNTOLD) else f"{one.cause}: "
        yield f"{mark} {one.question}: {cause}{one.answer}"
        yield from (f"      {line}" for line in one.proof)
        if one.change:
            yield f"    change: {one.change}"


def _clean(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)
