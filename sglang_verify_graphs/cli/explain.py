"""``explain``: what a server's logs say of its verify graphs, each answer with its proof.

Judging is pure: a ``ServerLog`` in, findings out. What a log does not tell is said to be unknown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_verify_graphs.buckets import format_ranges
from sglang_verify_graphs.cli.client import clean
from sglang_verify_graphs.cli.report import of_server, report
from sglang_verify_graphs.compat.serverlog import Line, ServerLog, read_server_log
from sglang_verify_graphs.costs import PLAIN_DECODE, CostTable, break_even, read_costs, verdict
from sglang_verify_graphs.errors import CostsError
from sglang_verify_graphs.estimate import Estimate
from sglang_verify_graphs.gate import Phase, RejectReason
from sglang_verify_graphs.nccl.compare import mismatches
from sglang_verify_graphs.nccl.evidence import SHELL, UNKNOWN, NcclLog, RankEvidence, Variable
from sglang_verify_graphs.nccl.status import judge
from sglang_verify_graphs.settings import FLAG
from sglang_verify_graphs.support import LIMITS

FINE, UNTOLD = "FINE", "UNTOLD"
"""Causes of a finding that asks for nothing, and of one that the log cannot settle."""
_CANNOT = "cannot be told from this log"
_OBSERVE = f"start with {FLAG} --verify-graph-observe, which names and counts every reason"
_HARDLY = 1.1
"""Accept length below which no drafts pay: each of their rounds costs more than a plain one."""
_FEW, _SEVERAL = 3, 8
"""Logged rounds from which an accept length is judged, and things that are named one by one."""


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


def _died(log: ServerLog) -> Iterator[Finding]:
    """A scheduler that ended, in its capture or elsewhere."""
    told = [line for kind in ("failed", "error") for line in log.proofs.get(kind, ())]
    change = "see its traceback"
    if log.first("failed"):
        memory = any("out of memory" in line.text for line in told)
        wide = any("shared logits buffer holds" in line.text for line in told)
        if memory:
            change = "lower --mem-fraction-static or --cuda-graph-max-bs[-decode]"
        elif wide and log.arguments.get("speculative_adaptive") == "True":
            change = (
                "configure the widest candidate as --speculative-num-steps, or install a newer "
                "SGLang release (its #35275)"
            )
        answer = f"capture failed{' for want of memory' * memory}"
        proof = log.first("failed", "error")
        yield Finding("captured", "CAPTURE_FAILED", True, answer, proof, change)
    elif log.first("died") and not log.first("ranks", "off"):
        answer = "a scheduler ended with an exception, not while it captured"
        proof = log.first("died", "error")
        yield Finding("server", "SCHEDULER_DIED", True, answer, proof, change)


def _capture(log: ServerLog) -> Iterator[Finding]:
    graphs = {key: one for key, one in log.captures.items() if key[1] is Phase.VERIFY}
    done = {rank: one.end for (rank, _, _), one in graphs.items() if one.end}
    lacking = [rank for rank in log.ranks if rank and rank not in done]
    proof, started = tuple(done.values())[:2], log.first("arguments")
    reason = RejectReason.NO_RUNNER
    if log.first("failed"):
        pass
    elif not done and _disabled(log):
        answer = "no: graphs are switched off"
        yield Finding("captured", reason.value, True, answer, started, reason.advice)
    elif not graphs and started and log.decodes and not log.torn:
        yield Finding("captured", reason.value, True, "no rank captured any", started, _OBSERVE)
    elif lacking and done and (log.decodes or len(done) == len(graphs)):
        sure = not log.torn and all(log.ranks[rank] for rank in lacking)
        answer = f"not on {_some(lacking)}; on {_some(done)}"
        answer += "" if sure else f"; whether the lines of a capture are lost {_CANNOT}"
        change = "start every rank with the same flags, and look for an error above in its log"
        proof = (*proof[:1], *log.proofs.get("arguments", ())[:2])
        yield Finding("captured", "RANK_WITHOUT_GRAPHS", sure or None, answer, proof, change)
    elif not done or len(done) < len({rank for rank, _, _ in graphs}):
        begun = tuple(one.begin for one in graphs.values() if not one.end)[:2]
        where = "it ends, or is damaged, before a capture does" if begun else "it tells no capture"
        yield Finding("captured", UNTOLD, None, f"{_CANNOT}: {where}", begun)
    else:
        width = log.arguments.get("speculative_num_draft_tokens", "None").replace("None", UNKNOWN)
        widths = ", ".join(str(w or width) for w in sorted({w for _, _, w in graphs}))
        answer = f"by {_some(done)}: width {widths}, batches {_ranges(log.ladder) or UNKNOWN}"
        if others := set(log.widths) | set(log.built):
            answer += f"; draft_steps {_ranges(others)} as well"
        yield Finding("captured", FINE, False, answer, proof)
    if lines := log.first("memory"):
        reason = RejectReason.MEMORY_BUDGET
        gaps = ", ".join(f"{k}: {gap}" for k, gap in log.widths.items() if gap != "none")
        answer = f"batches without a graph, by draft_steps: {gaps}" if gaps else "graphs left out"
        yield Finding("captured", reason.value, True, answer, lines, reason.advice)


def _some(ranks: Iterable[str]) -> str:
    named = sorted(ranks, key=lambda rank: [int(n) for n in re.findall(r"\d+", rank)])
    if len(named) > _SEVERAL:
        return f"{len(named)} ranks, {named[0]} to {named[-1]}"
    return ", ".join(rank or "the only rank" for rank in named)


def _disabled(log: ServerLog) -> bool:
    told = log.arguments
    return told.get("disable_cuda_graph") == "True" or told.get("decode graphs") == "disabled"


def _plugin(log: ServerLog) -> Iterator[Finding]:
    for kind, cause in (
        ("unloaded", "PLUGIN_NOT_LOADED"), ("ranks", "RANKS_DISAGREE"), ("off", "PLUGIN_OFF"),
    ):  # fmt: skip
        for line in log.first(kind):
            said = line.text.partition("[verify-graphs] ")[2] or line.text
            why, _, change = said.rpartition("; ")
            if kind == "unloaded":
                why, change = said, "pip install sglang-verify-graphs, and ask its doctor"
            if "SGLANG_PLUGINS" in said:
                cause, change = "PLUGIN_NOT_LOADED", "add verify_graphs to SGLANG_PLUGINS"
            yield Finding("plugin", cause, True, why or said, (line,), change)
    if proof := log.first("observe", "active"):
        answer = "it observes stock" if "observe" in log.proofs else "active"
        yield Finding("plugin", FINE, False, answer, proof)


def _replay(log: ServerLog) -> Iterator[Finding]:
    total = sum(one.replayed + one.eager for one in log.decodes.values())
    eager = {size: one for size, one in log.decodes.items() if one.eager}
    replays = tuple(one.replay for one in log.decodes.values() if one.replay)[:1]
    share = f"{sum(one.eager for one in eager.values())} of {total} logged rounds ran eager"
    named = [(r, line) for (phase, r), line in log.eager.items() if phase == Phase.VERIFY.value]
    for name, said in named:
        advice = _advice(name)
        yield Finding("replayed", name, "expected" not in advice, share, (said,), advice)
    if named:
        return
    if not total:
        yield Finding("replayed", UNTOLD, None, f"{_CANNOT}: it holds no decode line")
    elif not eager:
        yield Finding("replayed", FINE, False, f"yes: {share}", replays)
    causes: dict[str, list[int]] = {}
    for size in sorted(eager):
        causes.setdefault(_reason(log, size), []).append(size)
    for cause, sizes in causes.items():
        proof = tuple(line for size in sizes if (line := eager[size].refusal))[:2]
        at, known = f"{share}, at batch {_ranges(sizes)}", cause != UNTOLD
        if cause == RejectReason.BATCH_ABOVE_LADDER.value:
            at += f" > {max(log.ladder)}, the largest captured"
        elif cause == RejectReason.EXACT_BATCH_MISSING.value and set(sizes) & log.ladder:
            at += ", captured ones too: a defect of some SGLang releases, which the plugin mends"
        at = at if known else f"{at}: which condition failed {_CANNOT}"
        yield Finding("replayed", cause, known or None, at, proof, _advice(cause))


def _ranges(numbers: Iterable[int]) -> str:
    return format_ranges(sorted(numbers))


def _reason(log: ServerLog, size: int) -> str:
    """Why a verify of this batch ran eager, as far as stock's log tells."""
    told, replayed = log.arguments, any(one.replayed for one in log.decodes.values())
    if not (log.captures or log.widths or replayed) and (
        _disabled(log) or (log.first("arguments") and not log.torn)
    ):
        return RejectReason.NO_RUNNER.value
    if not log.ladder:
        return UNTOLD
    if size > max(log.ladder):
        return RejectReason.BATCH_ABOVE_LADDER.value
    if told.get("disable_cuda_graph_padding") == "True" and (
        size not in log.ladder or not replayed
    ):
        return RejectReason.EXACT_BATCH_MISSING.value
    return UNTOLD


def _advice(name: str) -> str:
    return RejectReason[name].advice if name in RejectReason.__members__ else _OBSERVE


def _ladder(log: ServerLog) -> Iterator[Finding]:
    if not log.ladder:
        yield Finding("ladder", UNTOLD, None, f"{_CANNOT}: it names no captured batch")
        return
    top, seen = max(log.ladder), max(log.decodes, default=0)
    refused = max((size for size, one in log.decodes.items() if one.eager), default=0)
    reason, answer = RejectReason.BATCH_ABOVE_LADDER, f"largest captured {top}, largest logged "
    if refused > top:
        proof = tuple(filter(None, (log.decodes[refused].refusal,)))
        answer = f"above: {answer}{refused}"
        yield Finding("ladder", reason.value, True, answer, proof, reason.advice)
    elif log.arguments.get("enable_dp_attention") == "True" or seen > top:
        answer += f"{seen or UNKNOWN}; under attention DP the largest of all ranks counts"
        yield Finding("ladder", UNTOLD, None, f"{_CANNOT}: {answer}", log.first("running"))
    else:
        more = log.running > top
        answer += f"{seen or UNKNOWN}" + f"; {top + 1}-{log.running} would run eager" * more
        change = reason.advice * more
        yield Finding("ladder", FINE, False, f"not above: {answer}", log.first("running"), change)


def _phases(log: ServerLog) -> Iterator[Finding]:
    """Draft forwards and draft extend; rank 0 alone logs their captures."""
    told, reason = log.arguments, RejectReason.BACKEND_NOT_GRAPHED
    named = {phase: (r, line) for (phase, r), line in log.eager.items()}
    phases = {
        phase: one.end
        for (rank, phase, _), one in log.captures.items()
        if one.end and (re.search(r"\bTP0\b", rank) or "TP" not in rank)
    }
    judged = log.decodes and told.get("speculative_algorithm") in ("EAGLE", "EAGLE3")
    wanted = [Phase.DRAFT] * (told.get("speculative_num_steps") != "1") + [Phase.DRAFT_EXTEND]
    for phase in wanted:
        if phase.value in named:
            name, line = named[phase.value]
            yield Finding(phase.value, name, True, "it ran eager", (line,), _advice(name))
        elif phase in phases:
            yield Finding(phase.value, FINE, False, "captured", (phases[phase],))
        elif judged and Phase.VERIFY in phases:
            answer = (
                f"no graph of {phase.value} was captured on attention backend "
                f"{told.get('attention_backend', UNKNOWN)}: it runs eager in every round, "
                "whatever the decode lines say, which speak of verify alone"
            )
            proof, sure = (phases[Phase.VERIFY],), not log.torn
            answer = answer if sure else f"{_CANNOT}: lines of a capture may be lost"
            yield Finding(phase.value, reason.value, sure or None, answer, proof, reason.advice)


def _acceptance(log: ServerLog, costs: CostTable | None) -> Iterator[Finding]:
    rounds = sum(one.told for one in log.decodes.values())
    if not rounds:
        return
    proof, policy = log.first("accept"), dict[int, Estimate]()
    mean = sum(one.accepted for one in log.decodes.values()) / rounds
    answer, several = f"{mean:.2f} over {rounds} logged rounds", log.built or len(log.widths) > 1
    try:
        if log.report:
            known, policy = of_server({"internal_states": [{"verify_graphs": log.report}]})
            costs = costs or known
    except CostsError:
        pass  # one step count, or nothing measured yet
    try:
        policy.pop(0, None)
        if policy:
            mean = policy[max(policy)].value
        elif several:
            raise CostsError(
                "draft_steps change from round to round; add an answer of /server_info"
            )
        if mean < _HARDLY and rounds >= _FEW:
            yield Finding(
                "accept length", "DRAFT_ACCEPTS_NOTHING", True, answer, proof,
                "the draft does not fit the target; check --speculative-draft-model-path, and "
                "that EAGLE3 is the algorithm of an EAGLE-3 draft",
            )  # fmt: skip
            return
        if costs is None:
            raise CostsError("no round costs; give --costs, or an answer of /server_info")
        lines = list(_best(costs, policy) if policy else _against(log, costs))
        if not lines:
            raise CostsError("no costs of these batches and draft_steps")
    except CostsError as error:
        answer += f"; against break-even {_CANNOT}: {error}"
        yield Finding("accept length", UNTOLD, None, answer, proof)
        return
    losing = not policy and any(": losing" in line for line in lines)
    cause = "BELOW_BREAK_EVEN" if losing else FINE
    change = "fewer --speculative-num-steps, or none: see sglang-verify-graphs report"
    answer = "; ".join((answer, *lines[:_SEVERAL]))
    yield Finding("accept length", cause, losing, answer, proof, change * losing)


def _best(costs: CostTable, policy: dict[int, Estimate]) -> Iterator[str]:
    """What each batch earns at its best steps, which the plugin chooses by itself."""
    for at in report(costs, policy).batches:
        for row in at.steps:
            if row.draft_steps == at.best_steps:
                yield f"batch {at.batch}: best is {row.draft_steps} steps, {row.verdict}"


def _against(log: ServerLog, costs: CostTable) -> Iterator[str]:
    """What each batch earns at the configured steps."""
    known = {
        (row.batch, row.draft_steps): Estimate(row.ms, row.low_ms, row.high_ms)
        for row in costs.rows
    }
    steps = log.arguments.get("speculative_num_steps", "")
    for size, one in sorted(log.decodes.items()):
        bucket = min((b for b, k in known if str(k) == steps and b >= size), default=None)
        if bucket is None:
            continue
        plain = known.get((bucket, PLAIN_DECODE)) or known.get((bucket, 0))
        needed = break_even(known[bucket, int(steps)], plain)
        if needed and one.told >= _FEW:
            length = one.accepted / one.told
            said = verdict(needed, length)
            yield f"batch {size}: {length:.2f}, needed {needed.value:.2f}: {said}"


def _nccl(log: ServerLog) -> Iterator[Finding]:
    cause, problems = "NCCL_NOT_REACHED", log.proofs.get("nccl problem", ())
    for line in problems:
        answer = line.text.partition("NCCL: ")[2]
        change = "set it with --nccl-env, before the first communicator; see ranks"
        if "overridden by SGLang" in answer:
            change = "give --nccl-reapply, or leave out the flag under which SGLang sets it"
        yield Finding("NCCL", cause, True, answer, (line,), change)
    heard = {at: one for at, one in log.nccl.items() if one.communicators or one.read}
    version = next((one.version for one in heard.values() if one.version), None)
    ranks = judge([
        RankEvidence(
            rank, len(heard), f"{process.host}:{process.pid}", one.version or version, None, None,
            True, tuple(_variable(one, name) for name in {**one.read, **one.refused}), one,
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
    for what, text in sorted(faults)[:_SEVERAL]:
        text = re.sub(r"\branks? [\d, -]+ \(([^()]+)\)", r"\1", text)  # in order of the log alone
        proof = tuple(log.proofs.get(what, ()))[:2]
        change = "start every rank with the same NCCL_* values; see ranks"
        yield Finding("NCCL", cause, True, text, proof, change)
    if problems or faults:
        return
    if ranks:
        names = sorted({name for rank in ranks for name in rank.variables})
        answer = f"{len(ranks)} process(es) read {', '.join(names) or 'no variable'}"
        yield Finding("NCCL", FINE, False, answer, log.first(*names)[:1])
    elif proof := log.first("nccl"):
        yield Finding("NCCL", FINE, False, proof[0].text.partition("NCCL ")[2], proof)
    elif len(log.ranks) > 2:  # the launcher is one of them
        answer = f"{_CANNOT}: it holds no line of NCCL; start with NCCL_DEBUG=INFO"
        yield Finding("NCCL", UNTOLD, None, answer)


def _variable(one: NcclLog, name: str) -> Variable:
    value = one.read.get(name, UNKNOWN)
    return Variable(name, None, value, SHELL, value)


_JUDGES: tuple[Callable[[ServerLog], Iterator[Finding]], ...] = (
    _speculation, _died, _capture, _plugin, _replay, _ladder, _phases, _nccl,
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
        print(clean(f"error: {error}"), file=sys.stderr)
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
        print(*map(clean, _lines(found)), sep="\n")
    return int(any(f.wrong for f in found))


def _lines(found: list[Finding]) -> Iterator[str]:
    for one in found:
        mark = "!" if one.wrong else "?" if one.wrong is None else " "
        cause = "" if one.cause in (FINE, UNTOLD) else f"{one.cause}: "
        yield f"{mark} {one.question}: {cause}{one.answer}"
        yield from (f"      {line}" for line in one.proof)
        if one.change:
            yield f"    change: {one.change}"
