"""Which step policy commits how many tokens, in simulated time: no GPU, no SGLang, about a minute.

No speculation, every fixed step count, stock's adaptive rule, this package's policy and an oracle
serve the same traces on the same round costs. Rounds vary, some stall, the first of each step count
is five times too slow, timings and acceptance arrive as late as in a server, and a switch costs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.simulation.engines import (  # noqa: E402
    STOCK_SCHEDULE,
    Engine,
    Measured,
    Oracle,
    Static,
    StockAdaptive,
)
from benchmarks.simulation.world import (  # noqa: E402
    HARDWARE,
    PROFILES,
    STEPS,
    Hardware,
    Profile,
    Trace,
    traces,
)

NOISE = 0.04
"""Standard deviation of a round's logarithm."""
STALL, STALLS = 4.0, 0.002
"""A stalled round takes so many times as long; this share of rounds stall."""
FIRST = 5.0
"""The first round of a step count takes so many times as long (case of the field: autotune)."""
SWITCH_MS = 0.1
"""Host time of a switch; the worst of 100 was 0.036 ms (serve-h200-0.5.17.json, round_head_us)."""
LATE = 7
"""Rounds until a timing is read from the ring (rounds.py)."""
CONFIGURED = 3
ROUNDS = 16_000
"""Plain decode rounds of a batch of a quarter of the largest that a trace is long."""
RESULTS = ROOT / "benchmarks" / "results" / "simulate.json"


class Run:
    """One engine through one trace."""

    def __init__(
        self, hardware: Hardware, trace: Trace, profile: Profile, total_ms: float, seed: int
    ) -> None:
        self.hardware, self.trace, self.profile = hardware, trace, profile
        self.total_ms = total_ms
        self.now_ms = 0.0
        self.tokens = 0
        self.steps: Counter[int] = Counter()
        self._rng = random.Random(seed)

    def chain(self) -> list[float]:
        return self.profile.chain(self.now_ms / self.total_ms)

    def serve(self, engine: Engine, *, plain: bool = False) -> Run:
        slow_first = set(STEPS)
        before: tuple[int, int, float, list[int]] = (1, CONFIGURED, 0.0, [])
        timings: deque[tuple[int, int, float]] = deque()
        while self.now_ms < self.total_ms:
            batch = self.trace.batch(self.now_ms)
            steps = engine.draft_steps(batch)
            if self._like(before, batch, steps):
                timings.append(before[:3])
                if len(timings) > LATE:
                    engine.timed(*timings.popleft())
            if before[3]:
                engine.verified(before[1], before[3])
            ms = self.hardware.plain(batch) if plain else self.hardware.round(batch, steps)
            ms *= self._rng.lognormvariate(0.0, NOISE)
            if self._rng.random() < STALLS:
                ms *= STALL
            if steps in slow_first:
                slow_first.remove(steps)
                ms *= FIRST
            if steps != before[1]:
                ms += SWITCH_MS
            drafts = self._draw(batch, steps)
            self.now_ms += ms
            self.tokens += batch + sum(drafts)
            self.steps[steps] += 1
            before = (batch, steps, ms, drafts)
        return self

    def _like(self, before: tuple[int, int, float, list[int]], batch: int, steps: int) -> bool:
        """The same bucket and steps, and no prefill between: no request has come."""
        same = self.hardware.bucket(before[0]) == self.hardware.bucket(batch)
        return same and steps == before[1] and batch <= before[0]

    def _draw(self, batch: int, steps: int) -> list[int]:
        reached = self.chain()[:steps]
        found = []
        for _ in range(batch):
            drawn, accepted = self._rng.random(), 0
            while accepted < steps and drawn < reached[accepted]:
                accepted += 1
            found.append(accepted)
        return found

    @property
    def tok_s(self) -> float:
        return 1e3 * self.tokens / self.now_ms


def compare(hardware: Hardware, trace: Trace, profile: Profile, total_ms: float) -> dict[str, Run]:
    """Every engine through the same trace, with the same seed."""

    def run() -> Run:
        return Run(hardware, trace, profile, total_ms, seed=1)

    oracle = run()
    return {
        "none": run().serve(Static(0), plain=True),
        **{f"static-{k}": run().serve(Static(k)) for k in STEPS},
        "stock-adaptive": run().serve(StockAdaptive(CONFIGURED, STOCK_SCHEDULE)),
        "stock-adaptive, same steps": run().serve(StockAdaptive(CONFIGURED, {1: STEPS})),
        "verify-graphs": run().serve(Measured(hardware.max_batch, CONFIGURED)),
        "oracle": oracle.serve(Oracle(hardware, oracle.chain)),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--output", type=Path, default=RESULTS)
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for hardware in HARDWARE:
        total_ms = given.rounds * hardware.plain(hardware.max_batch // 4)
        for trace in traces(hardware, total_ms, seed=2):
            for profile in PROFILES:
                runs = compare(hardware, trace, profile, total_ms)
                oracle = runs["oracle"].tok_s
                for engine, run in runs.items():
                    rows.append(
                        {
                            "hardware": hardware.name,
                            "trace": trace.name,
                            "acceptance": profile.name,
                            "engine": engine,
                            "tok_s": round(run.tok_s, 1),
                            "of_oracle": round(run.tok_s / oracle, 4),
                            "steps_histogram": dict(sorted(run.steps.items())),
                        }
                    )
                _print(rows[-len(runs) :])
    result = {
        "command": "python benchmarks/simulate.py",
        "rounds": given.rounds,
        "hardware": {h.name: h.source for h in HARDWARE},
        "notes": __doc__,
        "rows": rows,
        "worst": min(r["of_oracle"] for r in rows if r["engine"] == "verify-graphs"),
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"worst of verify-graphs: {result['worst']:.1%} of the oracle")


def _print(rows: list[dict[str, Any]]) -> None:
    share = {row["engine"]: f"{row['of_oracle']:.1%}" for row in rows}
    static = [row for row in rows if row["engine"].startswith("static")]
    best = max(static, key=lambda row: row["tok_s"])["engine"]
    print(
        f"{rows[0]['hardware']:20} {rows[0]['trace']:12} {rows[0]['acceptance']:28}",
        *(f"{name} {share[name]:>6} " for name in ("none", best, *list(share)[-4:-1])),
        flush=True,
    )


if __name__ == "__main__":
    main()
