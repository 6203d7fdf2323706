"""``plan``: what a server would capture and what stock leaves eager, before any GPU is used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from sglang_verify_graphs.buckets import CapturePlan, format_ranges, plan_capture
from sglang_verify_graphs.compat.arguments import ServerParser, Unknown, facts_of, stock_ladder
from sglang_verify_graphs.compat.releases import resolve_release, sglang_version
from sglang_verify_graphs.controller import FIRST_GRAPH_GB
from sglang_verify_graphs.errors import SettingsError, UnsupportedError
from sglang_verify_graphs.settings import FLAG, Settings, add_arguments, settings_from_args
from sglang_verify_graphs.startup import Report, steps_to_capture


class Range(NamedTuple):
    """From the least to the most that was measured."""

    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.low:{spec}} to {self.high:{spec}}"


class Cost(NamedTuple):
    """Of one bucket with its draft and draft-extend graphs."""

    mib: Range
    ms: Range


MEASURED = {
    "fa3": (Cost(Range(10.6, 16.4), Range(115, 253)), Cost(Range(1.3, 5.7), Range(45, 109))),
    "triton": (Cost(Range(6.3, 21.6), Range(176, 351)), Cost(Range(1.6, 10.7), Range(66, 163))),
    "flashinfer": (Cost(Range(74, 75), Range(248, 302)), Cost(Range(35, 57), Range(65, 184))),
}
"""By attention backend: of the configured width, of a narrower one (benchmarks/results,
serve-h200: what the package reported of each width, 13 batches to 48 and 3 to 0 draft steps)."""
_SOURCE = (
    "GiB and seconds are estimates, measured on one H200, TP 1, batches to 48: a dense 8B shape of "
    "32 layers and a 135M model of 30 (flashinfer: the 135M alone); not told are other models "
    "(deeper ones take more), TP and GPUs, and kernels that a first start compiles (stock's took "
    "42 to 77 s there)"
)
_MODEL = "hybrid (mamba) and multi-layer MTP models are refused at start; no argument tells them"


@dataclass(frozen=True)
class Width:
    """The buckets of one draft step count."""

    draft_steps: int
    batches: tuple[int, ...]
    dropped: tuple[int, ...]
    uncovered: tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """What ``plan`` says; None is what it cannot tell."""

    sglang: str
    planned: bool = False
    reasons: tuple[str, ...] = ()
    max_running_requests: int | None = None
    stock: tuple[int, ...] | None = None
    stock_uncovered: tuple[int, ...] | None = None
    widths: tuple[Width, ...] = ()
    buckets: int = 0
    cost: dict[str, dict[str, Range]] = field(default_factory=dict)
    """``gib`` on each rank and ``seconds`` of all buckets, by attention backend."""
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        limit = self.max_running_requests
        yield f"SGLang {self.sglang}{f', {limit} running requests' * bool(limit)}"
        if self.stock is not None:
            yield f"stock captures batches: {format_ranges(self.stock) or 'none'}"
            yield f"stock verifies eager: {format_ranges(self.stock_uncovered or ()) or 'none'}"
        yield from self.reasons
        if self.widths:
            yield f"with {FLAG}: {self.buckets} buckets"
            yield "draft_steps  buckets  uncovered  batches"
        for w in self.widths:
            holes = format_ranges(w.uncovered) or "none"
            batches = format_ranges(w.batches) or "none"
            yield f"{w.draft_steps:>11}  {len(w.batches):>7}  {holes:>9}  {batches}"
        for backend, cost in self.cost.items():
            yield f"{backend}: {cost['gib']:.1f} GiB on each rank, {cost['seconds']:.0f} s"
        yield from (f"note: {note}" for note in self.notes)
        yield "planned" if self.planned else "off; stock behaviour stays"


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="what your server would capture, and which batches stock verifies eager",
        description="Reads server arguments, without a GPU and without importing SGLang: exit 0 "
        f"where {FLAG} would be active, 1 where it would be off, 2 on a bad argument.",
    )
    parser.add_argument("--sglang", metavar="X", help="release to plan for (default: installed)")
    parser.add_argument(
        "--gpu-memory-gb", type=float, metavar="G", help="GiB of one GPU, as nvidia-smi counts it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "server", nargs=argparse.REMAINDER, metavar="-- SERVER ARGUMENTS",
        help=f"of sglang.launch_server; {FLAG} is added",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    words = arguments.server[arguments.server[:1] == ["--"] :]
    try:
        found = predict(words, arguments.sglang or sglang_version(), arguments.gpu_memory_gb)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(*found.lines(), sep="\n")
    return 0 if found.planned else 1


def predict(words: list[str], sglang: str | None, gpu_gb: float | None = None) -> Prediction:
    """What a server with these arguments would capture."""
    if sglang is None:
        raise SettingsError("SGLang is not installed here; name a release with --sglang")
    if gpu_gb is not None and not 0 < gpu_gb < float("inf"):
        raise SettingsError(f"--gpu-memory-gb {gpu_gb}: it must be a number of GiB above 0")
    parser = ServerParser()
    add_arguments(parser)
    args, _ = parser.parse_known_args([*words, FLAG])
    settings = settings_from_args(args) or Settings()
    try:
        release = resolve_release(sglang, allow_untested=settings.allow_untested)
    except UnsupportedError as error:
        return Prediction(sglang, reasons=(str(error),))
    facts, report, found = facts_of(args, release), Report(), Prediction(sglang)
    plan_of = partial(
        plan_capture,
        max_batch=facts.max_running_requests,
        draft_tokens=0 if facts.topk == 1 else facts.draft_tokens,
        padding=facts.padding,
        alignment=facts.alignment,
    )
    notes: list[str] = []
    if facts.algorithm is not None:
        origin = "given" if args.max_running_requests else "SGLang's default with speculation"
        notes.append(f"running requests: {origin}; a small KV pool allows fewer")
        found = replace(found, max_running_requests=facts.max_running_requests)
        try:
            stock = stock_ladder(args, facts, release, gpu_gb)
            holes = plan_of([facts.draft_steps], ladder=stock).uncovered(facts.draft_steps)
            found = replace(found, stock=stock, stock_uncovered=holes)
        except Unknown as why:
            notes.append(f"stock's ladder is {why}")
    try:
        steps = steps_to_capture(facts, settings, report)
    except UnsupportedError as error:
        reasons = tuple(dict.fromkeys((str(error), *report.reasons)))
        return replace(found, reasons=reasons, notes=tuple(notes))
    found = replace(found, planned=True, reasons=tuple(report.reasons))
    if settings.observe:
        notes.append("observed only: SGLang captures its own ladder, and nothing is added")
        return replace(found, notes=tuple(notes))
    plan, backend = plan_of(steps, cap=settings.max_batch), args.attention_backend
    costs = {name: MEASURED[name] for name in MEASURED if backend in (name, None)}
    if not costs:
        notes.append(f"GiB and seconds are not known on {backend}: it was not measured")
    if settings.memory_gb is not None and found.stock:
        plan = _fit(plan, max(found.stock), settings.memory_gb, costs)
        notes.append("what the budget drops goes by real sizes; here all took the most measured")
    elif settings.memory_gb is not None:
        notes.append("the memory budget is left out: it pays for what is beyond stock's ladder")
    return replace(
        found,
        widths=tuple(
            Width(w.draft_steps, w.batches, w.dropped, plan.uncovered(w.draft_steps))
            for w in plan.widths
        ),
        buckets=sum(1 for _ in plan),
        cost={name: _total(plan, *cost) for name, cost in costs.items()},
        notes=(*notes, *[_SOURCE] * bool(costs), _MODEL),
    )


def _fit(
    plan: CapturePlan, stock_top: int, budget_gb: float, costs: dict[str, tuple[Cost, Cost]]
) -> CapturePlan:
    """As ``DraftStepsController`` fits widths, with the most that was measured for a graph."""
    configured, narrower = (
        max((cost[at].mib.high / 1024 for cost in costs.values()), default=FIRST_GRAPH_GB)
        for at in (0, 1)
    )
    first, *rest = plan.widths
    above = replace(first, batches=tuple(b for b in first.batches if b > stock_top))
    dropped = above.fit(int(budget_gb * 2**30), FIRST_GRAPH_GB * 2**30).dropped
    first = first.up_to(min(dropped, default=plan.max_batch + 1) - 1)
    widths, used = [first], 0.0
    for width in rest:
        size = narrower if used else configured
        free = int((budget_gb - used) * 2**30)
        width = width.up_to(max(first.batches)).fit(free, size * 2**30)
        used += len(width.batches) * narrower
        widths.append(width)
    return replace(plan, widths=tuple(widths))


def _total(plan: CapturePlan, configured: Cost, narrower: Cost) -> dict[str, Range]:
    count = len(plan.widths[0].batches)
    others = sum(1 for _ in plan) - count
    mib, ms = (
        [a * count + b * others for a, b in zip(first, other, strict=True)]
        for first, other in zip(configured, narrower, strict=True)
    )
    return {
        "gib": Range(*(round(value / 1024, 3) for value in mib)),
        "seconds": Range(*(round(value / 1000, 3) for value in ms)),
    }
