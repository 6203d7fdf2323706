"""May this batch replay a captured graph, and if not, why: one decision, one named reason.

Pure: the facts of a batch come in as a ``BatchFacts``, so the same gate explains stock behaviour,
decides for the plugin and runs in tests on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sglang_verify_graphs.buckets import CapturePlan, VerifyBucket


class Phase(str, Enum):
    """The three forwards of a speculative decode round."""

    DRAFT = "draft"
    VERIFY = "verify"
    DRAFT_EXTEND = "draft_extend"


class RejectReason(str, Enum):
    """Why a forward ran eager; closed over every condition under which SGLang refuses a replay."""

    NO_RUNNER = "NO_RUNNER"
    BACKEND_NOT_GRAPHED = "BACKEND_NOT_GRAPHED"
    BATCH_ABOVE_LADDER = "BATCH_ABOVE_LADDER"
    EXACT_BATCH_MISSING = "EXACT_BATCH_MISSING"
    STEPS_NOT_CAPTURED = "STEPS_NOT_CAPTURED"
    MEMORY_BUDGET = "MEMORY_BUDGET"
    FORWARD_MODE = "FORWARD_MODE"
    DP_PEER = "DP_PEER"
    ENCODER_LENGTH_ZERO = "ENCODER_LENGTH_ZERO"
    TWO_BATCH_OVERLAP = "TWO_BATCH_OVERLAP"
    HIDDEN_MODE = "HIDDEN_MODE"
    NGRAM_TOKEN_COUNT = "NGRAM_TOKEN_COUNT"
    REPLACED_EMBEDDINGS = "REPLACED_EMBEDDINGS"
    RAGGED_VERIFY = "RAGGED_VERIFY"
    GRAPH_VARIANT_MISSING = "GRAPH_VARIANT_MISSING"
    REFUSED_UPSTREAM = "REFUSED_UPSTREAM"

    @property
    def advice(self) -> str:
        """What to change, in one clause."""
        return _ADVICE[self]


_ADVICE = {
    RejectReason.NO_RUNNER: "no graph runner was built; remove --disable-cuda-graph",
    RejectReason.BACKEND_NOT_GRAPHED: (
        "this SGLang release does not graph this phase on this attention backend; "
        "use triton, flashinfer or trtllm_mha, or a newer release"
    ),
    RejectReason.BATCH_ABOVE_LADDER: (
        "raise --verify-graph-max-batch (stock: --cuda-graph-max-bs[-decode]) "
        "or lower --max-running-requests"
    ),
    RejectReason.EXACT_BATCH_MISSING: "remove --disable-cuda-graph-padding",
    RejectReason.STEPS_NOT_CAPTURED: "add the step count to --verify-graph-steps",
    RejectReason.MEMORY_BUDGET: "raise --verify-graph-memory-gb or lower --mem-fraction-static",
    RejectReason.FORWARD_MODE: "not a verify batch; report it with the server log",
    RejectReason.DP_PEER: "another DP rank was prefilling; expected under attention DP",
    RejectReason.ENCODER_LENGTH_ZERO: "a request without encoder input shared the batch",
    RejectReason.TWO_BATCH_OVERLAP: "remove --enable-two-batch-overlap",
    RejectReason.HIDDEN_MODE: "a request asked for more hidden states than were captured",
    RejectReason.NGRAM_TOKEN_COUNT: "expected with ngram speculation",
    RejectReason.REPLACED_EMBEDDINGS: "a request replaced input embeddings",
    RejectReason.RAGGED_VERIFY: "set SGLANG_RAGGED_VERIFY_MODE=static",
    RejectReason.GRAPH_VARIANT_MISSING: "no graph of this LoRA, stream or attention variant",
    RejectReason.REFUSED_UPSTREAM: "SGLang refused for a reason this package does not know",
}


class BatchFacts(NamedTuple):
    """What the gate needs to know of one forward."""

    batch: int
    """Requests; under attention DP the largest over the ranks."""
    draft_steps: int
    is_verify: bool = True
    replaced_embeddings: bool = False
    ragged: bool = False
    dp_peer_blocked: bool = False
    encoder_length_zero: bool = False
    overlap_blocked: bool = False
    hidden_mode_above_captured: bool = False
    ngram_mismatch: bool = False


_CLEAR = BatchFacts(1, 0)[2:]
"""Everything but batch and step count as it is when nothing stands in the way."""


@dataclass(frozen=True)
class Decision:
    """Replay ``bucket``, or run eager because of ``reason``; exactly one of the two is set."""

    bucket: VerifyBucket | None
    reason: RejectReason | None = None
    detail: str = ""

    def __bool__(self) -> bool:
        return self.bucket is not None


class VerifyGate:
    """Looks decisions up for one capture plan; allocates nothing for a batch that replays."""

    def __init__(self, plan: CapturePlan) -> None:
        self.plan = plan
        self._replay = {
            (batch, width.draft_steps): Decision(bucket)
            for width in plan.widths
            for batch in range(1, max(width.batches, default=0) + 1)
            if (bucket := width.bucket_for(batch, padding=plan.padding))
        }

    def decide(self, facts: BatchFacts) -> Decision:
        """The same facts always give the same decision: both gate calls of a round agree."""
        if facts[2:] == _CLEAR and (found := self._replay.get(facts[:2])) is not None:
            return found
        reason, detail = self._reason(facts)
        return Decision(None, reason, detail)

    @property
    def upstream_reason(self) -> RejectReason:
        """Why SGLang may refuse a batch that this gate lets through.

        Without padding it looks the exact graph up, of one LoRA, stream or attention variant.
        """
        if self.plan.padding:
            return RejectReason.REFUSED_UPSTREAM
        return RejectReason.GRAPH_VARIANT_MISSING

    def _reason(self, facts: BatchFacts) -> tuple[RejectReason, str]:
        for blocked, reason in (
            (not facts.is_verify, RejectReason.FORWARD_MODE),
            (facts.replaced_embeddings, RejectReason.REPLACED_EMBEDDINGS),
            (facts.ragged, RejectReason.RAGGED_VERIFY),
        ):
            if blocked:
                return reason, ""
        width = self.plan.width(facts.draft_steps)
        if width is None:
            captured = ", ".join(map(str, sorted(self.plan.steps)))
            return RejectReason.STEPS_NOT_CAPTURED, f"{facts.draft_steps} not in {captured}"
        for blocked, reason in (
            (facts.dp_peer_blocked, RejectReason.DP_PEER),
            (facts.encoder_length_zero, RejectReason.ENCODER_LENGTH_ZERO),
            (facts.overlap_blocked, RejectReason.TWO_BATCH_OVERLAP),
            (facts.hidden_mode_above_captured, RejectReason.HIDDEN_MODE),
            (facts.ngram_mismatch, RejectReason.NGRAM_TOKEN_COUNT),
        ):
            if blocked:
                return reason, ""
        top = max(width.batches, default=0)
        if facts.batch > top:
            if width.dropped and facts.batch <= max(width.dropped):
                return RejectReason.MEMORY_BUDGET, f"{facts.batch} > {top}"
            return RejectReason.BATCH_ABOVE_LADDER, f"{facts.batch} > {top}"
        return RejectReason.EXACT_BATCH_MISSING, f"{facts.batch} not in {list(width.batches)}"
