"""``report``: where speculation earns its rounds, batch by batch, and which step count earns most.

Costs come from a file that ``calibrate`` wrote or from a server, which knows its acceptance too.
Whatever either of them says is untrusted, and checked for its shape.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_verify_graphs.cli.client import add_key_to, clean, fetch, key_of
from sglang_verify_graphs.costs import (
    PLAIN_DECODE,
    CostKey,
    CostTable,
    break_even,
    read_costs,
    verdict,
)
from sglang_verify_graphs.errors import CostsError, EvidenceError
from sglang_verify_graphs.estimate import Estimate

PLAIN, OWN = "plain decode", "own rounds of 0 steps"
Lengths = Mapping[int, Estimate]
"""Accept length of each step count, as far as it is known."""
_PROFILES = 200
"""Acceptances from none to all, searched for the step counts that can earn most."""


@dataclass(frozen=True)
class StepRow:
    """One step count in one batch."""

    draft_steps: int
    round_ms: Estimate
    break_even: Estimate | None
    accept_length: Estimate | None
    verdict: str


@dataclass(frozen=True)
class BatchReport:
    """One bucket batch; ``against`` says what its break-even compares with."""

    batch: int
    against: str | None
    best_steps: int | None
    steps: tuple[StepRow, ...]


@dataclass(frozen=True)
class CostReport:
    """All that is known of a server's rounds."""

    key: CostKey
    acceptance: str | None
    """``observed``, ``assumed`` or ``None``."""
    batches: tuple[BatchReport, ...]
    adaptive_config: dict[str, dict[str, list[int]]]


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "report",
        help="where speculation pays on your server, and how many draft steps pay most",
        description="Exit 0 with a report, 2 where the costs cannot be read.",
    )
    parser.add_argument("source", metavar="costs.json|URL", help="of calibrate, or of a server")
    parser.add_argument(
        "--accept-length", type=float, metavar="L",
        help="what if: this accept length at the most draft steps, each position accepted alike",
    )  # fmt: skip
    add_key_to(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNGs (extra [report])")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        source = arguments.source
        if source.startswith(("http://", "https://")):
            info = fetch(source.rstrip("/") + "/server_info", key_of(arguments))
            table, lengths = of_server(info)
        else:
            table, lengths = read_costs(Path(source)), {}
        found = report(table, lengths, arguments.accept_length)
        if arguments.plots is not None:
            from sglang_verify_graphs.cli.plots import write_plots

            write_plots(found, arguments.plots)
    except (CostsError, EvidenceError) as error:
        print(clean(f"error: {error}"), file=sys.stderr)
        return 2
    print(json.dumps(asdict(found), indent=2) if arguments.json else "\n".join(_lines(found)))
    return 0


def of_server(info: Any) -> tuple[CostTable, dict[int, Estimate]]:
    """Costs and acceptance in a ``/server_info``; of the first replica, where there are several."""
    try:
        mine = info["internal_states"][0]["verify_graphs"]
        policy = mine["policy"]
    except (KeyError, IndexError, TypeError):
        raise CostsError(
            "the server tells no round costs; start it with --enable-verify-graphs, active"
        ) from None
    if policy is None:
        raise CostsError("the server captured one step count and measures no costs; capture more")
    try:
        table = CostTable.from_json(json.dumps({"key": mine["cost_key"], "rows": policy["costs"]}))
        lengths = {
            int(steps): Estimate(*map(float, given))
            for steps, given in policy["accept_length"].items()
            if given is not None
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise CostsError("the server's policy has an unknown shape; use the same version") from None
    if not all(1 <= e.low <= e.value <= e.high <= k + 1 for k, e in lengths.items()):
        raise CostsError("the server's accept lengths are impossible; report it")
    return table, lengths


def report(table: CostTable, lengths: Lengths, assumed: float | None = None) -> CostReport:
    """Everything that these costs and accept lengths say."""
    costs: dict[int, dict[int, Estimate]] = {}
    for row in table.rows:
        estimate = Estimate(row.ms, row.low_ms, row.high_ms)
        costs.setdefault(row.batch, {})[row.draft_steps] = estimate
    if not costs:
        raise CostsError("no round cost is known yet; serve some requests, or calibrate")
    if assumed is not None:
        lengths = even_lengths(assumed, max(row.draft_steps for row in table.rows))
    batches = tuple(_batch(batch, costs[batch], lengths) for batch in sorted(costs))
    kind = "assumed" if assumed is not None else "observed" if any(lengths) else None
    return CostReport(table.key, kind, batches, _adaptive(batches))


def _batch(batch: int, costs: dict[int, Estimate], lengths: Lengths) -> BatchReport:
    plain, own = costs.get(PLAIN_DECODE), costs.get(0)
    decode = plain or own
    rounds = {k: costs[k] for k in sorted(costs) if k != PLAIN_DECODE}
    best = best_steps({k: ms.value for k, ms in rounds.items()}, lengths)
    rows = []
    for steps, ms in rounds.items():
        length = lengths.get(steps) if steps else Estimate(1.0, 1.0, 1.0)
        needed = break_even(ms, decode)
        said = verdict(needed, length, None if best == steps else best)
        if not steps and decode is own:
            said = "what the others are compared with"
        rows.append(StepRow(steps, ms, needed, length, said))
    against = PLAIN if plain else OWN if own else None
    return BatchReport(batch, against, best, tuple(rows))


def best_steps(rounds: Mapping[int, float], lengths: Lengths) -> int | None:
    """The step count that commits most tokens per second; ``None`` unless two can be compared."""
    rates = {
        steps: (lengths[steps].value if steps else 1.0) / ms
        for steps, ms in rounds.items()
        if not steps or steps in lengths
    }
    return max(rates, key=rates.__getitem__) if len(rates) > 1 else None


def even_lengths(length: float, widest: int) -> dict[int, Estimate]:
    """Accept length of every step count, if ``widest`` steps have this one and each position is
    accepted alike."""
    if not 1 <= length <= widest + 1 or widest < 1:
        raise CostsError(
            f"--accept-length {length}: {widest} draft steps have one of 1 to {max(widest, 0) + 1}"
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        below = sum(middle**i for i in range(widest + 1)) < length
        low, high = (middle, high) if below else (low, middle)
    sums = {k: math.fsum(high**i for i in range(k + 1)) for k in range(widest + 1)}
    return {k: Estimate(value, value, value) for k, value in sums.items()}


def _adaptive(batches: tuple[BatchReport, ...]) -> dict[str, dict[str, list[int]]]:
    """For ``--speculative-adaptive-config``: per batch the step counts worth a try.

    The best one where acceptance is known, else those that are best at some acceptance. Stock
    looks for the largest key that is not above the batch
    (srt/speculative/adaptive_spec_params.py, ``_find_closest_bs``), and our buckets hold batches
    down to the one below.
    """
    config: dict[str, dict[str, list[int]]] = {}
    first = 1
    for at in batches:
        rounds = {row.draft_steps: row.round_ms.value for row in at.steps}
        candidates = {at.best_steps} if at.best_steps is not None else worth_trying(rounds)
        if candidates:
            config[str(first)] = {"candidate_steps": sorted(candidates)}
        first = at.batch + 1
    return config


def worth_trying(rounds: Mapping[int, float]) -> set[int]:
    """Step counts that are best at some acceptance, each position accepted alike."""
    widest = max(rounds, default=0)
    if widest < 1:
        return set(rounds)
    found = set()
    for at in range(_PROFILES + 1):
        lengths = even_lengths(1 + at * widest / _PROFILES, widest)
        best = best_steps(rounds, lengths)
        found.add(widest if best is None else best)
    return found


def _lines(found: CostReport) -> Iterator[str]:
    key = found.key
    yield f"{key.gpu}, tp {key.tp_size}, SGLang {key.sglang_version}, {key.attention_backend}"
    yield f"accept length: {found.acceptance or 'unknown; a server tells it, or --accept-length'}"
    titles = ("batch", "steps", "round ms", "break-even", "accept length", "best", "verdict")
    table = [titles]
    for at in found.batches:
        for row in at.steps:
            cells = (str(at.batch), str(row.draft_steps), _show(row.round_ms))
            lengths = (_show(row.break_even), _show(row.accept_length))
            mark = "*" * (row.draft_steps == at.best_steps)
            table.append((*cells, *lengths, mark, row.verdict))
    widths = [max(len(row[at]) for row in table) for at in range(len(titles))]
    for cells_of in table:
        yield "  ".join(f"{c:<{w}}" for c, w in zip(cells_of, widths, strict=True)).rstrip()
    for against in (PLAIN, OWN, None):
        batches = [str(at.batch) for at in found.batches if at.against == against]
        if batches:
            yield f"break-even against {against or 'unknown'}: batch {', '.join(batches)}"
    widest = max(
        (entry["candidate_steps"][-1] for entry in found.adaptive_config.values()), default=0
    )
    if not widest:
        yield "no drafts pay in any batch: stock serves best without --speculative-algorithm"
        return
    yield "for stock, in a file named by --speculative-adaptive-config:"
    yield json.dumps(found.adaptive_config)
    yield f"start it with --speculative-num-steps {widest} --speculative-eagle-topk 1"


def _show(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    value, low, high = estimate
    return f"{value:.2f}" if low == high else f"{value:.2f} [{low:.2f}, {high:.2f}]"
