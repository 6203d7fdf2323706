"""Holds a server at every bucket in turn and reads what its rounds cost.

The costs are those of served rounds: the server holds exactly the batch of the bucket, with the
step count pinned by live control, and its own round timer is read. Each step count starts from the
same prompts, so that all are measured at the same context length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from sglang_verify_graphs.cli.launch import LaunchedServer
from sglang_verify_graphs.control import COLD_ZERO, STEPS
from sglang_verify_graphs.costs import PLAIN_DECODE, CostKey, CostRow
from sglang_verify_graphs.errors import CostsError

ROUNDS = 40
"""Timed at exactly the batch: more than the server keeps, so that its samples hold nothing else
and the first rounds (autotune) are gone."""
_LEAST, _MOST = 64, 512
"""Rounds that requests must and may last: timed rounds are read some later, and polls take time."""
_STALL_SECONDS = 120.0
"""Without one more timed round, a batch is not reached; the prefill of all prompts comes first."""
_TOKENS = range(3, 256)
"""For random prompts; every vocabulary has them."""


class Unreachable(Exception):
    """Why the server does not hold that many requests."""


@dataclass(frozen=True)
class Limits:
    """What bounds the requests that a server holds."""

    running: int
    kv_tokens: int
    input_tokens: int
    page: int

    def new_tokens(self, batch: int, prompt: int, steps: int) -> int:
        """Tokens for each of ``batch`` requests to generate, in rounds of ``steps`` at most."""
        if batch > self.running:
            raise Unreachable(f"the server runs {self.running} requests at most")
        reserved = self.page + 4 * (steps + 1)  # ahead of each verify
        room = min(self.kv_tokens // batch - reserved, self.input_tokens - 1) - prompt
        needed = _LEAST * (steps + 1)
        if room < needed:
            raise Unreachable(
                f"prompts of {prompt} tokens leave room for {max(room, 0)} more each, {needed} are "
                f"needed ({self.kv_tokens} tokens of KV cache, {self.input_tokens} of input); "
                "lower --prompt-tokens"
            )
        return min(room, _MOST * (steps + 1))


def buckets_of(
    plan: Mapping[str, Sequence[int]], batches: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Draft steps to measure at each batch, the largest batch first.

    A batch that grows or shrinks passes through smaller buckets; they are measured after it.
    """
    tops = {int(steps): max(ladder) for steps, ladder in plan.items() if ladder}
    found = {}
    for batch in sorted(batches, reverse=True):
        captured = sorted(k for k, top in tops.items() if top >= batch) or sorted(tops)
        found[batch] = (*(PLAIN_DECODE,) * (0 in captured), *captured)
    return found


class Calibration:
    """Measures bucket by bucket on one server that is ready."""

    def __init__(self, server: LaunchedServer, prompt: int, deadline: float) -> None:
        self._server, self._prompt, self._deadline = server, prompt, deadline
        info, report = self._look()
        if report["policy"] is None:
            raise CostsError(
                "the server captured one step count, there is nothing to choose; leave "
                "--verify-graph-steps out, or give it several"
            )
        self.key = CostKey(**report["cost_key"])
        self.buckets = buckets_of(report["plan"], report["policy"]["batches"])
        self._limits = Limits(
            info["internal_states"][0]["effective_max_running_requests_per_dp"],
            info["max_total_num_tokens"], info["max_req_input_len"], info["page_size"],
        )  # fmt: skip
        self._widest = max(map(int, report["plan"]))

    def measure(self, batch: int, steps: int) -> CostRow | None:
        """The cost of that bucket; None where time ran out."""
        tokens = self._limits.new_tokens(batch, self._prompt, self._widest)
        asked = {STEPS: max(steps, 0), COLD_ZERO: int(steps == PLAIN_DECODE)}
        if self._server.ask("/set_internal_state", {"server_args": asked}) != [True]:
            raise CostsError(f"the server refused {asked}; see {self._server.log}")
        body = {
            "input_ids": [
                random.Random(at).choices(_TOKENS, k=self._prompt) for at in range(batch)
            ],
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        }
        before = self._timed(batch, steps)[0]
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(self._server.ask, "/generate", body, None)
            try:
                return self._read(batch, steps, before, load)
            finally:
                self._abort(load)

    def _read(self, batch: int, steps: int, before: int, load: Future[Any]) -> CostRow | None:
        rounds, pause, last = 0, 0.2, time.monotonic()
        while time.monotonic() < self._deadline:
            over = bool(wait([load], pause).done)
            total, mean_ms, rows = self._timed(batch, steps)
            if total - before >= ROUNDS:
                return next(row for row in rows if (row.batch, row.draft_steps) == (batch, steps))
            if over:
                load.result()
                raise Unreachable(f"its requests ended after {total - before} rounds together")
            if total - before > rounds:
                rounds, last = total - before, time.monotonic()
            elif time.monotonic() > last + _STALL_SECONDS:
                raise Unreachable(f"not all requests ran together for {_STALL_SECONDS:.0f} s")
            # An answer interrupts the rounds that it asks for: ask seldom.
            pause = min(max((ROUNDS - rounds) * mean_ms / 1e3, 0.1), 2.0)
        return None

    def _timed(self, batch: int, steps: int) -> tuple[int, float, list[CostRow]]:
        """Rounds timed at exactly this batch, their mean, and all costs known."""
        _, report = self._look()
        timed = report["round_ms"].get(f"{batch}x{steps}", {"rounds": 0, "mean_ms": 0.0})
        rows = [CostRow(**row) for row in report["policy"]["costs"]]
        return timed["rounds"], timed["mean_ms"], rows

    def _abort(self, load: Future[Any]) -> None:
        """A request that is on its way to the scheduler misses an abort: ask until all ended."""
        while not load.done():
            self._server.ask("/abort_request", {"rid": "", "abort_all": True})
            wait([load], 0.2)

    def _look(self) -> tuple[Any, Any]:
        info = self._server.ask("/server_info")
        states = info["internal_states"]
        if len(states) != 1:
            raise CostsError(
                f"{len(states)} replicas would share the requests; leave --dp-size out"
            )
        report = states[0].get("verify_graphs") or {"state": "not installed", "reasons": []}
        if report["state"] != "active":
            why = "; ".join(report["reasons"]) or f"see {self._server.log}"
            raise CostsError(f"verify graphs are not active but {report['state']}: {why}")
        return info, report
