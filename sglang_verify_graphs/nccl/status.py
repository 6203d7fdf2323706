"""What became of every NCCL variable on every rank.

A status claims no more than its evidence. *In use* needs a line of NCCL's TUNING subsystem for a
message that NCCL carries at all, or one of its connections or channels where these show the
variable; of a rank without a log nothing is known. Places are those in NVIDIA/nccl at v2.27.3-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_verify_graphs.nccl.evidence import (
    HIDDEN,
    UNKNOWN,
    Bypass,
    Choice,
    NcclLog,
    RankEvidence,
    Variable,
    shown,
)

UNSET, REQUESTED, SET, READ, IN_USE = "not set", "requested", "set", "read by NCCL", "in use"
OVERRIDDEN, BYPASSED = "overridden by ", "bypassed by "
LATE = "set, ignored: communicator already up"

_SILENT = ("NCCL_DEBUG", "NCCL_CONF_FILE", "NCCL_WARN_ENABLE", "NCCL_NO_CACHE", "NCCL_SET_THREAD")
"""Beginnings of names that NCCL reads without a line (src/misc/param.cc:54, src/debug.cc:41-218;
``DEFINE_NCCL_PARAM`` at v2.30.7-1), as it does ``NCCL_NET`` (src/init.cc:1544)."""

_INSIDE = {"Symmetric": "NCCL's symmetric memory kernels", "Copy Engine": "copy engines"}
"""What NCCL itself chooses no algorithm or protocol for."""


@dataclass(frozen=True)
class VariableStatus:
    """One variable on one rank, judged."""

    requested: str | None
    effective: str | None
    source: str
    read_by_nccl: bool | str
    """True, False or ``unknown``: of the effective value."""
    in_use: bool | str
    """True, False or ``unknown``: of the requested value, or of the effective where none was."""
    status: str
    evidence: str


@dataclass(frozen=True)
class RankStatus:
    """One rank, judged: an entry of ``ranks`` in ``/server_info``."""

    rank: int
    world_size: int
    node: str
    variables: Mapping[str, VariableStatus]
    nccl_version: str | None
    library: str | None
    packaged_version: str | None
    problem: str = ""
    """Why the rest is missing."""


def judge(ranks: Sequence[RankEvidence]) -> tuple[RankStatus, ...]:
    """The status of every variable of ranks that share their communicators.

    Only rank 0 of a communicator prints its choices (src/enqueue.cc:747), so all ranks are judged
    by the choices of all: in one collective every rank runs the same kernel.
    """
    choices = tuple(dict.fromkeys(c for r in ranks if r.log for c in r.log.choices))
    return tuple(
        RankStatus(
            r.rank, r.world_size, r.node,
            {v.name: hide(v.name, _judge(v, r, choices)) for v in r.variables},
            r.nccl_version, r.library, r.packaged_version, r.problem,
        )
        for r in ranks
    )  # fmt: skip


def report(ranks: Iterable[RankStatus]) -> dict[str, Any]:
    """Plain data for ``/server_info``."""
    return {"ranks": [asdict(rank) for rank in ranks]}


def hide(name: str, found: VariableStatus) -> VariableStatus:
    """Without values where the name looks like that of a secret."""
    if shown(name, "") is not HIDDEN:
        return found
    requested, effective = shown(name, found.requested), shown(name, found.effective)
    return replace(found, requested=requested, effective=effective, evidence=HIDDEN)


def _judge(v: Variable, rank: RankEvidence, choices: Sequence[Choice]) -> VariableStatus:
    read, heard = _read(v, rank.log)
    status, in_use, evidence = _status(v, rank, choices, read, heard)
    if v.python != v.effective:
        evidence += f"; os.environ says {v.python or UNSET}, which NCCL does not see"
    if v.overwritten_by and v.requested == v.effective:
        evidence += f"; {v.overwritten_by} had replaced it, and it was set again"
    return VariableStatus(v.requested, v.effective, v.source, read, in_use, status, evidence)


def _read(v: Variable, log: NcclLog | None) -> tuple[bool | str, str | None]:
    """Whether NCCL read the effective value, and the value that it says it read."""
    if not v.name.startswith("NCCL_"):
        return False, None
    if log is None or not log.read or v.name == "NCCL_NET" or v.name.startswith(_SILENT):
        return UNKNOWN, None
    heard = log.read.get(v.name)
    return heard is not None and v.effective is not None and _same(heard, v.effective), heard


def _same(heard: str, effective: str) -> bool:
    """Whether NCCL's words may stand for this value; a number may be a name to it."""
    one, other = _number(heard), _number(effective)
    if one is None and other is None:
        return heard.casefold() == effective.casefold()
    return one is None or other is None or one == other


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def _status(
    v: Variable, rank: RankEvidence, choices: Sequence[Choice], read: bool | str, heard: str | None
) -> tuple[str, bool | str, str]:
    """The status, whether it is in use, and the evidence."""
    if v.effective is None:
        if v.requested is None:
            return UNSET, False, "nobody asked for it"
        before = "" if heard is None else f"; NCCL read {heard} before it was removed"
        return REQUESTED, False, f"{v.source} asked for it, the process does not have it{before}"
    if v.requested not in (None, v.effective):
        by = v.overwritten_by or "an unknown writer"
        return OVERRIDDEN + by, False, f"{v.source} asked for {v.requested}"
    if heard is not None and read is False:
        return LATE, False, f"NCCL read {heard} before"
    if v.late and read is not True:
        return LATE, False, "set after the first communicator, and NCCL reports no later reading"
    if not v.name.startswith("NCCL_"):
        return SET, UNKNOWN, "not a variable of NCCL"
    if rank.log is None:
        if rank.communicator_up:
            return UNKNOWN, UNKNOWN, "set before the first communicator; there is no log of NCCL"
        return SET, UNKNOWN, "no communicator is up yet"
    if v.name in rank.log.refused:
        return f"{OVERRIDDEN}NCCL", False, rank.log.refused[v.name]
    if read is False:
        return SET, False, "NCCL does not report reading it"
    if read is not True:
        return UNKNOWN, UNKNOWN, "NCCL's log does not tell whether it was read"
    status, in_use, evidence = _use(v.name, v.effective, rank, rank.log, choices)
    late = "; communicators from before do not follow it" if v.late else ""
    return status, in_use, f"NCCL read {heard}; {evidence}{late}"


def _use(
    name: str, value: str, rank: RankEvidence, log: NcclLog, choices: Sequence[Choice]
) -> tuple[str, bool | str, str]:
    """The same for a value that NCCL has read."""
    bypasses = (*rank.bypasses, *_inside(choices))
    governed = [c for c in choices if name not in _LISTS or _listed(name, value, c) is not None]
    carriers = {c: _carrier(c, bypasses) for c in governed}
    carried = [c for c in governed if carriers[c] is None]
    if governed and not carried:
        around = ", ".join(dict.fromkeys(str(b) for b in carriers.values()))
        return BYPASSED + around, False, "no message seen is left to NCCL's tuning"
    past = "".join(f"; past it: {b}" for b in bypasses)
    proof = _PROOFS.get(name)
    found = proof(value, log, carried) if proof else None
    if found is None:
        return READ, UNKNOWN, f"no line of its log would show more{past}"
    holds, line = found
    return (IN_USE if holds else READ), holds, line + past


def _inside(choices: Iterable[Choice]) -> Iterator[Bypass]:
    """Paths inside NCCL that no algorithm or protocol is chosen for, as far as they were seen."""
    largest: dict[tuple[str, str], int] = {}
    for c in choices:
        if c.algorithm in _INSIDE:
            key = _INSIDE[c.algorithm], c.collective
            largest[key] = max(c.bytes, largest.get(key, 0))
    for (path, collective), size in largest.items():
        yield Bypass(path, size + 1, collective)


def _carrier(c: Choice, bypasses: Iterable[Bypass]) -> Bypass | None:
    """What carries messages like this one past NCCL's tuning."""
    inside = _INSIDE.get(c.algorithm)
    for b in bypasses:
        applies = b.path == inside if inside else b.path not in _INSIDE.values()
        if applies and b.collective == c.collective and c.bytes < b.below_bytes:
            return b
    return None


def _listed(name: str, value: str, c: Choice) -> bool | None:
    """Whether a list such as ``allreduce:ring,tree`` or ``^LL128`` has this choice in it; None
    where it says nothing about the collective (``parseList``, src/graph/tuning.cc)."""
    chosen, verdict = getattr(c, _LISTS[name]).casefold().replace("_", ""), None
    for entry in value.split(";"):
        collective, colon, names = entry.rpartition(":")
        if not colon or collective.casefold() == c.collective.casefold():
            listed = names.removeprefix("^").casefold().split(",")
            verdict = (chosen in listed) is not names.startswith("^")
    return verdict


_LISTS = {"NCCL_ALGO": "algorithm", "NCCL_PROTO": "protocol"}

_Proof = Callable[[str, NcclLog, Sequence[Choice]], "tuple[bool, str] | None"]


def _list_proof(name: str) -> _Proof:
    def proof(value: str, _: NcclLog, carried: Sequence[Choice]) -> tuple[bool, str] | None:
        for c in carried:
            if not _listed(name, value, c):
                return False, f"yet it chose {c}"
        return (True, f"it chose {carried[-1]}") if carried else None

    return proof


def _most_channels(value: str, _: NcclLog, carried: Sequence[Choice]) -> tuple[bool, str] | None:
    widest = max(carried, key=lambda c: c.channels, default=None)
    limit = _number(value)
    if widest is None or limit is None:
        return None
    return widest.channels <= limit, f"its widest choice is {widest}"


def _least_channels(value: str, log: NcclLog, _: Sequence[Choice]) -> tuple[bool, str] | None:
    limit = _number(value)
    if log.channels is None or limit is None:
        return None
    return log.channels >= limit, f"its communicator has {log.channels} channels"


def _nvls(value: str, _: NcclLog, carried: Sequence[Choice]) -> tuple[bool, str] | None:
    if not carried:
        return None
    chosen = next((c for c in carried if c.algorithm.startswith("NVLS")), None)
    wanted = _number(value) != 0
    return (chosen is not None) is wanted, f"it chose {chosen or 'NVLS for no message'}"


def _cumem(value: str, log: NcclLog, _: Sequence[Choice]) -> tuple[bool, str] | None:
    for transport in log.transports:
        kind = transport.split("/")[1] if transport.startswith("P2P/") else ""
        if kind in ("CUMEM", "MNNVL", "IPC"):
            return (kind != "IPC") is (_number(value) != 0), f"peers are connected by {transport}"
    return None


def _without(kind: str) -> _Proof:
    def proof(value: str, log: NcclLog, _: Sequence[Choice]) -> tuple[bool, str] | None:
        if not log.transports or _number(value) != 1:
            return None
        kinds = ", ".join(log.transports)
        return f"{kind}/" not in kinds, f"peers are connected by {kinds}"

    return proof


_PROOFS: Mapping[str, _Proof] = {
    "NCCL_ALGO": _list_proof("NCCL_ALGO"),  # TUNING, src/enqueue.cc:748
    "NCCL_PROTO": _list_proof("NCCL_PROTO"),  # TUNING
    "NCCL_MAX_NCHANNELS": _most_channels,  # TUNING
    "NCCL_MIN_NCHANNELS": _least_channels,  # "coll channels", src/init.cc:1232
    "NCCL_NVLS_ENABLE": _nvls,  # TUNING
    "NCCL_CUMEM_ENABLE": _cumem,  # "via P2P/CUMEM" or "/IPC", src/transport/p2p.cc:386-398
    "NCCL_P2P_DISABLE": _without("P2P"),  # "via", as above
    "NCCL_SHM_DISABLE": _without("SHM"),  # "via", src/transport/shm.cc:128
}
"""What shows that NCCL follows a value; of every other variable its log tells the reading alone."""
