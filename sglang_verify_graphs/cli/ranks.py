"""``ranks``: what NCCL runs with on every rank of a server, and where ranks differ.

Everything a server sends is untrusted: it is checked for its shape, and printed without control
characters and without the values of secrets.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from sglang_verify_graphs.buckets import format_ranges
from sglang_verify_graphs.cli.client import add_server_to, clean, fetch, key_of
from sglang_verify_graphs.errors import EvidenceError
from sglang_verify_graphs.nccl.compare import Mismatch, Place, mismatches, places, show, where
from sglang_verify_graphs.nccl.evidence import decode
from sglang_verify_graphs.nccl.status import RankStatus, hide

_WIDTH = 96
"""Characters of a cell; the last of a row, its evidence, has four times as many."""
_TITLES = ("", "node", "rank", "variable", "requested", "effective", "source", "status", "evidence")

_Groups = Sequence[Sequence[RankStatus]]


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "ranks",
        help="what NCCL runs with on every rank of a server, and where ranks differ",
        description="Reads /server_info of a server: exit 0 where all ranks agree and have what "
        "was asked for, 1 where one differs, is missing or has not, 2 where there is no answer.",
    )
    add_server_to(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        groups = groups_of(fetch(f"{arguments.url}/server_info", key_of(arguments)))
    except EvidenceError as error:
        print(clean(f"error: {error}"), file=sys.stderr)
        return 2
    found = mismatches(groups)
    if arguments.json:
        ranks = [{"dp": at, **asdict(rank)} for at, ranks in enumerate(groups) for rank in ranks]
        print(json.dumps({"ranks": ranks, "mismatches": [asdict(m) for m in found]}, indent=2))
    else:
        print(*map(clean, _lines(groups, found)), sep="\n")
    return 1 if found else 0


def groups_of(info: Any) -> list[tuple[RankStatus, ...]]:
    """The ranks in ``/server_info``, a group for each data-parallel replica that has its own."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    groups: list[tuple[RankStatus, ...]] = []
    for at, state in enumerate(states if isinstance(states, list) else ()):
        found = state
        for name in ("verify_graphs", "nccl", "ranks"):
            found = found.get(name) if isinstance(found, dict) else None
        if not found:
            raise EvidenceError(
                f"internal_states[{at}] of the server holds no verify_graphs.nccl.ranks; start it "
                "with sglang-verify-graphs installed and --enable-verify-graphs"
            )
        ranks = decode(tuple[RankStatus, ...], found, f"internal_states[{at}]")
        group = tuple(
            replace(r, variables={name: hide(name, v) for name, v in r.variables.items()})
            for r in ranks
        )
        if group not in groups:
            groups.append(group)
    if not groups:
        raise EvidenceError("the server has no internal_states; is it an SGLang server?")
    return groups


def _lines(groups: _Groups, found: Sequence[Mismatch]) -> Iterator[str]:
    ranks = places(groups)
    odd = {(place, m.what) for m in found for place in m.places}
    libraries: dict[str, list[Place]] = {}
    rows: dict[tuple[str, ...], list[int]] = {}
    for place, rank in ranks.items():
        text = "no NCCL is loaded"
        if rank.library is not None:
            text = f"NCCL {rank.nccl_version} ({rank.library}, installed {rank.packaged_version})"
        libraries.setdefault(text, []).append(place)
        for name, v in rank.variables.items():
            row: tuple[str, ...] = (
                "!" * ((place, name) in odd), place.group + place.node, name,
                "-" if v.requested is None else show(v.requested), show(v.effective),
                v.source, v.status, v.evidence,
            )  # fmt: skip
            rows.setdefault(row, []).append(rank.rank)
    for text, own in libraries.items():
        yield f"{text} on {where(own)}"
    table: list[tuple[str, ...]] = [_TITLES]
    table += [(*row[:2], format_ranges(numbers), *row[2:]) for row, numbers in rows.items()]
    widths = [min(_WIDTH, max(len(row[at]) for row in table)) for at in range(len(_TITLES) - 1)]
    for row in table:
        cells = (f"{cell[:w]:<{w}}" for cell, w in zip(row, widths, strict=False))
        yield "  ".join((*cells, row[-1][: 4 * _WIDTH])).rstrip()
    for mismatch in found:
        yield f"mismatch: {mismatch.text}"
    if not found:
        yield f"{len(ranks)} rank(s) agree and have what was asked for"
