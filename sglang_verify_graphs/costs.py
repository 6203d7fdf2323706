"""What a decode round costs, measured in served rounds, and what must be accepted to earn it back.

A round of ``draft_steps`` is verify, draft forwards, draft extend and host time together, start to
start (``rounds.py``), in milliseconds. Costs are kept per captured bucket and never carried from
one to another: an MoE's cost is not monotone in the batch, and a bucket may run eager.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_verify_graphs.errors import CostsError
from sglang_verify_graphs.estimate import Estimate

PLAIN_DECODE = -1
"""In place of a step count: a decode round of a server without speculation, ``D`` of the economics.
A round of 0 steps also pays for the draft extend that keeps the draft KV warm."""
MIN_SAMPLES = 2
"""Below, a cost is unknown: one slow first round (autotune, lazy loading) must decide nothing."""
_KEPT = 32
"""Latest samples of a bucket; enough for 1% with round times that vary by 5%, and a second of
serving, so that growing prompts show."""
_VERIFY_QUANTILE = 0.4
"""Just under the median: drops stalls of the host. Farther down it would price noise as speed."""
_STALL = 2.0
"""Plain decode is a mean over the samples that took less than this many medians."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_ROWS = 100_000
"""Most rows read from a file; 100 batches by 10 step counts are a thousand."""


class RoundCosts:
    """Round cost per (batch, draft_steps) from the latest samples; bounded by the bucket count."""

    def __init__(self, table: CostTable | None = None) -> None:
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._estimates: dict[tuple[int, int], Estimate | None] = {}
        for row in table.rows if table else ():
            for ms in (row.low_ms, *[row.ms] * MIN_SAMPLES, row.high_ms):
                self.add(row.batch, row.draft_steps, ms)

    def add(self, batch: int, draft_steps: int, ms: float) -> None:
        """One served round; ``batch`` is that of the bucket, not of the requests in it."""
        if not 0.0 < ms < math.inf:
            return
        key = (batch, draft_steps)
        samples = self._samples.get(key)
        if samples is None:
            samples = self._samples[key] = deque(maxlen=_KEPT)
        samples.append(ms)
        self._estimates.pop(key, None)

    def round(self, batch: int, draft_steps: int) -> Estimate | None:
        """Cost of a round in ms, or ``None`` while it is unknown."""
        key = (batch, draft_steps)
        if key not in self._estimates and key in self._samples:
            self._estimates[key] = _estimate(sorted(self._samples[key]), draft_steps)
        return self._estimates.get(key)

    def break_even(self, batch: int, draft_steps: int, against: int = 0) -> Estimate | None:
        """Accept length at which ``draft_steps`` earn nothing over rounds of ``against`` steps.

        0 compares with this server's own rounds without drafts, ``PLAIN_DECODE`` with a server
        without speculation. ``None`` if either cost is unknown.
        """
        return break_even(self.round(batch, draft_steps), self.round(batch, against))

    def rows(self) -> tuple[CostRow, ...]:
        """What is known, bucket by bucket."""
        return tuple(
            CostRow(batch, steps, *cost, samples=len(self._samples[batch, steps]))
            for batch, steps in sorted(self._samples)
            if (cost := self.round(batch, steps)) is not None
        )


def _estimate(ordered: list[float], draft_steps: int) -> Estimate | None:
    """A low quantile for verify, a mean without stalls for plain decode; interval by ranks."""
    count = len(ordered)
    if count < MIN_SAMPLES:
        return None
    quantile = _VERIFY_QUANTILE
    at = int(quantile * (count - 1))
    value = ordered[at]
    if draft_steps <= 0:
        quantile, at = 0.5, (count - 1) // 2
        kept = [ms for ms in ordered if ms <= _STALL * ordered[at]]
        value = sum(kept) / len(kept)
    reach = math.ceil(1.96 * math.sqrt(count * quantile * (1 - quantile)))
    low, high = ordered[max(at - reach, 0)], ordered[min(at + reach, count - 1)]
    return Estimate(value, min(low, value), max(high, value))


def break_even(cost: Estimate | None, decode: Estimate | None) -> Estimate | None:
    """Accept length at which a round of ``cost`` earns nothing over one of ``decode``."""
    if cost is None or decode is None:
        return None
    return Estimate(cost.value / decode.value, cost.low / decode.high, cost.high / decode.low)


def verdict(
    needed: Estimate | None, observed: Estimate | float | None, use: int | None = None
) -> str:
    """What speculation earns, in words a user can act on; ``use``: the step count that earns most.

    ``needed`` is the break-even accept length, ``observed`` the one there is.
    """
    if needed is None:
        return "unknown: no decode sample"
    if observed is None:
        return "unknown: no acceptance observed"
    length = observed if isinstance(observed, Estimate) else Estimate(observed, observed, observed)
    if needed.low <= length.high and length.low <= needed.high:
        return "breaking even"
    gain = length.value / needed.value - 1
    if gain > 0:
        return f"gaining {gain:.0%}"
    return f"losing {-gain:.0%}" + ("" if use is None else f": use {use} step{'s' * (use != 1)}")


@dataclass(frozen=True)
class CostKey:
    """Where costs were measured; they hold nowhere else."""

    gpu: str
    tp_size: int
    model_digest: str
    draft_digest: str
    sglang_version: str
    attention_backend: str
    dtype: str


def model_digest(path: str, revision: str | None) -> str:
    """Of a model's shape and files: its config, and names and sizes of its weights.

    A model that was named by its hub is known by name and revision.
    """
    folder = Path(path)
    if not folder.is_dir():
        return f"{path}@{revision or 'main'}"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in _WEIGHTS:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class CostRow:
    """One bucket: the cost of its round and the 95% interval of it, in ms."""

    batch: int
    draft_steps: int
    ms: float
    low_ms: float
    high_ms: float
    samples: int

    def __post_init__(self) -> None:
        good = 1 <= self.batch <= 2**16 and PLAIN_DECODE <= self.draft_steps <= 2**7
        if not (good and 0 < self.low_ms <= self.ms <= self.high_ms < math.inf):
            raise ValueError(f"no such round cost: {self}")


@dataclass(frozen=True)
class CostTable:
    """The costs of one server, as ``costs.json`` holds them."""

    key: CostKey
    rows: tuple[CostRow, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Read what ``to_json`` wrote; any other text is a ``CostsError``."""
        try:
            data = json.loads(text)
            if len(data["rows"]) > _ROWS:
                raise ValueError(f"{len(data['rows'])} rows, more than {_ROWS}")
            rows = tuple(_read(CostRow, row) for row in data["rows"])
            if len({(row.batch, row.draft_steps) for row in rows}) < len(rows):
                raise ValueError("two rows of one bucket")
            return cls(_read(CostKey, data["key"]), rows)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CostsError(f"not a table of round costs ({said}); calibrate again") from None

    def check(self, here: CostKey) -> None:
        """Refuse costs of another server, naming what differs."""
        there = asdict(self.key)
        differing = [
            f"{name} {there[name]!r}, here {value!r}"
            for name, value in asdict(here).items()
            if there[name] != value
        ]
        if differing:
            raise CostsError(
                f"round costs were measured elsewhere: {'; '.join(differing)}; calibrate on this "
                "server, or start without a table and learn while serving"
            )


def read_costs(path: Path) -> CostTable:
    """The table in a file; whatever is wrong with it is a ``CostsError``."""
    try:
        return CostTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CostsError(f"cannot read {path} ({error}); calibrate again") from None


def _read(kind: Any, data: dict[str, Any]) -> Any:
    """A dataclass from untrusted JSON: exactly its fields, each of its type."""
    types = {"int": (int,), "float": (int, float), "str": (str,)}
    expected = {field.name: types[str(field.type)] for field in fields(kind)}
    if data.keys() != expected.keys():
        raise ValueError(f"{kind.__name__} has the fields {', '.join(expected)}")
    for name, value in data.items():
        if type(value) not in expected[name]:
            raise ValueError(f"{name} of a {kind.__name__} is no {expected[name][-1].__name__}")
    return kind(**{name: expected[name][-1](value) for name, value in data.items()})
