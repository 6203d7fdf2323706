"""What `policy.py` concludes from the rounds that it saw: rows, oracle, ramp, verdicts. Pure.

Acceptance is forced, so what a round of ``k`` drafts commits on average is known. Speeds are
compared by that expectation over the measured time, which takes the luck of the draws out of it;
the tokens that were really committed stand beside it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

PROFILES = {
    "high": (0.9, 0.85, 0.8),
    "none": (0.05, 0.05, 0.05),
    "mid": (0.7, 0.6, 0.5),
    "low": (0.45, 0.3, 0.2),
}
"""Probability of each draft, given those before it; in the order in which cells meet them."""
NONE, OURS, ADAPTIVE, STATIC = "none", "verify-graphs", "stock-adaptive", "static-"
SKIP = 4
"""Rounds at the head of a segment that are not counted: what is set comes a round late."""
CELL = ("model", "prompt", "batch", "accept_profile")

Cell = tuple[Any, ...]
Row = dict[str, Any]


class Round(NamedTuple):
    ms: float
    """Between the commit of the round before and its own: what each request waits for tokens."""
    steps: int
    tokens: int


def accept_length(profile: str, steps: int) -> float:
    """Mean tokens of a round and request, the bonus token included."""
    found = PROFILES[profile][:steps]
    return 1 + sum(math.prod(found[: at + 1]) for at in range(len(found)))


def segments(log: Sequence[Sequence[int]], count: int, skip: int = SKIP) -> list[list[Round]]:
    """The engine's log by segment."""
    found: list[list[Round]] = [[] for _ in range(count)]
    for before, (segment, ns, steps, tokens) in pairwise(log):
        found[segment].append(Round((ns - before[1]) / 1e6, steps, tokens))
    return [rounds[max(skip - (at == 0), 0) :] for at, rounds in enumerate(found)]


def histogram(rounds: Iterable[Round]) -> dict[str, int]:
    return {str(steps): n for steps, n in sorted(Counter(r.steps for r in rounds).items())}


def speed(rounds: Sequence[Round], profile: str, batch: int) -> float:
    """Expected tokens per second."""
    tokens = batch * sum(accept_length(profile, r.steps) for r in rounds)
    return 1e3 * tokens / sum(r.ms for r in rounds)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def row(engine: str, cell: Cell, samples: Sequence[Sequence[Round]]) -> Row:
    """One engine in one cell, of the rounds of several segments."""
    *_, batch, profile = cell
    rounds = [one for sample in samples for one in sample]
    times = [one.ms for one in rounds]
    return {
        "engine": engine,
        **dict(zip(CELL, cell, strict=True)),
        "tok_s": round(1e3 * sum(one.tokens for one in rounds) / sum(times), 2),
        "expected_tok_s": round(speed(rounds, profile, batch), 2),
        "samples": [round(speed(sample, profile, batch), 2) for sample in samples],
        "itl_p50_ms": round(statistics.median(times), 4),
        "itl_p99_ms": round(percentile(times, 0.99), 4),
        "round_ms": round(statistics.mean(times), 4),
        "accept_length": round(sum(one.tokens for one in rounds) / len(rounds) / batch, 4),
        "expected_accept_length": round(
            statistics.mean(accept_length(profile, one.steps) for one in rounds), 4
        ),
        "rounds": len(rounds),
        "steps_histogram": histogram(rounds),
    }


def cells(rows: Iterable[Row]) -> dict[Cell, dict[str, Row]]:
    """Rows by cell and engine."""
    found: dict[Cell, dict[str, Row]] = {}
    for one in rows:
        found.setdefault(tuple(one[name] for name in CELL), {})[one["engine"]] = one
    return found


def captured(of: Mapping[str, Row]) -> dict[str, Row]:
    return {name: one for name, one in of.items() if name.startswith(STATIC)}


def best(of: Mapping[str, Row]) -> tuple[str, float]:
    """The engine of fixed steps, no speculation among them, that is fastest in a cell."""
    fixed = captured(of) | {name: one for name, one in of.items() if name == NONE}
    return max(((n, float(one["expected_tok_s"])) for n, one in fixed.items()), key=lambda x: x[1])


def choice(rounds: Sequence[Round], of: Mapping[str, Row], profile: str) -> float | None:
    """How good the steps of these rounds were, at the cell's own fixed round times: 1 is best."""
    times = {name: one["round_ms"] for name, one in captured(of).items()}
    lengths = {name: accept_length(profile, int(name.removeprefix(STATIC))) for name in times}
    if not rounds or any(f"{STATIC}{one.steps}" not in times for one in rounds):
        return None
    names = [f"{STATIC}{one.steps}" for one in rounds]
    rate = sum(lengths[name] for name in names) / sum(times[name] for name in names)
    return round(rate / max(lengths[name] / times[name] for name in times), 4)


def oracle(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Of each cell, what the best fixed choice reached."""
    return {
        "/".join(map(str, cell)): dict(zip(("engine", "tok_s"), best(of), strict=True))
        for cell, of in cells(rows).items()
        if captured(of)
    }


def ramp(levels: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any] | None:
    """The whole ramp against the cells of its levels, each level as long as it was for ours."""
    by_cell = cells(rows)
    known = [by_cell.get(tuple(level[name] for name in CELL), {}) for level in levels]
    if not levels or not all(captured(of) and NONE in of for of in known):
        return None
    tokens = sum(level["seconds"] * level["expected_tok_s"] for level in levels)
    names = [*captured(known[0]), NONE]
    composed = {
        name: sum(
            level["seconds"] * of[name]["expected_tok_s"]
            for level, of in zip(levels, known, strict=True)
        )
        for name in names
    }
    reached = sum(level["seconds"] * best(of)[1] for level, of in zip(levels, known, strict=True))
    live = {
        name: sum(level["seconds"] * level["static"][name] for level in levels)
        for name in levels[0]["static"]
    }
    return {
        "seconds": round(sum(level["seconds"] for level in levels), 3),
        "of_oracle": round(tokens / reached, 4),
        "of_each": {name: round(tokens / value, 4) for name, value in composed.items()},
        "of_each_live": {name: round(tokens / value, 4) for name, value in live.items()},
    }


def _verdict(bound: float, values: Mapping[str, float], *, above: bool = True) -> dict[str, Any]:
    worst = (min if above else max)(values, key=lambda name: values[name], default=None)
    found = None if worst is None else round(values[worst], 4)
    return {
        "bound": bound,
        "worst": found,
        "where": worst,
        "of": len(values),
        "held_in": sum(v >= bound if above else v <= bound for v in values.values()),
        "holds": None if found is None else (found >= bound if above else found <= bound),
    }


def summary(data: Mapping[str, Any]) -> dict[str, Any]:
    """Each demand with its worst case; ``None`` where nothing was measured."""
    any_, own, stock, measured = {}, {}, {}, {}
    itl: dict[str, float] = {}
    for cell, of in cells(data["rows"]).items():
        name = "/".join(map(str, cell))
        if OURS not in of or not captured(of):
            continue
        ours = of[OURS]["expected_tok_s"]
        any_[name] = ours / best(of)[1]
        own[name] = ours / best(captured(of))[1]
        measured[name] = of[OURS]["tok_s"] / of[best(of)[0]]["tok_s"]
        if ADAPTIVE in of:
            stock[name] = ours / of[ADAPTIVE]["expected_tok_s"]
        used = [f"{STATIC}{steps}" for steps in of[OURS]["steps_histogram"]]
        if all(one in of for one in used):
            itl[name] = of[OURS]["itl_p99_ms"] / max(of[one]["itl_p99_ms"] for one in used)
    zero = data["zero"]
    switches = {str(one["batch"]): one["p99_ratio"] for one in data["switches"]}
    changes = {
        f"{one['batch']}: {one['before']} to {one['accept_profile']}": one["choice_after"]
        for one in data["changes"]
        if one["choice_after"] is not None and one["verified"] >= one["verified_wanted"]
    }
    host = {f"{one['model']}/{one['batch']}": one["policy_us"] for one in data["host"]}
    whole = ramp(data["ramp"], data["rows"])
    each = {} if whole is None else {n: v for n, v in whole["of_each"].items() if n != NONE}
    return {
        "cells_of_best": _verdict(0.97, any_),
        "cells_of_best_captured": _verdict(0.99, own),
        "cells_of_best_by_tokens_committed": _verdict(0.97, measured),
        "cells_of_stock_adaptive": _verdict(1.0, stock),
        "ramp_of_oracle": _verdict(0.97, {} if whole is None else {"ramp": whole["of_oracle"]}),
        "ramp_of_best_static": _verdict(1.0, each),
        "ramp": whole,
        "zero_cold": _verdict(0.98, {str(one["batch"]): one["cold_of_none"] for one in zero}),
        "zero_warm": _verdict(0.98, {str(one["batch"]): one["warm_of_bound"] for one in zero}),
        "after_change": _verdict(0.97, changes),
        "itl_p99_across_switches": _verdict(1.1, switches, above=False),
        "itl_p99_of_policy": _verdict(1.1, itl, above=False),
        "policy_us": _verdict(5.0, host, above=False),
    }


def table(data: Mapping[str, Any]) -> str:
    """A page for the terminal."""
    lines = [f"{data['sglang']} on {data['device']}, torch {data['torch']}"]
    lines.append(f"{'cell':<28}{'best':<10}{'tok/s':>9}{'ours':>9}{'ratio':>7}  steps")
    for cell, of in cells(data["rows"]).items():
        if OURS in of and captured(of):
            (name, value), ours = best(of), of[OURS]
            lines.append(
                f"{'/'.join(map(str, cell)):<28}{name:<10}{value:>9.1f}"
                f"{ours['expected_tok_s']:>9.1f}{ours['expected_tok_s'] / value:>7.3f}  "
                f"{ours['steps_histogram']}"
            )
    for name, found in data["summary"].items():
        if found and "bound" in found:
            verdict = {True: "holds", False: "FAILS", None: "not measured"}[found["holds"]]
            lines.append(
                f"{name:<36}{found['bound']:>6} worst {found['worst']} ({found['where']}), "
                f"{found['held_in']} of {found['of']}: {verdict}"
            )
    lines += [f"failed {one['what']}" for one in data["failed"]]
    return "\n".join(lines)
