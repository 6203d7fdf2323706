"""What a policy meets: round costs, requests that come and go, drafts that are accepted or not.

The batch is a function of time alone, made once for each trace from arrivals and lengths. All
policies so meet the same states for the same time, the greedy choice is the best one in every
state, and the oracle is exact. (Were lengths counted in tokens, a slow policy would meet larger
batches, which are the more efficient ones.)
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from sglang_verify_graphs.buckets import batch_ladder

STEPS = (0, 1, 2, 3, 5, 7)
"""Captured step counts; stock's default schedule uses 0, 1, 3 and 7."""


@dataclass(frozen=True)
class Hardware:
    """Round cost in ms of each bucket: a line in the draft steps through two points."""

    name: str
    source: str
    decode: tuple[tuple[int, float], ...]
    """(batch, ms) of plain decode; linear between and beyond."""
    verify: tuple[tuple[int, float], ...]
    """(batch, ms) of a whole round of ``verify_steps``."""
    verify_steps: int
    extend_ms: float
    """Draft extend of a round without drafts."""
    max_batch: int

    @cached_property
    def ladder(self) -> tuple[int, ...]:
        return batch_ladder(self.max_batch)

    def bucket(self, batch: int) -> int:
        return self.ladder[bisect_left(self.ladder, batch)]

    def plain(self, batch: int) -> float:
        return _line(self.decode, self.bucket(batch))

    def round(self, batch: int, steps: int) -> float:
        warm = self.plain(batch) + self.extend_ms
        return warm + (_line(self.verify, self.bucket(batch)) - warm) * steps / self.verify_steps


def _line(points: tuple[tuple[int, float], ...], x: int) -> float:
    at = min(max(bisect_left(points, (x, 0.0)), 1), max(len(points) - 1, 1))
    (x0, y0), (x1, y1) = points[at - 1], points[min(at, len(points) - 1)]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


HARDWARE = (
    Hardware(
        "8B on H200",
        "decode and 3 steps: stock SGLang 0.5.17, triton, batches 1, 8 and 32, 2026-11-29; "
        "other step counts on the line, draft extend assumed",
        decode=((1, 4.78), (8, 5.06), (32, 6.70)),
        verify=((1, 6.84), (8, 8.53), (32, 16.6)),
        verify_steps=3, extend_ms=0.3, max_batch=48,
    ),
    Hardware(
        "30B-A3B MoE on H200",
        "decode: stock SGLang 0.5.17, triton, batches 1, 8 and 32, 2026-11-29; 3 steps: break-even "
        "assumed within the range published for 2 H100 (2.1 to 4.0), dearest where verify still "
        "wakes new experts, so not monotone in the batch",
        decode=((1, 4.74), (8, 8.78), (32, 16.1)),
        verify=((1, 2.1 * 4.74), (8, 3.2 * 8.78), (32, 2.3 * 16.1)),
        verify_steps=3, extend_ms=0.3, max_batch=48,
    ),
    Hardware(
        "8 GPUs over PCIe",
        "public report, Kimi-K2.5 on 8 RTX PRO 6000 at batch 1: decode 12 ms, verify of 3 tokens "
        "29 ms; growth with the batch and draft extend assumed",
        decode=((1, 12.0), (8, 14.5)),
        verify=((1, 29.0), (8, 36.0)),
        verify_steps=2, extend_ms=0.5, max_batch=8,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Acceptance of the first draft over the course of a trace (0 to 1); later ones a bit less."""

    name: str
    first: Callable[[float], float]

    def chain(self, when: float) -> list[float]:
        """P(the first i drafts accepted), i from 1."""
        first = self.first(when)
        return list(accumulate((first * 0.97**i for i in range(max(STEPS))), lambda a, b: a * b))


PROFILES = (
    Profile("steady 0.65", lambda when: 0.65),
    Profile("0.85, 0.35, 0.85, 0.35", lambda when: 0.35 if int(4 * when) % 2 else 0.85),
    Profile("drifts 0.8 to 0.3 and back", lambda when: 0.55 + 0.25 * math.cos(2 * math.pi * when)),
)


def accept_length(chain: list[float], steps: int) -> float:
    return 1 + sum(chain[:steps])


class Trace:
    """Batch at every time: requests in flight, at least one, at most ``max_batch``."""

    def __init__(self, name: str, requests: list[tuple[float, float]], max_batch: int) -> None:
        self.name = name
        self._max_batch = max_batch
        changes = sorted([(s, 1) for s, _ in requests] + [(s + d, -1) for s, d in requests])
        self._times = [at for at, _ in changes]
        self._batches = [0, *accumulate(change for _, change in changes)]

    def batch(self, at_ms: float) -> int:
        return min(max(self._batches[bisect_right(self._times, at_ms)], 1), self._max_batch)


def traces(hardware: Hardware, total_ms: float, seed: int) -> list[Trace]:
    """Poisson arrivals; the same in bursts of nine tenths; lengths with a heavy (Pareto) tail."""
    rng = random.Random(seed)
    mean = hardware.max_batch / 4
    length = 250 * hardware.plain(round(mean))

    def arrivals(rate: Callable[[float], float]) -> list[float]:
        at, found = 0.0, []
        while at < total_ms:
            at += rng.expovariate(rate(at))
            found.append(at)
        return found

    steady = mean / length
    burst = 8 * length
    uniform = arrivals(lambda at: steady)
    bursty = arrivals(lambda at: steady * (2.6 if at % burst < burst / 3 else 0.2))
    tailed = arrivals(lambda at: steady)
    tail = 1.5
    return [
        Trace("poisson", [(at, rng.expovariate(1 / length)) for at in uniform], hardware.max_batch),
        Trace("bursty", [(at, rng.expovariate(1 / length)) for at in bursty], hardware.max_batch),
        Trace(
            "long-tailed",
            [(at, length * (tail - 1) / tail * rng.paretovariate(tail)) for at in tailed],
            hardware.max_batch,
        ),
    ]
