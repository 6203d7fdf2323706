"""Routes each forward of a round to the graphs captured for its width, or names why it runs eager.

Composition only: stock runners keep capturing, padding and replaying. SGLang asks a runner twice in
one round whether a batch may replay (when it prepares the batch, and when it runs it), so the first
answer is kept on the batch and the second call returns it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sglang_verify_graphs.buckets import VerifyBucket
from sglang_verify_graphs.errors import first_line
from sglang_verify_graphs.gate import BatchFacts, Decision, Phase, VerifyGate
from sglang_verify_graphs.metrics import Counters

logger = logging.getLogger("sglang_verify_graphs")

_DECISION = "_verify_graphs_decision"


class VerifyGraphRunner:
    """Stands where SGLang keeps the graph runner of one phase, over one stock runner per width."""

    def __init__(
        self,
        phase: Phase,
        runners: Mapping[int, Any],
        *,
        gate: VerifyGate,
        counters: Counters,
        read_facts: Callable[[Any], BatchFacts],
        observe: bool = False,
    ) -> None:
        self._phase = phase
        self._runners = dict(runners)
        self._active = self._runners[max(self._runners)]
        self._gate = gate
        self._counters = counters
        self._read_facts = read_facts
        self.observe = observe

    def __getattr__(self, name: str) -> Any:
        """Whatever else SGLang reads (``bs``, ``buffers``, ...) is the active runner's."""
        return getattr(self.__dict__["_active"], name)

    def can_run_graph(self, forward_batch: Any) -> bool:
        decision = forward_batch.__dict__.get(_DECISION)
        if decision is None:
            decision = self._decide(forward_batch)
            forward_batch.__dict__[_DECISION] = decision
        return decision.bucket is not None

    def load_batch(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._route(forward_batch).load_batch(forward_batch, *args, **kwargs)

    def execute(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self._route(forward_batch)
        bucket = forward_batch.__dict__[_DECISION].bucket
        self._counters.replay(self._phase, bucket, forward_batch.batch_size)
        try:
            return runner.execute(forward_batch, *args, **kwargs)
        except Exception as error:
            logger.error(
                "[verify-graphs] replaying %s failed at draft_steps %d, batch %d (%d requests): "
                "%s; after a CUDA error this process cannot go on: restart the server without "
                "this step count (--verify-graph-steps), and report it",
                self._phase.value, bucket.draft_steps, bucket.batch, forward_batch.batch_size,
                first_line(error),
            )  # fmt: skip
            raise

    can_run, replay_prepare, replay = can_run_graph, load_batch, execute
    """What older releases call the same three."""

    def _route(self, forward_batch: Any) -> Any:
        self._active = self._runners[forward_batch.__dict__[_DECISION].bucket.draft_steps]
        return self._active

    def _decide(self, forward_batch: Any) -> Decision:
        facts = self._read_facts(forward_batch)
        decision = self._gate.decide(facts)
        if decision.bucket is not None or self.observe:
            runner = self._runners.get(facts.draft_steps, self._active)
            if runner.can_run_graph(forward_batch):
                if decision.bucket is None:
                    return Decision(VerifyBucket(facts.draft_steps, facts.batch))
                return decision
            if decision.bucket is not None:
                decision = Decision(None, self._gate.upstream_reason)
        self._counters.refuse(self._phase, decision)
        return decision
