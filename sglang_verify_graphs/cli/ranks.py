"""``ranks``: what NCCL runs with on every rank of a server, and where ranks differ.

Everything a server sends is untrusted: it is bounded, checked for its shape, and printed without
control characters and without the values of secrets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from sglang_verify_graphs.buckets import format_ranges
from sglang_verify_graphs.errors import EvidenceError
from sglang_verify_graphs.nccl.compare import Mismatch, Place, mismatches, places, show, where
from sglang_verify_graphs.nccl.evidence import decode
from sglang_verify_graphs.nccl.status import RankStatus, hide

_KEY = "SGLANG_API_KEY"
_SECONDS, _BYTES = 30, 32 << 20
"""Bounds of an answer."""
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
    parser.add_argument(
        "url", type=_server, metavar="URL", help="for example http://127.0.0.1:30000"
    )
    parser.add_argument(
        "--api-key", help=f"the server's --api-key (default: the environment variable {_KEY})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        groups = groups_of(fetch(arguments.url, arguments.api_key or os.environ.get(_KEY)))
    except EvidenceError as error:
        print(_clean(f"error: {error}"), file=sys.stderr)
        return 2
    found = mismatches(groups)
    if arguments.json:
        ranks = [{"dp": at, **asdict(rank)} for at, ranks in enumerate(groups) for rank in ranks]
        print(json.dumps({"ranks": ranks, "mismatches": [asdict(m) for m in found]}, indent=2))
    else:
        print(*map(_clean, _lines(groups, found)), sep="\n")
    return 1 if found else 0


def _server(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        good = good and parts.username is None
    except ValueError:
        good = False
    if not good or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a server: http://HOST:PORT")
    return text.rstrip("/") + "/server_info"


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str, key: str | None) -> object:
    """Parsed JSON from a server, which takes ``--api-key`` as a bearer token
    (srt/utils/auth.py, ``decide_request_auth``)."""
    if key and not (key.isascii() and key.isprintable()):
        raise EvidenceError("the API key is not printable ASCII; give the server's --api-key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline, body = monotonic() + _SECONDS, bytearray()
    try:
        request = Request(url, headers=headers)
        with build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            while chunk := answer.read1(65536):
                body += chunk
                if len(body) > _BYTES or monotonic() > deadline:
                    raise EvidenceError(
                        f"{url} sends more than {_BYTES >> 20} MiB or takes more than "
                        f"{_SECONDS} s; is it an SGLang server?"
                    )
        return json.loads(body)
    except HTTPError as error:
        advice = "give its --api-key" if error.code in (401, 403) else "is it an SGLang server?"
        raise EvidenceError(f"{url} answers {error.code}; {advice}") from None
    except (OSError, HTTPException) as error:
        raise EvidenceError(f"{url} does not answer ({error}); is the server up?") from None
    except (ValueError, RecursionError):
        raise EvidenceError(f"{url} does not answer JSON; is it an SGLang server?") from None


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


def _clean(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)
