"""The measurements of one configuration, on engines that are up."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serving.engines import EngineProcess, Sample, joined
from serving.matrix import (
    OBSERVE,
    PLAN,
    STEPS,
    STOCK,
    STOCK_AGAIN,
    STOCK_ONE_STEP,
    VERIFY,
    VERIFY_AGAIN,
    Configuration,
    Scale,
    Task,
)
from serving.models import tokens_sha256
from serving.results import Results

SCRIPT = (3, 0, 1, 2, 3, 1, 0, 2)
"""Draft steps of consecutive rounds: every switch between two counts that a policy could make."""

MAX_ULP = 4
ROW = ("set", "task", "engine", "batch", "prompt", "draft_steps")
JUDGED_TOGETHER = 16

Tokens = list[list[int]]


class OutOfTime(Exception):
    """The budget ends; what is measured so far is written."""


class Session:
    """Engines by role, the prompts, and where results go."""

    def __init__(
        self, configuration: Configuration, scale: Scale, engines: dict[str, EngineProcess],
        states: dict[str, dict[str, Any]], prompts: Callable[[int], Path], results: Results,
        deadline: float,
    ) -> None:  # fmt: skip
        self.configuration = configuration
        self.scale = scale
        self.engines = engines
        self.states = states
        self.prompts = prompts
        self.results = results
        self.deadline = deadline
        self._warm: dict[str, int] = {}

    def run(self, task: Task) -> None:
        needed = task.roles
        for role in needed:
            self._warm_up(role, task)
        getattr(self, f"_{task.kind}")(task)

    def _warm_up(self, role: str, task: Task) -> None:
        """Fill the prefix cache; where there is none, only the first forwards are paid for."""
        if self._warm.get(role) == task.prompt:
            return
        count = 2 if self.configuration.prefill_graphs else max(task.batches)
        self.engines[role].warm(self.prompts(task.prompt), range(count))
        self._warm[role] = task.prompt

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def _serve(self, role: str, task: Task, rows: Sequence[int]) -> Sample:
        return self.engines[role].generate(self.prompts(task.prompt), rows, task.new_tokens)

    def _counts(self, role: str) -> dict[str, Any] | None:
        report = self.engines[role].state()["verify_graphs"]
        return None if report is None else dict(report.get("phases") or {})

    def _row(
        self, role: str, task: Task, batch: int, samples: list[Sample],
        before: dict[str, Any] | None, after: dict[str, Any] | None, draft_steps: Any = STEPS,
    ) -> dict[str, Any]:  # fmt: skip
        configuration, last = self.configuration, samples[-1]
        phases = None if before is None or after is None else _difference(before, after)
        verify = (phases or {}).get("verify", {})
        return {
            "set": configuration.key,
            "task": task.key,
            "engine": self.engines[role].spec.engine,
            "attention": configuration.attention,
            "model": configuration.model.name,
            "batch": batch,
            "prompt": task.prompt,
            "draft_steps": draft_steps,
            "new_tokens": task.new_tokens,
            "ladder": self.states[role]["probe"]["ladder"],
            "ladder_is": configuration.ladder,
            "prefill_graphs": self.states[role]["probe"]["prefill_graphs"],
            "max_total_tokens": self.states[role]["probe"]["max_total_tokens"],
            "tok_s": round(statistics.median(s.tok_s for s in samples), 2),
            "tok_s_samples": [round(s.tok_s, 2) for s in samples],
            "round_ms": round(statistics.median(s.round_ms for s in samples), 4),
            "typical_round_ms": round(statistics.median(s.typical_round_ms for s in samples), 4),
            "whole_seconds": round(statistics.median(s.seconds for s in samples), 4),
            "first_spread_ms": round(1e3 * max(s.first_spread for s in samples), 3),
            "accept_length": round(last.accept_length, 4),
            "accepted": last.histogram,
            "verify_replayed": verify.get("replayed"),
            "verify_eager": verify.get("eager"),
            "reasons": verify.get("reasons", {}),
            "phases": phases,
            "tokens_sha256": tokens_sha256(last.tokens) if configuration.model.real else None,
            "repeatable": all(s.tokens == last.tokens for s in samples),
        }

    # -- throughput ------------------------------------------------------------------------------

    def _paired(self, task: Task) -> None:
        """Stock and verify-graphs in turn, `task.pairs` times for each batch."""
        known = {
            (row["batch"], row["engine"])
            for row in self.results.data["rows"]
            if row["set"] == self.configuration.key and row["task"] == task.key
        }
        sides = {
            STOCK: self._present(STOCK, STOCK_AGAIN),
            VERIFY: self._present(VERIFY, VERIFY_AGAIN),
        }
        for role in (*sides[STOCK][1:], *sides[VERIFY][1:]):
            self._warm_up(role, task)
        for batch in task.batches:
            if {(batch, STOCK), (batch, VERIFY)} <= known:
                continue
            self._check_time()
            rows = range(batch)
            samples: dict[str, list[Sample]] = {STOCK: [], VERIFY: []}
            processes: dict[str, list[Sample]] = {
                role: [] for side in sides.values() for role in side
            }
            before = self._counts(VERIFY)
            for role in processes:
                self._serve(role, task, rows)
            for pair in range(task.pairs):
                turns: dict[str, list[Sample]] = {role: [] for role in processes}
                for turn in range(task.turns):
                    for name in list(sides)[:: 1 if (pair + turn) % 2 == 0 else -1]:
                        side = sides[name]
                        role = side[turn % len(side)]
                        turns[role].append(self._serve(role, task, rows))
                for role, parts in turns.items():
                    processes[role].append(joined(parts))
                for name, side in sides.items():
                    samples[name].append(joined([part for role in side for part in turns[role]]))
            after = self._counts(VERIFY)
            stock = self._row(STOCK, task, batch, samples[STOCK], None, None)
            ours = self._row(VERIFY, task, batch, samples[VERIFY], before, after)
            pairs = list(zip(samples[STOCK], samples[VERIFY], strict=True))
            ratios = [b.tok_s / a.tok_s for a, b in pairs]
            ours |= {
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 4) for ratio in ratios],
                "round_ratios": [
                    round(a.typical_round_ms / b.typical_round_ms, 4) for a, b in pairs
                ],
                "requests_identical": _identical(pairs[-1][0].tokens, pairs[-1][1].tokens),
            }
            for row, name in ((stock, STOCK), (ours, VERIFY)):
                one, *other = sides[name]
                if other:
                    again = list(zip(processes[one], processes[other[0]], strict=True))
                    row["process_ratios"] = [round(b.tok_s / a.tok_s, 4) for a, b in again]
                if self.configuration.model.real:
                    last = samples[name][-1]
                    row["accept_lengths"] = [
                        round((len(tokens) - 1) / max(rounds, 1), 4)
                        for tokens, rounds in zip(last.tokens, last.rounds, strict=True)
                    ]
                self.results.add("rows", row, ROW)
            print(
                f"  {task.key} batch {batch:>2}: stock {stock['tok_s']:>9.1f}, verify-graphs "
                f"{ours['tok_s']:>9.1f} tok/s, ratio {ours['ratio']:.3f}, rounds "
                f"{statistics.median(ours['round_ratios']):.3f}, processes "
                f"{stock.get('process_ratios', '')}, eager "
                f"{ours['verify_eager']}, identical {ours['requests_identical']}/{batch}",
                flush=True,
            )

    def _narrower(self) -> list[int]:
        """Step counts besides the configured one that the package serves on this release."""
        plan = self.states[VERIFY]["verify_graphs"]["plan"]
        return sorted(int(steps) for steps in plan if int(steps) < STEPS)

    def _present(self, *roles: str) -> list[str]:
        return [role for role in roles if role in self.engines]

    def _observe(self, task: Task) -> None:
        """Why stock runs eager: the same batches on an engine that only watches."""
        for batch in task.batches:
            self._check_time()
            before = self._counts(OBSERVE)
            sample = self._serve(OBSERVE, task, range(batch))
            row = self._row(OBSERVE, task, batch, [sample], before, self._counts(OBSERVE))
            self.results.add("rows", row, ROW)

    def _pinned(self, task: Task) -> None:
        """Verify-graphs with each narrower step count pinned, in the same engine."""
        engine = self.engines[VERIFY]
        for steps in reversed(self._narrower()):
            engine.command("steps", script=[steps])
            for batch in task.batches:
                self._check_time()
                before = self._counts(VERIFY)
                samples = [self._serve(VERIFY, task, range(batch)) for _ in range(task.pairs)]
                row = self._row(VERIFY, task, batch, samples, before, self._counts(VERIFY), steps)
                self.results.add("rows", row, ROW)
        engine.command("steps", script=[STEPS])

    def _hot_path(self, task: Task) -> None:
        """Host time of gate and switch in the scheduler process, and what 1,000 switches leave."""
        engine, batch = self.engines[VERIFY], task.batches[0]
        engine.command("gate_on")
        self._serve(VERIFY, task, range(batch))
        costs = engine.command("gate_off")
        costs |= engine.command("hot_path", switches=self.scale.switches, batch=batch)
        entry = {
            "set": self.configuration.key,
            "attention": self.configuration.attention,
            "model": self.configuration.model.name,
        }
        self.results.add("hot_path", entry | costs, ("set",))

    # -- tokens ----------------------------------------------------------------------------------

    def _equality(self, task: Task) -> None:
        """Same steps, bucket and batch: stock on the planned ladder against verify-graphs."""
        for batch in task.batches:
            self._check_time()
            stock, ours = (self._serve(role, task, range(batch)) for role in (PLAN, VERIFY))
            entry = {
                "set": self.configuration.key,
                "attention": self.configuration.attention,
                "model": self.configuration.model.name,
                "prompt": task.prompt,
                "batch": batch,
                "identical": stock.tokens == ours.tokens,
                "requests_identical": _identical(stock.tokens, ours.tokens),
                "identical_histograms": stock.accepted == ours.accepted,
                "stock_sha256": tokens_sha256(stock.tokens),
                "verify_graphs_sha256": tokens_sha256(ours.tokens),
            }
            self.results.add("equality", entry, ("set", "prompt", "batch"))

    def _divergence(self, task: Task) -> None:
        """First divergences across steps and across buckets, beside stock against stock."""
        largest = max(task.batches)
        judge = Judge(self.engines[STOCK], self.prompts(task.prompt))
        stock = {size: self._in_groups(STOCK, task, largest, size) for size in task.batches}
        plan = {size: self._in_groups(PLAN, task, largest, size) for size in task.batches}
        ours = {size: self._in_groups(VERIFY, task, largest, size) for size in task.batches}
        reference = stock[largest]
        one_step = self._in_groups(STOCK_ONE_STEP, task, largest, largest)
        self._divergences(
            "buckets",
            judge,
            [(stock[size], ours[size]) for size in task.batches],
            [(stock[size], plan[size]) for size in task.batches],
            {"same_bucket": [_identical(plan[size], ours[size]) for size in task.batches]},
        )
        if not (narrower := self._narrower()):
            return
        script_of_all = [steps for steps in SCRIPT if steps in (*narrower, STEPS)]
        narrow, engine = [], self.engines[VERIFY]
        for script in (*([steps] for steps in narrower), script_of_all):
            engine.command("steps", script=script)
            self._check_time()
            before = self._counts(VERIFY)
            sample = self._serve(VERIFY, task, range(largest))
            after, steps = self._counts(VERIFY), script[0] if len(script) == 1 else "script"
            row = self._row(VERIFY, task, largest, [sample], before, after, steps)
            self.results.add("rows", row, ROW)
            narrow.append((reference, sample.tokens))
        engine.command("steps", script=[STEPS])
        control = [(reference, one_step)]
        self._divergences("steps", judge, narrow, control, {"script": script_of_all})

    def _in_groups(self, role: str, task: Task, count: int, size: int) -> Tokens:
        tokens: Tokens = []
        for start in range(0, count, size):
            self._check_time()
            tokens += self._serve(role, task, range(start, min(start + size, count))).tokens
        return tokens

    def _divergences(
        self, across: str, judge: Judge, pairs: list[tuple[Tokens, Tokens]],
        control: list[tuple[Tokens, Tokens]], more: dict[str, Any],
    ) -> None:  # fmt: skip
        found, by_stock = judge.count(pairs), judge.count(control)
        scale = found["rows"] / by_stock["rows"]
        entry = {
            "set": self.configuration.key,
            "model": self.configuration.model.name,
            "attention": self.configuration.attention,
            "across": across,
            **found,
            "stock_control": by_stock["first_divergences"],
            "stock_control_rows": by_stock["rows"],
            "stock_control_unexplained": by_stock["unexplained"],
            "stock_control_gaps_ulp": by_stock["gaps_ulp"],
            "allowed": round(1.5 * by_stock["first_divergences"] * scale, 1),
            **more,
        }
        self.results.add("divergence", entry, ("set", "across"))


class Judge:
    """Says of each first divergence whether both tokens were as good as level in stock's eyes.

    Stock prefills the prompt and the tokens both runs agree on, one more forward than either run
    made, and the probe keeps that forward's largest logits.
    """

    def __init__(self, engine: EngineProcess, prompts: Path) -> None:
        self._engine = engine
        self._prompts = prompts
        self._known: dict[tuple[int, ...], dict[int, float]] = {}

    def count(self, pairs: list[tuple[Tokens, Tokens]]) -> dict[str, Any]:
        prompts = json.loads(self._prompts.read_text())
        found: list[tuple[tuple[int, ...], int, int]] = []
        rows = 0
        for ours, theirs in pairs:
            rows += len(ours)
            for prompt, a, b in zip(prompts, ours, theirs, strict=False):
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                if at is not None:
                    found.append(((*prompt, *a[:at]), a[at], b[at]))
        self._look_up([prefix for prefix, _, _ in found])
        gaps = [gap_in_ulp(self._known[prefix], a, b) for prefix, a, b in found]
        return {
            "rows": rows,
            "first_divergences": len(found),
            "unexplained": sum(gap is None or gap > MAX_ULP for gap in gaps),
            "gaps_ulp": sorted((-1.0 if gap is None else round(gap, 2)) for gap in gaps),
        }

    def _look_up(self, prefixes: list[tuple[int, ...]]) -> None:
        new = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in self._known]
        for start in range(0, len(new), JUDGED_TOGETHER):
            group = new[start : start + JUDGED_TOGETHER]
            if (logits := self._logits(group)) is None:
                singles = [self._logits([prefix]) for prefix in group]
                logits = [single[0] if single else {} for single in singles]
            self._known |= dict(zip(group, logits, strict=True))

    def _logits(self, prefixes: list[tuple[int, ...]]) -> list[dict[int, float]] | None:
        """Largest logits after each prefix; None unless they fit the tokens that were chosen."""
        self._engine.command("logits_on")
        chosen = self._engine.first_tokens([list(prefix) for prefix in prefixes])
        forwards = self._engine.command("logits_off")
        rows = [dict(zip(*row, strict=True)) for forward in forwards for row in forward]
        rows = rows[: len(prefixes)]
        fits = len(rows) == len(prefixes) and all(
            token in row and row[token] == max(row.values())
            for token, row in zip(chosen, rows, strict=True)
        )
        return rows if fits else None


def gap_in_ulp(logits: dict[int, float], a: int, b: int) -> float | None:
    """How far below the largest logit the lower of two tokens lies, in bf16 ulp of the largest."""
    if a not in logits or b not in logits:
        return None
    top = max(logits.values())
    ulp = 2.0 ** (math.floor(math.log2(max(abs(top), 2.0**-126))) - 7)
    return (top - min(logits[a], logits[b])) / ulp


def _identical(ours: Tokens, theirs: Tokens) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a measurement added to the counters of each phase."""
    changed = {}
    for phase, counts in after.items():
        old = before.get(phase, {"replayed": 0, "eager": 0, "reasons": {}})
        reasons = {r: n - old["reasons"].get(r, 0) for r, n in counts["reasons"].items()}
        changed[phase] = {
            "replayed": counts["replayed"] - old["replayed"],
            "eager": counts["eager"] - old["eager"],
            "reasons": {r: n for r, n in reasons.items() if n},
        }
    return changed
