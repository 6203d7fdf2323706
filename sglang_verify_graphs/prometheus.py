"""What is counted here, beside SGLang's own metrics and by its rules: its labels, ranks and times.

SGLang's ``cuda graph: True`` and its metrics speak of verify alone; these tell the phases apart.
Serving counts as it does without metrics; what was added since the last time is published when
SGLang publishes its own (each prefill, every ``--decode-log-interval`` rounds, and while idle).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang_verify_graphs.controller import DraftStepsController

logger = logging.getLogger("sglang_verify_graphs")

PREFIX = "sglang:verify_graph_"
_BUCKET = ("draft_steps", "batch")
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "replays_total": ("Forwards replayed from a captured graph.", ("phase", *_BUCKET)),
    "eager_total": ("Forwards of a decode round that ran without a graph.", ("phase", "reason")),
    "padded_rows_total": ("Tokens of verify replays that belonged to no request.", ()),
    "rounds_total": ("Decode rounds.", ()),
    "verified_requests_total": ("Requests verified, once a round for each.", ()),
    "accepted_drafts_total": ("Verified requests whose draft was accepted there.", ("position",)),
    "round_seconds": ("Mean of the rounds timed since the last publication.", _BUCKET),
    "draft_steps": ("Draft steps of the latest decode round.", ()),
    "break_even_accept_length": ("Accept length that earns nothing over 0 steps.", _BUCKET),
    "capture_seconds": ("Time that capturing the graphs of a width took.", ("draft_steps",)),
    "capture_bytes": ("Device memory that the graphs of a width took.", ("draft_steps",)),
}
"""What each one says, and its labels beside SGLang's own. A counter ends in ``_total``."""
EAGER = "eager"
"""In place of a bucket's batch: rounds whose verify fits no bucket."""


def publisher(
    controller: DraftStepsController, labels: Mapping[str, Any] | None
) -> Publisher | None:
    """A publisher under SGLang's labels; None where SGLang itself publishes nothing."""
    if labels is None:
        return None
    try:
        return Publisher(controller, labels)
    except (ImportError, ValueError) as error:
        logger.warning(
            "[verify-graphs] no metrics of this package (%s); install prometheus_client, and start "
            "one server a process", error,
        )  # fmt: skip
        return None


class Publisher:
    """Adds to SGLang's metrics what was counted since the last time."""

    def __init__(self, controller: DraftStepsController, labels: Mapping[str, Any]) -> None:
        # Chooses files or memory when it is imported: not before SGLang named the folder.
        from prometheus_client import Counter, Gauge

        self._run = controller
        self._labels = labels
        self._sent: dict[tuple[Any, ...], int] = {}
        self._timed: dict[tuple[int, Any], tuple[float, float]] = {}
        self._metrics: dict[str, Any] = {}
        for name, (text, own) in METRICS.items():
            names = [*labels, *own]
            self._metrics[name] = (
                Counter(PREFIX + name, text, names)
                if name.endswith("_total")
                else Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent")
            )
        for one in controller.captured:
            self._series("capture_seconds", one.draft_steps).set(one.seconds)
            self._series("capture_bytes", one.draft_steps).set(max(one.gb, 0.0) * 2**30)
        self.publish()

    def publish(self) -> None:
        run, counters = self._run, self._run.counters
        for phase, replayed in counters.replayed.items():
            for bucket, count in replayed.items():
                if count:
                    self._add("replays_total", count, phase.value, bucket.draft_steps, bucket.batch)
        for phase, eager in counters.eager.items():
            for reason, count in eager.items():
                self._add("eager_total", count, phase.value, reason.value)
        self._add("padded_rows_total", counters.padded_rows)
        self._add("rounds_total", counters.rounds)
        self._add("verified_requests_total", counters.verified_requests)
        for position, count in enumerate(counters.accepted_by_position(), start=1):
            self._add("accepted_drafts_total", count, position)
        self._series("draft_steps").set(run.current_steps)
        self._round_seconds()
        if run.measured is not None:
            for (batch, steps), length in run.measured.break_even().items():
                self._series("break_even_accept_length", steps, batch).set(length)

    def _round_seconds(self) -> None:
        plan = self._run.plan
        now: dict[tuple[int, Any], tuple[float, float]] = {}
        for (batch, timed_steps), (count, ms, _) in self._run.timer.sums.items():
            steps = max(timed_steps, 0)  # plain decode rounds are rounds of 0 steps
            width = plan.width(steps)
            bucket = width and width.bucket_for(batch, padding=plan.padding)
            key = (steps, bucket.batch if bucket else EAGER)
            before = now.get(key, (0, 0.0))
            now[key] = (before[0] + count, before[1] + ms)
        for key, (count, ms) in now.items():
            counted, spent = self._timed.get(key, (0, 0.0))
            if count > counted:
                self._series("round_seconds", *key).set((ms - spent) / (count - counted) / 1e3)
        self._timed = now

    def _add(self, name: str, count: int, *labels: Any) -> None:
        """Zero is published too: an increase is seen only from a first value on."""
        key = (name, *labels)
        sent = self._sent.get(key)
        if sent != count:
            self._sent[key] = count
            self._series(name, *labels).inc(count - (sent or 0))

    def _series(self, name: str, *labels: Any) -> Any:
        own = dict(zip(METRICS[name][1], labels, strict=True))
        return self._metrics[name].labels(**self._labels, **own)
