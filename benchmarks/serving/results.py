"""The result file: written after every measurement, read again to resume, summed up at the end."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LISTS = ("rows", "equality", "divergence", "hot_path", "capture", "failed")
NOTES = {
    "tok_s": "tokens after each request's first, over the time from the last first token to the "
    "end; median of the samples, each the mean of an engine's turns in one pair; all requests "
    "arrive together, their prompts in the prefix cache",
    "round_ms": "that time over the verify rounds of the longest request",
    "typical_round_ms": "median of the times between the starts of two forwards in the scheduler "
    "process: stalls of the host do not count; round_ratios are stock's over verify-graphs'",
    "process_ratios": "a second process of the same engine over the first, pair by pair",
    "ratio": "verify-graphs over stock, pair by pair; within a pair the engines take several "
    "turns, the order turned round each time",
    "capture": "one probe for all engines around Scheduler.init_all_cuda_graphs (up to 0.5.13: "
    "the sum of what each worker captures while it is built), one engine at a time; gb is what the "
    "device lost, process_gb what the driver counts for the process and reserved_gb what torch "
    "does; source 'report' is the package's own figure of one width",
    "divergence": "first token of a request that differs from stock's (across steps: at the "
    "largest batch; across buckets: in the same batch); unexplained unless both tokens' logits lie "
    "within 4 bf16 ulp of the largest, as stock computes them in prefill; -1 in gaps_ulp: one of "
    "the two is not near the top",
    "stock_control": "the same count between two stock engines that differ in their configured "
    "steps (1 and 3) or in their ladder (buckets) only; allowed is 1.5 times that, for as many "
    "rows",
}


class Results:
    """One JSON document. Entries of the lists are replaced by their identity, never doubled."""

    def __init__(self, path: Path, header: dict[str, Any], *, resume: bool, copy_to: Path | None):
        self.path = path
        self._copy_to = copy_to
        self.data: dict[str, Any] = {**header, **{name: [] for name in LISTS}, "done": []}
        if resume and path.exists():
            kept = json.loads(path.read_text())
            self.data |= {name: kept.get(name, []) for name in (*LISTS, "done")}
            self.data["failed"] = []  # what failed is tried again
            self.data["commands"] = [*kept.get("commands", [kept["command"]]), header["command"]]
        self.write()

    def is_done(self, key: str) -> bool:
        return key in self.data["done"]

    def finish(self, key: str) -> None:
        self.data["done"].append(key)
        self.write()

    def add(self, name: str, entry: dict[str, Any], identity: Iterable[str]) -> None:
        identity = tuple(identity)
        same = [
            old
            for old in self.data[name]
            if all(old.get(field) == entry.get(field) for field in identity)
        ]
        for old in same:
            self.data[name].remove(old)
        self.data[name].append(entry)
        self.write()

    def fail(self, configuration: str, what: str, detail: str) -> None:
        entry = {"configuration": configuration, "what": what, "detail": detail[-4000:]}
        print(f"FAILED {configuration}: {what}\n{entry['detail'][-2000:]}", flush=True)
        self.add("failed", entry, ("configuration", "what"))

    def write(self) -> None:
        self.data["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")
        self.data["notes"] = NOTES
        self.data["summary"] = summary(self.data)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(part, self.path)
        if self._copy_to is not None:
            shutil.copy(self.path, self._copy_to)


# -- summing up ------------------------------------------------------------------------------------


def summary(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "throughput": _throughput(data["rows"]),
        "accept": _accept(data["rows"]),
        "coverage": _coverage(data["rows"]),
        "equality": _equality(data["equality"]),
        "capture": _capture(data["capture"]),
    }


def _quartile(values: list[float]) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _by(rows: list[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def _processes(rows: list[dict[str, Any]], where: str, prompt: int) -> list[float]:
    """One stock process over the other: what this machine cannot tell apart."""
    return [
        ratio
        for row in rows
        if row["engine"] == "stock" and (row["set"], row["prompt"]) == (where, prompt)
        for ratio in row.get("process_ratios", ())
    ]


def _throughput(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to stock over all batches and pairs of a set."""
    paired = [row for row in rows if row.get("ratios")]
    found = []
    for (where, prompt), group in _by(paired, "set", "prompt").items():
        processes = _processes(rows, where, prompt)
        ratios = [ratio for row in group for ratio in row["ratios"]]
        rounds = [ratio for row in group for ratio in row["round_ratios"]]
        found.append(
            {
                "set": where,
                "prompt": prompt,
                "batches": [row["batch"] for row in group],
                "pairs": len(ratios),
                "median": round(statistics.median(ratios), 4),
                "lower_quartile": round(_quartile(ratios), 4),
                "round_ratio_median": round(statistics.median(rounds), 4),
                "round_ratio_lower_quartile": round(_quartile(rounds), 4),
                "stock_processes": None
                if not processes
                else {
                    "median": round(statistics.median(processes), 4),
                    "lower_quartile": round(_quartile(processes), 4),
                },
                "median_by_batch": {str(row["batch"]): row["ratio"] for row in group},
            }
        )
    return found


def _accept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accept length against stock, request by request; 95% interval of the relative difference."""
    found = []
    groups = _by([row for row in rows if row.get("accept_lengths")], "set", "prompt")
    for (where, prompt), group in groups.items():
        of = {(row["engine"], row["batch"]): row for row in group}
        pairs, equal, cells = [], 0, 0
        for (engine, batch), row in of.items():
            stock = of.get(("stock", batch))
            if engine != "verify-graphs" or stock is None:
                continue
            cells += 1
            equal += row["accepted"] == stock["accepted"]
            pairs += zip(stock["accept_lengths"], row["accept_lengths"], strict=True)
        if not pairs:
            continue
        base = statistics.mean(a for a, _ in pairs)
        changes = [(b - a) / base for a, b in pairs]
        mean = statistics.mean(changes)
        spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
        half = 1.96 * spread / math.sqrt(len(changes))
        found.append(
            {
                "set": where,
                "prompt": prompt,
                "stock": round(base, 4),
                "relative_difference": round(mean, 5),
                "ci95": [round(mean - half, 5), round(mean + half, 5)],
                "requests": len(pairs),
                "identical_histograms": f"{equal} of {cells} batches",
            }
        )
    return found


def _coverage(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ours = [row for row in rows if row["engine"] == "verify-graphs"]
    reasons: dict[str, int] = defaultdict(int)
    for row in ours:
        for reason, count in row["reasons"].items():
            reasons[reason] += count
    return {
        "verify_replayed": sum(row["verify_replayed"] for row in ours),
        "verify_eager": sum(row["verify_eager"] for row in ours),
        "reasons": dict(reasons),
    }


def _equality(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "set": where,
            "batches": len(group),
            "identical": sum(entry["identical"] for entry in group),
            "requests": sum(entry["batch"] for entry in group),
            "requests_identical": sum(entry["requests_identical"] for entry in group),
        }
        for (where,), group in _by(entries, "set").items()
    ]


def _capture(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole capture against stock adaptive's: the same ladder, then each its own."""
    found = []
    whole = [e for e in entries if e["source"] == "probe" and e["set"].endswith("/capture")]
    for (where,), group in _by(whole, "set").items():
        of = {entry["role"]: entry for entry in group}
        if (ours := of.get("verify-graphs")) is None:
            continue
        for name, role in (("same", "stock-adaptive-plan"), ("each its own", "stock-adaptive")):
            if (stock := of.get(role)) is not None:
                found.append(
                    {"set": where, "ladder": name}
                    | {
                        unit: round(ours[unit] / stock[unit], 3) if stock[unit] else None
                        for unit in ("seconds", "gb", "process_gb", "reserved_gb")
                    }
                )
    return found


def table(data: dict[str, Any]) -> str:
    """A page for the terminal."""
    lines = [f"{data['sglang']} on {data['device']}, torch {data['torch']}"]
    total = data["summary"]
    titles = f"{'set':<34}{'prompt':>7}{'pairs':>6}"
    lines.append(titles + f"{'median':>8}{'lower q.':>9}{'rounds':>8}{'lower q.':>9}")
    for t in total["throughput"]:
        lines.append(
            f"{t['set']:<34}{t['prompt']:>7}{t['pairs']:>6}{t['median']:>8.3f}"
            f"{t['lower_quartile']:>9.3f}{t['round_ratio_median']:>8.3f}"
            f"{t['round_ratio_lower_quartile']:>9.3f}"
        )
    for a in total["accept"]:
        lines.append(
            f"accept {a['set']} {a['prompt']}: stock {a['stock']}, difference "
            f"{100 * a['relative_difference']:+.2f}% (95%: {100 * a['ci95'][0]:+.2f} to "
            f"{100 * a['ci95'][1]:+.2f}%), histograms identical in {a['identical_histograms']}"
        )
    cover = total["coverage"]
    lines.append(
        f"verify: {cover['verify_replayed']} replayed, {cover['verify_eager']} eager "
        f"{cover['reasons'] or ''}"
    )
    for e in total["equality"]:
        lines.append(
            f"equality {e['set']}: {e['requests_identical']} of {e['requests']} requests identical"
        )
    for d in data["divergence"]:
        lines.append(
            f"divergence {d['set']} {d['across']}: {d['first_divergences']} of {d['rows']}, "
            f"{d['unexplained']} unexplained, stock against stock {d['stock_control']}"
        )
    for h in data["hot_path"]:
        lines.append(
            f"hot path {h['set']}: gate {h['gate_us']['median']} us, switch "
            f"{h['switch_us']['median']} us, {h['gpu_bytes']} GPU bytes in {h['switches']} switches"
        )
    for c in total["capture"]:
        lines.append(
            f"capture {c['set']}, ladder {c['ladder']}: {c['seconds']} of stock adaptive's "
            f"seconds, {c['process_gb'] or c['gb']} of its bytes"
        )
    lines += [f"failed {f['configuration']}: {f['what']}" for f in data["failed"]]
    return "\n".join(lines)
