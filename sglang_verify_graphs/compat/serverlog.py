"""Facts in the logs of an SGLang server: one pass over any number of bytes, in bounded memory.

Formats are those of SGLang 0.5.9 to 0.5.23; each stands beside its place under ``sglang/srt``. A
line that is damaged, cut or beyond what is kept is counted, and the reading goes on. Where a file
holds several starts of a server, the last one is told.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from io import RawIOBase
from typing import Any, BinaryIO, NamedTuple, cast

from sglang_verify_graphs.gate import Phase, RejectReason
from sglang_verify_graphs.nccl.evidence import NcclLog, shown
from sglang_verify_graphs.nccl.log import Process, read_log

_LINE = 1 << 20
"""Bytes of a line; an answer of ``/server_info`` has some 100,000."""
_SHOWN, _KEPT, _RANKS, _CAPTURES, _NAMES = 480, 16, 1024, 2048, 1024
"""Characters of a line that are shown, and distinct entries that are kept."""

# managers/scheduler.py, the prefix, and utils/common.py, configure_logger.
_HEAD = re.compile(
    rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{3})?((?: [A-Z_]{2,12}\d{1,6}){0,8})\] "
)
# managers/scheduler_metrics_mixin.py at 0.5.9, observability/scheduler_metrics_mixin.py to 0.5.12;
# managers/scheduler_components/metrics_reporter.py.
_DECODE = re.compile(rb"Decode batch[^,]{0,24}, #running-req: (\d{1,7}), ")
_GRAPH = re.compile(rb"\b(?:cuda|cpu|npu|xpu|musa) graph: (True|False)\b")
_ACCEPT = re.compile(rb"\baccept len: (\d{1,6}\.\d{1,4}), ")
# model_executor/model_runner.py and cuda_graph_runner.py to 0.5.15;
# model_executor/model_runner_components/cuda_graph_setup.py; speculative/eagle_worker*.py.
_CAPTURE = re.compile(
    rb"Capture (target verify |target decode |draft decode |draft extend |draft |)"
    rb"(?:cuda|CUDA|cpu|CPU|NPU|npu|XPU|xpu) graph (begin|end|bs)\b(.*)"
)
_PHASES = {
    b"": Phase.VERIFY, b"target verify ": Phase.VERIFY, b"target decode ": Phase.VERIFY,
    b"draft ": Phase.DRAFT, b"draft decode ": Phase.DRAFT, b"draft extend ": Phase.DRAFT_EXTEND,
}  # fmt: skip
_PHASE_NAMES = {phase.value for phase in Phase}
_WIDTH = re.compile(rb"num_tokens_per_(?:req|bs)=(\d{1,4})\b")
_LADDER = re.compile(rb"(?:bs=| )\[(\d{1,7}(?:, \d{1,7}){0,999})\]")
# entrypoints/engine.py: the repr of a dataclass, from 0.5.20 of a dictionary.
_ARGUMENT = re.compile(
    rb"\b(speculative_(?:algorithm|num_steps|num_draft_tokens|adaptive)|attention_backend|"
    rb"disable_cuda_graph(?:_padding)?|enable_dp_attention)'?[=:] ?'?(\w{1,40})"
)
_DECODE_BACKEND = re.compile(rb"\bdecode'?[=:] ?\w*[({]'?backend'?[=:] ?'?(\w{1,40})")
# managers/scheduler.py
_RUNNING = re.compile(rb"\bmax_running_requests=(\d{1,7}),")
# utils/request_logger.py: what users wrote, which says nothing of the server.
_REQUEST = (b"Receive: obj=", b"Finish: obj=")
# A traceback: managers/scheduler.py, its frames in the graph runners, and its last line.
_DIED = b"Scheduler hit an exception: "
_FRAME = re.compile(rb'  File ".*graph_runner\w*\.py", line \d+, in (?:__init__|_?capture)')
_ERROR = re.compile(rb"[\w.]{0,200}(?:Error|Exception): ")
_FAILED = (b" graph failed: ", b"CaptureError: ")
# speculative/adaptive_runtime_state.py
_BUILT = re.compile(rb"Built adaptive runtime state steps=(\d{1,3}):")
# plugins/__init__.py; argparse, where the package is not installed.
_UNLOADED = re.compile(
    rb"(?:Failed to (?:load plugin|execute general plugin:)|Skipping plugin) verify_graphs\b"
    rb"|\S+: error: unrecognized arguments: .*--enable-verify-graphs"
)
_UNKNOWN = b"error: unrecognized arguments: --enable-verify-graphs"
_OURS = b"[verify-graphs] "
_RAISED = re.compile(rb"(?:sglang_verify_graphs\.errors\.\w+: )?\[verify-graphs\] ")
_ABOUT = (
    ("active on ", "active"), ("draft_steps  ", "active"), ("observing stock", "observe"),
    ("NCCL: ", "nccl problem"), ("NCCL ", "nccl"), ("MEMORY_BUDGET", "memory"), ("rank ", "ranks"),
    ("live control", "note"), ("only the configured", "note"), ("round costs ", "note"),
    ("0 draft steps", "note"), ("another library", "note"),
)  # fmt: skip
"""Beginnings of what the plugin says; anything else is why it is off."""
_NOTES = (" forwards so far ran eager", ": SGLang sets this one itself under ")
_EAGER = re.compile(r"a (draft|verify|draft_extend) ran eager: ([A-Z_]{1,40})")
_ROW = re.compile(r" *(\d{1,3}) +(\d{1,6}) +(\d{1,7}) +(\S.{0,200}?) +[\d.]+ +[\d.]+ +-?[\d.]+")
_NCCL = re.compile(rb"NCCL_[A-Z0-9_]{0,60}")


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
    """What the logs of one server say; each table is bounded."""

    lines: int = 0
    unreadable: int = 0
    recognised: int = 0
    torn: int = 0
    """Unreadable lines from before the first round: what was captured may have stood there."""
    ranks: dict[str, bool] = field(default_factory=dict)
    """Whether the file tells the start of the server that the rank is of."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Of the file that came first."""
    running: int = 0
    """Most requests that a scheduler runs; 0 where it is not told."""
    captures: dict[tuple[str, Phase, int], Capture] = field(default_factory=dict)
    """By rank, phase and tokens of a request (0 where not told)."""
    ladder: set[int] = field(default_factory=set)
    """Captured batches of verify, as far as they are told."""
    built: dict[int, Line] = field(default_factory=dict)
    """Other draft steps for which states were built."""
    decodes: dict[int, Decodes] = field(default_factory=dict)
    eager: dict[tuple[str, str], Line] = field(default_factory=dict)
    """Of the plugin, by phase and reason."""
    widths: dict[int, str] = field(default_factory=dict)
    """Of the plugin: batches without a graph, by draft steps."""
    proofs: dict[str, list[Line]] = field(default_factory=dict)
    """First lines of each other kind."""
    report: dict[str, Any] | None = None
    """``verify_graphs`` of the last ``/server_info`` that stands in the logs."""
    nccl: dict[tuple[str, Process], NcclLog] = field(default_factory=dict)

    def first(self, *kinds: str) -> tuple[Line, ...]:
        """The first line of each of these kinds that there is."""
        return tuple(self.proofs[kind][0] for kind in kinds if kind in self.proofs)


_COUNTS = ("lines", "unreadable", "recognised")


class _Reader(RawIOBase):
    """Reads one file into a log, and is a stream of its NCCL lines, of one start at a time."""

    def __init__(self, log: ServerLog, stream: BinaryIO, file: str) -> None:
        self.log, self._stream, self._file, self._number = log, stream, file, 0
        self._before, self._rank = pickle.dumps(log), ""
        self._open: dict[tuple[str, Phase], Capture] = {}
        self._told: set[int] = set()
        self._started = self._begun = self._serving = self._again = False
        self.ended = False

    def readline(self, size: int | None = -1) -> bytes:
        while line := self._stream.readline(_LINE):
            self._number += 1
            self._add(line)
            while len(line) == _LINE and not line.endswith(b"\n"):
                line = self._stream.readline(_LINE)
            if self._again:
                self._again = False
                return b""
            if b"NCCL " in line and not (b" -> " in line and self._repeats(line)):
                return line  # a choice or a connection is told for every message
        self.ended = True
        return b""

    def _repeats(self, line: bytes) -> bool:
        """Whether this was said before, as far back as is kept."""
        if len(self._told) == _NAMES:
            self._told.clear()
        before = len(self._told)
        self._told.add(hash(line))
        return len(self._told) == before

    def _add(self, line: bytes) -> None:
        self.log.lines += 1
        if not line.endswith(b"\n") and not line.startswith(b"{"):
            self._lost()  # cut, or too long
            return
        if b"\0" in line or (not line.isascii() and not _is_text(line)):
            self._lost()
            return
        head = _HEAD.search(line)
        if head is None:
            self._rank = ""
            self._loose(line)
        while head is not None:  # another where two processes wrote into one line
            end = head.end()
            if line.startswith(_REQUEST, end):
                return
            other = _HEAD.search(line, end) if line.find(b"[2", end) > 0 else None
            text = line[end : other.start() if other else None].rstrip()
            self._rank = head[1].decode().strip()
            if self._rank in self.log.ranks or len(self.log.ranks) < _RANKS:
                self.log.ranks[self._rank] = self._started or self.log.ranks.get(self._rank, False)
                _READERS.get(text[:7], _Reader._loose)(self, text)
            else:
                self._lost()
            head = other

    def _lost(self) -> None:
        self.log.unreadable += 1
        self.log.torn += not self._serving

    def _decode(self, text: bytes) -> None:
        batch, graph = _DECODE.match(text), _GRAPH.search(text)
        if batch is None or graph is None:
            self._lost()
            return
        self.log.recognised += 1
        self._begun = self._serving = True
        size = int(batch[1])
        if (found := self.log.decodes.get(size)) is None:
            if len(self.log.decodes) == _NAMES:
                self._lost()
                return
            found = self.log.decodes[size] = Decodes()
        if graph[1] == b"True":
            found.replayed += 1
            found.replay = found.replay or self._shown(text)
        else:
            found.eager += 1
            found.refusal = found.refusal or self._shown(text)
        if (accept := _ACCEPT.search(text)) and size:
            found.told += 1
            found.accepted += float(accept[1])
            self._prove("accept", text)

    def _capture(self, text: bytes) -> None:
        found = _CAPTURE.match(text)
        if found is None:
            return
        self.log.recognised += 1
        self._begun = True
        at = self._rank, _PHASES[found[1]]
        width, ladder = _WIDTH.search(found[3]), _LADDER.search(found[3])
        batches = tuple(map(int, ladder[1].split(b","))) if ladder else ()
        if found[2] == b"begin" or at not in self._open:
            key = *at, int(width[1]) if width else 0
            if key not in self.log.captures and len(self.log.captures) == _CAPTURES:
                self._lost()
                return
            self.log.captures[key] = self._open[at] = Capture(self._shown(text), batches)
        capture = self._open[at]
        capture.batches = batches or capture.batches
        if found[2] == b"end":
            capture.end = self._shown(text)
            del self._open[at]
            if at[1] is Phase.VERIFY:
                self._captured(capture.batches)

    def _captured(self, batches: tuple[int, ...]) -> None:
        if len(self.log.ladder) < _NAMES:
            self.log.ladder |= set(batches) - {0}

    def _arguments(self, text: bytes) -> None:
        if not text.startswith(b"server_args="):
            return
        if self._begun:
            before = vars(pickle.loads(self._before))
            self.log.__dict__ |= {k: v for k, v in before.items() if k not in _COUNTS}
            self._open.clear()
            self._begun, self._serving, self._again = False, False, True
        self._started = True
        self.log.recognised += 1
        told = {k.decode(): v.decode() for k, v in _ARGUMENT.findall(text)}
        if backend := _DECODE_BACKEND.search(text):
            told["decode graphs"] = backend[1].decode()
        self.log.arguments = told | self.log.arguments
        words = ", ".join(f"{k}={v}" for k, v in told.items())
        self._prove("arguments", f"server_args: {words}".encode())  # the line itself holds keys

    def _limits(self, text: bytes) -> None:
        if found := _RUNNING.search(text):
            self.log.recognised += 1
            self.log.running = max(self.log.running, int(found[1]))
            self._prove("running", text)

    def _plugin(self, text: bytes) -> None:
        self.log.recognised += 1
        said = text[text.find(_OURS) + len(_OURS) :].decode(errors="replace")
        if found := _EAGER.match(said):
            if len(self.log.eager) < _NAMES:
                self.log.eager.setdefault((found[1], found[2]), self._shown(text))
        elif found := _ROW.fullmatch(said):
            self.log.widths[int(found[1])] = found[4]
            self._captured((int(found[3]),))
        else:
            kind = next((kind for start, kind in _ABOUT if said.startswith(start)), "off")
            note = any(words in said for words in _NOTES)
            self._prove("note" if note else kind, text)

    def _loose(self, text: bytes) -> None:
        """A line without a head of its own: of a traceback, of NCCL, or an answer of a server."""
        if _RAISED.match(text):
            self._plugin(text.rstrip())
        elif text.startswith(b"{"):
            self._answer(text)
        elif b"NCCL " in text:
            self.log.recognised += 1
            said = text[text.find(b"NCCL ") :]
            if b"NCCL_" in said and not self._repeats(said):
                name = _NCCL.findall(said)[0].decode()
                if shown(name, "") == "":
                    self._prove(name, said)
        elif text.startswith(_DIED):
            self.log.recognised += 1
            self._begun = True
            self._prove("died", text)
        elif "died" in self.log.proofs and (found := _ERROR.match(text) or _FRAME.match(text)):
            failed = found.re is _FRAME or any(words in text for words in _FAILED)
            self._prove("failed" if failed else "error", text)
        elif (found := _BUILT.match(text)) and len(self.log.built) < _NAMES:
            self.log.built[int(found[1])] = self._shown(text)
        elif found := _UNLOADED.match(text):
            self.log.recognised += 1
            other = b"arguments" in found[0]  # of which some may be secret
            self._prove("unloaded", _UNKNOWN if other else text)

    def _answer(self, text: bytes) -> None:
        if b'"verify_graphs"' not in text:
            return
        try:
            found = json.loads(text)["internal_states"][0]["verify_graphs"]
            for phase, counts in found.get("phases", {}).items():
                for reason in counts["reasons"].keys() & RejectReason.__members__:
                    line = self._shown(f"/server_info: {reason} in {phase}".encode())
                    if phase in _PHASE_NAMES:
                        self.log.eager.setdefault((phase, reason), line)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._lost()
            return
        self.log.recognised += 1
        self.log.report = found

    def _prove(self, kind: str, text: bytes) -> None:
        """Keep the line, unless another says the same."""
        if kind not in self.log.proofs and len(self.log.proofs) == _NAMES:
            return
        kept = self.log.proofs.setdefault(kind, [])
        if len(kept) < _KEPT and (kind != "accept" or not kept):
            line = self._shown(text)
            if all(line.text != other.text for other in kept):
                kept.append(line)

    def _shown(self, text: bytes) -> Line:
        words = text[: 4 * _SHOWN].decode(errors="replace").strip()
        return Line(self._file, self._number, words[:_SHOWN])


_READERS: dict[bytes, Callable[[_Reader, bytes], None]] = {
    b"Decode ": _Reader._decode,
    b"Capture": _Reader._capture,
    b"server_": _Reader._arguments,
    b"max_tot": _Reader._limits,
    _OURS[:7]: _Reader._plugin,
}


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_server_log(log: ServerLog, stream: BinaryIO, file: str) -> None:
    """Add everything that one file says."""
    reader = _Reader(log, stream, file)
    while not reader.ended:
        found = read_log(cast(BinaryIO, reader))
    log.nccl |= {(file, process): said for process, said in found.items()}
