"""Facts in the logs of SGLang servers: one pass over any number of bytes, in bounded memory.

Formats are those of SGLang 0.5.9 to 0.5.23; each stands beside its place under ``sglang/srt``. A
line that is damaged, cut or beyond what is kept is counted, and the reading goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import RawIOBase
from typing import Any, BinaryIO, NamedTuple, cast

from sglang_verify_graphs.gate import Phase
from sglang_verify_graphs.nccl.evidence import NcclLog, shown
from sglang_verify_graphs.nccl.log import Process, read_log

_LINE = 1 << 20
"""Bytes of a line; an answer of ``/server_info`` has some 100,000."""
_SHOWN, _KEPT, _RANKS, _BATCHES = 240, 16, 4096, 4096
"""Characters of a line that are shown, and distinct entries that are kept."""

# managers/scheduler.py, the prefix, and utils/common.py, configure_logger.
_HEAD = re.compile(
    rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{3})?((?: [A-Z_]{2,12}\d{1,6}){0,8})\] "
)
# managers/scheduler_metrics_mixin.py at 0.5.9; managers/scheduler_components/metrics_reporter.py.
_DECODE = re.compile(rb"Decode batch[^,]{0,24}, #running-req: (\d{1,7}), ")
_GRAPH = re.compile(rb"\b(?:cuda|cpu|npu|xpu|musa) graph: (True|False)\b")
_ACCEPT = re.compile(rb"\baccept len: (\d{1,6}\.\d{1,4}), ")
# model_executor/model_runner.py and cuda_graph_runner.py to 0.5.13;
# model_executor/model_runner_components/cuda_graph_setup.py; speculative/eagle_worker*.py.
_CAPTURE = re.compile(
    rb"Capture (target verify |target decode |draft decode |draft extend |draft |)"
    rb"(?:cuda|CUDA|cpu|CPU|NPU|npu|XPU|xpu) graph (begin|end|bs)\b(.*)"
)
_PHASES = {
    b"": Phase.VERIFY, b"target verify ": Phase.VERIFY, b"target decode ": Phase.VERIFY,
    b"draft ": Phase.DRAFT, b"draft decode ": Phase.DRAFT, b"draft extend ": Phase.DRAFT_EXTEND,
}  # fmt: skip
_WIDTH = re.compile(rb"num_tokens_per_(?:req|bs)=(\d{1,4})\b")
_LADDER = re.compile(rb"(?:bs=| )\[([\d, ]{1,65536})\]")
# entrypoints/engine.py: the repr of a dataclass, from 0.5.23 of a dictionary.
_ARGUMENT = re.compile(
    rb"\b(speculative_(?:algorithm|num_steps|num_draft_tokens|adaptive)|attention_backend|"
    rb"disable_cuda_graph(?:_padding)?|cuda_graph_max_bs|enable_dp_attention)'?[=:] ?'?(\w+)"
)
_DECODE_BACKEND = re.compile(rb"\bdecode'?[=:] ?\w*[({]'?backend'?[=:] ?'?(\w+)")
# managers/scheduler.py
_RUNNING = re.compile(rb"\bmax_running_requests=(\d{1,7}),")
# raised by the graph runners, so inside a traceback; speculative/eagle_worker_v2.py; plugins; and
# argparse, where the package is not installed.
_MARKS = {
    b"graph failed: ": "fault", b"Built adaptive runtime state": "built",
    b"general plugin: verify_graphs": "unloaded",
    b"unrecognized arguments: --enable-verify-graphs": "unloaded",
}  # fmt: skip
_ABOUT = (
    ("active on ", "active"), ("draft_steps  ", "active"), ("observing stock", "observe"),
    ("NCCL: ", "nccl problem"), ("NCCL ", "nccl"), ("MEMORY_BUDGET", "memory"), ("rank ", "ranks"),
    ("live control", "note"), ("only the configured", "note"), ("round costs ", "note"),
    ("0 draft steps", "note"), ("another library", "note"),
)  # fmt: skip
"""Beginnings of what the plugin says; anything else is why it is off."""
_NOTES = (" forwards so far ran eager", ": SGLang sets this one itself under ")
_OURS = b"[verify-graphs] "
_EAGER = re.compile(r"a (draft|verify|draft_extend) ran eager: ([A-Z_]{1,40})")
_ROW = re.compile(r" *(\d{1,3}) +(\d{1,6}) +(\d{1,7}) +(\S.*?) +[\d.]+ +[\d.]+ +-?[\d.]+")
_NCCL = re.compile(rb"NCCL (?:INFO|WARN) .{0,200}?\b(NCCL_[A-Z0-9_]{1,60})\b")


class Line(NamedTuple):
    """A line that proves something."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}"


@dataclass
class Capture:
    """The graphs of one phase and width on one rank."""

    begin: Line
    batches: tuple[int, ...] = ()
    """Empty where the log does not name them."""
    end: Line | None = None


@dataclass
class Decodes:
    """Logged decode rounds of one batch; the flag speaks of verify alone."""

    replayed: int = 0
    eager: int = 0
    replay: Line | None = None
    refusal: Line | None = None
    told: int = 0
    accepted: float = 0.0
    """Lines that name an accept length, and the sum of those."""


@dataclass
class ServerLog:
    """What the logs say; each table is bounded."""

    lines: int = 0
    unreadable: int = 0
    recognised: int = 0
    ranks: dict[str, None] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    running: int = 0
    """Most requests that a scheduler runs; 0 where it is not told."""
    captures: dict[tuple[str, Phase, int], Capture] = field(default_factory=dict)
    """By rank, phase and tokens of a request (0 where not told)."""
    decodes: dict[int, Decodes] = field(default_factory=dict)
    eager: dict[tuple[str, str], Line] = field(default_factory=dict)
    """Of the plugin, by phase and reason."""
    widths: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Of the plugin, by draft steps: the largest batch, and batches without a graph."""
    proofs: dict[str, list[Line]] = field(default_factory=dict)
    """First lines of each other kind."""
    report: dict[str, Any] | None = None
    """``verify_graphs`` of the last ``/server_info`` that stands in the logs."""
    nccl: dict[tuple[str, Process], NcclLog] = field(default_factory=dict)

    @property
    def ladder(self) -> list[int]:
        """Captured batches of verify, as far as they are told."""
        found = {b for key, c in self.captures.items() if key[1] is Phase.VERIFY for b in c.batches}
        return sorted(found | {top for top, _ in self.widths.values()})

    def first(self, *kinds: str) -> tuple[Line, ...]:
        """The first line of each of these kinds that there is."""
        return tuple(self.proofs[kind][0] for kind in kinds if kind in self.proofs)

    def add(self, line: bytes, file: str, number: int) -> None:
        """Take one line in; never raises."""
        self.lines += 1
        if not line.endswith(b"\n") and not line.startswith(b"{"):
            self.unreadable += 1  # cut, or too long
            return
        if b"\0" in line or (not line.isascii() and not _is_text(line)):
            self.unreadable += 1
            return
        head = _HEAD.search(line)
        if head is None:
            self._loose(line, "", file, number)
        while head is not None:  # another where two processes wrote into one line
            end = head.end()
            other = _HEAD.search(line, end) if line.find(b"[2", end) > 0 else None
            text = line[end : other.start() if other else None].rstrip()
            rank = head[1].decode().strip()
            if rank in self.ranks or len(self.ranks) < _RANKS:
                self.ranks[rank] = None
                reader = _READERS.get(text[:7], ServerLog._loose)
                reader(self, text, rank, file, number)
            else:
                self.unreadable += 1
            head = other

    def _decode(self, text: bytes, rank: str, file: str, number: int) -> None:
        batch, graph = _DECODE.match(text), _GRAPH.search(text)
        if batch is None or graph is None:
            self.unreadable += 1
            return
        self.recognised += 1
        size = int(batch[1])
        if (found := self.decodes.get(size)) is None:
            if len(self.decodes) == _BATCHES:
                self.unreadable += 1
                return
            found = self.decodes[size] = Decodes()
        if graph[1] == b"True":
            found.replayed += 1
            found.replay = found.replay or _shown(text, file, number)
        else:
            found.eager += 1
            found.refusal = found.refusal or _shown(text, file, number)
        if (accept := _ACCEPT.search(text)) and size:
            found.told += 1
            found.accepted += float(accept[1])
            self._prove("accept", text, file, number)

    def _capture(self, text: bytes, rank: str, file: str, number: int) -> None:
        found = _CAPTURE.match(text)
        if found is None:
            self._loose(text, rank, file, number)
            return
        self.recognised += 1
        phase, width = _PHASES[found[1]], _WIDTH.search(found[3])
        ladder = _LADDER.search(found[3])
        batches = tuple(int(n) for n in ladder[1].split(b",") if n.strip()) if ladder else ()
        if found[2] == b"begin":
            key = rank, phase, int(width[1]) if width else 0
            if key in self.captures or len(self.captures) < 4 * _RANKS:
                self.captures.pop(key, None)  # last again
                self.captures[key] = Capture(_shown(text, file, number), batches)
            return
        for (owner, what, _), capture in reversed(self.captures.items()):
            if owner == rank and what is phase and capture.end is None:
                capture.batches = batches or capture.batches
                if found[2] == b"end":
                    capture.end = _shown(text, file, number)
                return

    def _arguments(self, text: bytes, rank: str, file: str, number: int) -> None:
        if not text.startswith(b"server_args="):
            return
        self.recognised += 1
        told = {k.decode(): v.decode() for k, v in _ARGUMENT.findall(text)}
        if backend := _DECODE_BACKEND.search(text):
            told["decode graphs"] = backend[1].decode()
        self.arguments |= told
        words = ", ".join(f"{k}={v}" for k, v in told.items())
        self._prove("arguments", f"server_args: {words}".encode(), file, number)  # it holds keys

    def _limits(self, text: bytes, rank: str, file: str, number: int) -> None:
        if found := _RUNNING.search(text):
            self.recognised += 1
            self.running = max(self.running, int(found[1]))
            self._prove("running", text, file, number)

    def _plugin(self, text: bytes, rank: str, file: str, number: int) -> None:
        self.recognised += 1
        said = text[len(_OURS) :].decode(errors="replace")
        if found := _EAGER.match(said):
            if len(self.eager) < _BATCHES:
                self.eager.setdefault((found[1], found[2]), _shown(text, file, number))
        elif found := _ROW.fullmatch(said):
            self.widths[int(found[1])] = int(found[3]), found[4]
            self._prove("active", text, file, number)
        else:
            kind = next((kind for start, kind in _ABOUT if said.startswith(start)), "off")
            note = any(words in said for words in _NOTES)
            self._prove("note" if note else kind, text, file, number)

    def _loose(self, text: bytes, rank: str, file: str, number: int) -> None:
        """A line without a head of its own: of a traceback, of NCCL, or an answer of a server."""
        if (at := text.find(_OURS)) >= 0:
            self._plugin(text[at:].rstrip(), rank, file, number)
        elif text.startswith(b"{"):
            self._answer(text, file, number)
        elif b"NCCL " in text:
            found = _NCCL.search(text)
            self.recognised += 1
            if found and shown(name := found[1].decode(), "") == "":
                self._prove(name, text, file, number)
        else:
            for mark, kind in _MARKS.items():
                if mark in text:
                    self.recognised += 1
                    self._prove(kind, text, file, number)

    def _answer(self, text: bytes, file: str, number: int) -> None:
        if b'"verify_graphs"' not in text:
            return
        try:
            found = json.loads(text)["internal_states"][0]["verify_graphs"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            self.unreadable += 1
            return
        if isinstance(found, dict):
            self.recognised += 1
            self.report = found
            self.proofs["report"] = [Line(file, number, "the answer of /server_info")]

    def _prove(self, kind: str, text: bytes, file: str, number: int) -> None:
        kept = self.proofs.setdefault(kind, []) if len(self.proofs) < _BATCHES else []
        if len(kept) < _KEPT:
            kept.append(_shown(text, file, number))


_READERS: dict[bytes, Callable[[ServerLog, bytes, str, str, int], None]] = {
    b"Decode ": ServerLog._decode,
    b"Capture": ServerLog._capture,
    b"server_": ServerLog._arguments,
    b"max_tot": ServerLog._limits,
    _OURS[:7]: ServerLog._plugin,
}


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(text: bytes, file: str, number: int) -> Line:
    return Line(file, number, text[: 4 * _SHOWN].decode(errors="replace").strip()[:_SHOWN])


class _NcclLines(RawIOBase):
    """The lines of NCCL, while every line goes to the reader of the server's."""

    def __init__(self, log: ServerLog, stream: BinaryIO, file: str) -> None:
        self._lines = self._split(log, stream, file)

    @staticmethod
    def _split(log: ServerLog, stream: BinaryIO, file: str) -> Iterator[bytes]:
        number = 0
        while line := stream.readline(_LINE):
            number += 1
            log.add(line, file, number)
            if b"NCCL " in line and len(line) < _LINE:
                yield line
            while len(line) == _LINE and not line.endswith(b"\n"):
                line = stream.readline(_LINE)

    def readline(self, size: int | None = -1) -> bytes:
        return next(self._lines, b"")


def read_server_log(log: ServerLog, stream: BinaryIO, file: str) -> None:
    """Add everything that one file says."""
    found = read_log(cast(BinaryIO, _NcclLines(log, stream, file)))
    log.nccl |= {(file, process): said for process, said in found.items()}
