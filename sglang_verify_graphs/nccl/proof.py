"""Collects, on a live rank, what its NCCL variables came to, and has all ranks judged."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_verify_graphs.compat.facts import SchedulerFacts
from sglang_verify_graphs.compat.nccl import SGLANG_WRITES, NcclFacts, installed_version
from sglang_verify_graphs.nccl import native, reach
from sglang_verify_graphs.nccl.compare import mismatches
from sglang_verify_graphs.nccl.evidence import SGLANG, SHELL, NcclLog, RankEvidence, Variable
from sglang_verify_graphs.nccl.log import read_log
from sglang_verify_graphs.nccl.status import RankStatus, judge, report

logger = logging.getLogger("sglang_verify_graphs")


def prove(engine: SchedulerFacts, *, strict: bool) -> dict[str, Any]:
    """Exchange what every rank knows, judge it, say it in one line; what ``/server_info`` shows.

    There is no line where nobody asked for a variable and no two ranks talk through NCCL. Ranks
    that differ are an error line each, and the end of a strict start.
    """
    ranks = judge(engine.gather(collect(engine)))
    found = mismatches([ranks])
    problems = [one.text for one in found]
    if engine.tp_rank() == 0:
        for summary in _summary(ranks):
            logger.info("[verify-graphs] NCCL %s", summary)
        for problem in problems:
            logger.error("[verify-graphs] NCCL: %s", problem)
    if strict and (ends := [one.text for one in found if not one.start]):
        raise SystemExit(f"[verify-graphs] not started (--verify-graph-strict): {ends[0]}")
    return report(ranks) | {"problems": problems}


def _summary(ranks: Sequence[RankStatus]) -> Iterator[str]:
    first = ranks[0]
    asked = [
        f"{name}={one.effective} ({one.source}): {one.status}"
        for name, one in first.variables.items()
        if one.requested is not None
    ]
    if asked or (first.nccl_version and len(ranks) > 1):
        yield (
            f"{first.nccl_version or 'is not used'} on {len(ranks)} rank(s), of rank 0: "
            f"{'; '.join(asked) or 'no variable was asked for'}"
        )


def collect(engine: SchedulerFacts) -> RankEvidence:
    """What this rank knows; a failure is in it as its ``problem``, and never raised."""
    rank, size = engine.tp_rank(), engine.config("tp_size")
    nothing = RankEvidence(rank, size, socket.gethostname(), None, None, None, False)
    try:
        return _collect(nothing, NcclFacts(engine))
    except Exception as error:  # a server that can serve does not end for want of a proof
        return RankEvidence(
            rank, size, nothing.node, None, None, None, False,
            problem=f"{type(error).__name__}: {error}",
        )  # fmt: skip


def variables(
    state: reach.Worker, now: Mapping[str, str], python: Mapping[str, str]
) -> tuple[Variable, ...]:
    """Each variable that was asked for or is set, and where its value is from."""
    names = {*state.requested, *reach.nccl_variables(now), *(state.first or ())}
    found = []
    for name in sorted(names - ({*reach.DEBUG, reach.DEBUG_FILE} if state.log else set())):
        asked, value = state.requested.get(name), now.get(name)
        found.append(
            Variable(
                name,
                asked.value if asked else None,
                value,
                _source(name, state),
                python.get(name),
                late=state.first is not None and state.first.get(name) != value,
                overwritten_by=state.overwritten.get(name),
            )
        )
    return tuple(found)


def _collect(known: RankEvidence, facts: NcclFacts) -> RankEvidence:
    state, now = reach.worker, native.c_environment()
    libraries = native.nccl_libraries(os.environ)
    log = None
    if facts.communicator_up and state.log is not None:
        facts.probe()
        log = _read_log(state.log)
    packaged = installed_version()
    return RankEvidence(
        known.rank,
        known.world_size,
        known.node,
        native.library_version(libraries[0]) if libraries else None,
        ", ".join(libraries) or None,
        None if packaged is None else ".".join(map(str, packaged)),
        facts.communicator_up,
        variables(state, now, os.environ),
        log,
        facts.bypasses(),
    )


def _source(name: str, state: reach.Worker) -> str:
    if name in state.requested:
        return state.requested[name].source
    return SGLANG if name in SGLANG_WRITES else SHELL


def _read_log(path: Path) -> NcclLog | None:
    """What NCCL wrote on this rank, after it was told to write no more."""
    reach.stop_log()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        logs = read_log(stream)
        return next((log for process, log in logs.items() if process.pid == os.getpid()), None)
    return None
