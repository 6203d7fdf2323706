"""What NCCL says in its log (``NCCL_DEBUG=INFO``, subsystems ENV, INIT, GRAPH, TUNING).

The formats are those of NCCL 2.27 to 2.30; each stands beside its place in NVIDIA/nccl at
v2.27.3-1. A log may hold several processes, be cut, or be full of anything: it is read in one pass
in bounded memory, and what cannot be read is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple, TypeVar

from sglang_verify_graphs.nccl.evidence import Choice, NcclLog

_LINE = 4096
"""Bytes of a line that are looked at; NCCL formats into 1,024 (src/debug.cc:309)."""
_PROCESSES, _VARIABLES, _CHOICES, _TRANSPORTS = 256, 512, 4096, 64
"""Distinct entries that are kept."""

_K = TypeVar("_K")
_V = TypeVar("_V")

# src/debug.cc:352-366; a WARN has its place in the source between the device and the level.
_ORIGIN = re.compile(
    r"(?:^|\s)([^\s:]+):(\d{1,10}):\d{1,10} \[-?\d{1,10}\] "
    r"(?:\S+ (?:\(\S*\) )?)?NCCL (?:INFO|WARN) "
)
_NAME = r"(NCCL_[A-Z0-9_]+)"
# "X set by environment to V" in src/graph/tuning.cc:398 and 403 and others, with a full stop where
# V is a number (src/misc/param.cc:87); "X set to V" in src/bootstrap.cc:492; the others override
# the configuration of a communicator: 2.28 and later, src/init.cc:1654-1755 at v2.28.9-1.
_READ = re.compile(
    rf"{_NAME} set (?:by environment )?to (.*)"
    rf"|(?:Comm config \w+ reset to|Parsed environment variable|.* by) {_NAME}=(\S+).*"
)
# src/misc/param.cc:85, src/graph/tuning.cc:19-25, src/init.cc:474, 1524-1539; "is unused" is in
# src/param/c_api.cc:38 at v2.30.7-1.
_REFUSED = re.compile(
    r"^Invalid |^Unable to recognize |^No valid |invalid value| too (?:big|low)[.,]| is not valid,"
    r"|is being ignored|\. Ignoring$| is unused\."
)
_NAMED = re.compile(rf"(?:Invalid value .* for )?\b{_NAME}\b")
# src/graph/connect.cc:333 and 349: the only refusals that do not name their variable.
_ASKED = re.compile(r"User asked for a (min|max)imum of -?\d+ channels, ")
# src/enqueue.cc:748; on rank 0 of a communicator alone (:747), also in 2.30 (:821 at v2.30.7-1).
_CHOICE = re.compile(
    r"(\w+): (\d{1,18}) Bytes -> Algo (\w+) proto (\w+)"
    r" channel\{Lo\.\.Hi\}=\{(\d{1,5})\.\.(\d{1,5})\}"
)
# src/enqueue.cc:1432; src/scheduler/symmetric_sched.cc:356 at v2.30.7-1 adds nWorks.
_SYMMETRIC = re.compile(
    r"(\w+) \[Symmetric\]: (\d{1,18}) Bytes -> Kernel (\S+) nchannels (\d{1,5}) nthreads \d+.*"
)
# src/ce_coll.cc:1431 and 1435 at v2.30.7-1.
_COPY = re.compile(r"(\w+) \[(?:Hierarchical CE|Copy Engine)\]: (\d{1,18}) Bytes -> (\S.*)")
# src/init.cc:1232
_CHANNELS = re.compile(r"(\d{1,5}) coll channels, ")
# src/transport/p2p.cc:386-406, shm.cc:128, net.cc:218 and 264.
_TRANSPORT = re.compile(
    r"Channel \d+(?:/\d+)? : \d+\[\d+\] -> \d+\[\d+\] (?:\[(?:send|receive)\] )?via (\S.*)"
)
# src/init.cc:538 and 543
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)\S*")
# src/init.cc:1464 and 1469
_COMPLETE = re.compile(r"\w+ comm \S+ rank \d+ nranks \d+ .* - Init COMPLETE")


class Process(NamedTuple):
    """Who wrote a line; NCCL cuts the host name at its first dot."""

    host: str
    pid: int


@dataclass
class _Reader:
    """What one process has said so far."""

    version: str | None = None
    read: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    choices: dict[Choice, None] = field(default_factory=dict)
    channels: int | None = None
    transports: dict[str, None] = field(default_factory=dict)
    communicators: int = 0
    unreadable: int = 0

    def add(self, message: str) -> None:
        if found := _READ.fullmatch(message):
            name, value = found[1] or found[3], found[2] if found[1] else found[4]
            self._keep(self.read, name, re.sub(r"^(-?\d+)\.$", r"\1", value), _VARIABLES)
        elif _REFUSED.search(message) and (found := _NAMED.search(message)):
            self._keep(self.refused, found[1], message, _VARIABLES)
        elif found := _ASKED.match(message):
            self._keep(self.refused, f"NCCL_{found[1].upper()}_NCHANNELS", message, _VARIABLES)
        elif " Bytes -> " in message:
            self._choose(message)
        elif found := _CHANNELS.match(message):
            self.channels = int(found[1])
        elif found := _TRANSPORT.fullmatch(message):
            self._keep(self.transports, found[1], None, _TRANSPORTS)
        elif found := _VERSION.fullmatch(message):
            self.version = found[1]
        elif _COMPLETE.fullmatch(message):
            self.communicators += 1

    def _choose(self, message: str) -> None:
        if found := _CHOICE.fullmatch(message):
            channels = int(found[6]) - int(found[5]) + 1
            choice = Choice(found[1], int(found[2]), found[3], found[4], channels)
        elif found := _SYMMETRIC.fullmatch(message):
            choice = Choice(found[1], int(found[2]), "Symmetric", found[3], int(found[4]))
        elif found := _COPY.fullmatch(message):
            choice = Choice(found[1], int(found[2]), "Copy Engine", found[3], 0)
        else:
            self.unreadable += 1
            return
        self._keep(self.choices, choice, None, _CHOICES)

    def _keep(self, table: dict[_K, _V], key: _K, value: _V, room: int) -> None:
        if key in table or len(table) < room:
            table[key] = value
        else:
            self.unreadable += 1

    def log(self, lost: int) -> NcclLog:
        return NcclLog(
            self.version, self.read, self.refused, tuple(self.choices), self.channels,
            tuple(self.transports), self.communicators, self.unreadable + lost,
        )  # fmt: skip


def read_log(stream: BinaryIO) -> dict[Process, NcclLog]:
    """What each process of a log said; damage that no process owns is counted with all of them."""
    readers: dict[Process, _Reader] = {}
    lost = 0
    for line in _lines(stream):
        if line is None:
            lost += 1
        elif origin := _ORIGIN.search(line):
            process, message = Process(origin[1], int(origin[2])), line[origin.end() :]
            full = process not in readers and len(readers) == _PROCESSES
            if full or _ORIGIN.search(message):
                lost += 1
            else:
                readers.setdefault(process, _Reader()).add(message)
    return {process: reader.log(lost) for process, reader in readers.items()}


def _lines(stream: BinaryIO) -> Iterator[str | None]:
    """Lines without their end; None for one that is too long, no text, or cut at the end."""
    while line := stream.readline(_LINE):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(_LINE)
        try:
            text = line.decode().rstrip("\r\n") if line.endswith(b"\n") else "\0"
        except UnicodeDecodeError:
            text = "\0"
        yield text if text.replace("\t", " ").isprintable() else None
