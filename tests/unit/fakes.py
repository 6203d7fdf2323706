"""Stand-ins for what SGLang hands to the router: a forward batch and a stock runner."""

from __future__ import annotations

from typing import Any

from sglang_verify_graphs.buckets import CapturePlan, plan_capture
from sglang_verify_graphs.gate import BatchFacts, Phase, VerifyGate
from sglang_verify_graphs.metrics import Counters
from sglang_verify_graphs.runner import VerifyGraphRunner


class Batch:
    """``__dict__`` carries the decision, as on a ForwardBatch."""

    def __init__(self, batch_size: int, draft_steps: int, **facts: bool) -> None:
        self.batch_size = batch_size
        self.draft_steps = draft_steps
        self.facts = facts


class StockRunner:
    """Captured for one width; records what it was asked to do."""

    def __init__(self, draft_steps: int, largest: int = 64, *, refuses: bool = False) -> None:
        self.draft_steps = draft_steps
        self.largest = largest
        self.refuses = refuses
        self.buffers = f"buffers of {draft_steps}"
        self.raises: Exception | None = None
        self.asked = 0
        self.loaded: list[Batch] = []
        self.executed: list[tuple[Batch, tuple[Any, ...], dict[str, Any]]] = []

    def can_run_graph(self, batch: Batch) -> bool:
        self.asked += 1
        fits = batch.draft_steps == self.draft_steps and batch.batch_size <= self.largest
        return fits and not self.refuses

    def load_batch(self, batch: Batch, *args: Any, **kwargs: Any) -> str:
        self.loaded.append(batch)
        return f"loaded by {self.draft_steps}"

    def execute(self, batch: Batch, *args: Any, **kwargs: Any) -> str:
        if self.raises is not None:
            raise self.raises
        self.executed.append((batch, args, kwargs))
        return f"run by {self.draft_steps}"


def read_facts(batch: Batch) -> BatchFacts:
    return BatchFacts(batch.batch_size, batch.draft_steps, **batch.facts)


class Router:
    """A ``VerifyGraphRunner`` over stock runners, with the parts a test looks at."""

    def __init__(
        self,
        steps: tuple[int, ...] = (3, 1, 0),
        max_batch: int = 8,
        *,
        plan: CapturePlan | None = None,
        observe: bool = False,
        refuses: bool = False,
    ) -> None:
        self.plan = plan or plan_capture(steps, max_batch)
        self.stock = {k: StockRunner(k, refuses=refuses) for k in steps}
        self.counters = Counters(self.plan, log=False)
        self.runner = VerifyGraphRunner(
            Phase.VERIFY,
            self.stock,
            gate=VerifyGate(self.plan),
            counters=self.counters,
            read_facts=read_facts,
            observe=observe,
        )

    def forward(self, batch: Batch) -> str:
        """One verify as SGLang runs it: asked when prepared and when run; eager if refused."""
        if self.runner.can_run_graph(batch):
            self.runner.load_batch(batch)
        if self.runner.can_run_graph(batch):
            return self.runner.execute(batch)
        return "eager"

    @property
    def verify(self) -> dict[str, Any]:
        return self.counters.snapshot()["phases"]["verify"]
