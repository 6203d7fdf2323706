"""The refusal matrix: server modes in which the feature is off, or keeps the configured width only.

Each row names the mode as a user would find it on the command line. ``docs/support.md`` is
generated from these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

EAGLE_WORKERS = ("EAGLEWorker", "EAGLEWorkerV2")


@dataclass(frozen=True)
class ServerFacts:
    """What decides whether the feature can run; read from a live scheduler by ``compat``."""

    algorithm: str | None
    topk: int
    draft_steps: int
    draft_tokens: int
    max_running_requests: int
    tp_size: int = 1
    pp_size: int = 1
    attention_dp: bool = False
    disaggregation: str = "null"
    two_batch_overlap: bool = False
    pdmux: bool = False
    multi_layer: bool = False
    mamba: bool = False
    lora: bool = False
    hisparse: bool = False
    deterministic: bool = False
    adaptive: bool = False
    plan_stream: bool = False
    skip_zero_extend: bool = False
    return_hidden_states: bool = False
    captured_prefill_metadata: bool = False
    decode_graphs: bool = True
    zero_steps: bool = True
    """Whether SGLang can verify a round without drafts."""
    one_width: bool = False
    """Whether this SGLang release serves no second width."""
    padding: bool = True
    alignment: int = 1
    worker: str = "EAGLEWorkerV2"


@dataclass(frozen=True)
class Limit:
    """One row of the matrix."""

    mode: str
    applies: Callable[[ServerFacts], bool]
    why: str
    fix: str
    fixed_width: bool = False
    """True: the configured width is still served, other step counts are refused."""

    @property
    def message(self) -> str:
        left = "only the configured draft steps are captured" if self.fixed_width else "off"
        return f"{left}: {self.mode}: {self.why}; {self.fix}"


LIMITS: tuple[Limit, ...] = (
    Limit(
        "no speculation",
        lambda f: f.algorithm is None,
        "there is no target verify",
        "start with --speculative-algorithm EAGLE3 and a draft model",
    ),
    Limit(
        "other speculative algorithm",
        lambda f: f.algorithm is not None and f.algorithm not in ("EAGLE", "EAGLE3"),
        "only EAGLE and EAGLE3 verify through a chain of this kind",
        "use --speculative-algorithm EAGLE or EAGLE3",
    ),
    Limit(
        "multi-layer EAGLE / MTP",
        lambda f: f.multi_layer or f.worker not in EAGLE_WORKERS,
        "its worker cannot build a second width",
        "remove --enable-multi-layer-eagle",
    ),
    Limit(
        "decode graphs disabled",
        lambda f: not f.decode_graphs,
        "SGLang built no graph runner",
        "remove --disable-cuda-graph",
    ),
    Limit(
        "--speculative-adaptive",
        lambda f: f.adaptive,
        "two controllers would switch the same worker",
        "remove one of the two flags",
    ),
    Limit(
        "attention DP",
        lambda f: f.attention_dp,
        "ranks choose widths apart, so their collectives would not match",
        "remove --enable-dp-attention",
    ),
    Limit(
        "PD disaggregation",
        lambda f: f.disaggregation != "null",
        "draft state crosses servers at the configured width",
        "remove --disaggregation-mode",
    ),
    Limit(
        "pipeline parallelism",
        lambda f: f.pp_size > 1,
        "stages relay the configured width",
        "use --pp-size 1",
    ),
    Limit(
        "two-batch overlap",
        lambda f: f.two_batch_overlap,
        "a switch would drop its attention wrapper",
        "remove --enable-two-batch-overlap",
    ),
    Limit(
        "PD multiplexing",
        lambda f: f.pdmux,
        "a switch does not reach its stream groups",
        "remove --enable-pdmux",
    ),
    Limit(
        "hybrid (mamba, linear attention) model",
        lambda f: f.mamba,
        "state scratch is sized for one width",
        "serve it without --enable-verify-graphs",
    ),
    Limit(
        "LoRA",
        lambda f: f.lora,
        "a switch does not rebuild LoRA graph metadata",
        "remove --enable-lora",
    ),
    Limit(
        "HiSparse",
        lambda f: f.hisparse,
        "its swap state has one size",
        "remove --enable-hisparse",
    ),
    Limit(
        "plan stream",
        lambda f: f.plan_stream,
        "verify is planned on another stream than the one that switches",
        "unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    ),
    Limit(
        "prefill graphs with captured attention metadata",
        lambda f: f.captured_prefill_metadata,
        "they hold the start-up backend's metadata",
        "use another attention backend",
    ),
    Limit(
        "SGLang of before its adaptive v2 worker",
        lambda f: f.one_width,
        "its workers cannot switch to another width",
        "install a newer SGLang release for several widths",
        fixed_width=True,
    ),
    Limit(
        "tree drafts (topk > 1)",
        lambda f: f.topk != 1 or f.draft_tokens != f.draft_steps + 1,
        "a tree has no step count to cut",
        "use --speculative-eagle-topk 1 for several widths",
        fixed_width=True,
    ),
    Limit(
        "--enable-return-hidden-states",
        lambda f: f.return_hidden_states,
        "a narrower verify's hidden states share graph memory with the draft extend after it",
        "remove it for several widths",
        fixed_width=True,
    ),
    Limit(
        "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
        lambda f: f.skip_zero_extend,
        "rounds without drafts would leave holes in the draft KV",
        "unset it and ask for --verify-graph-cold-zero, which keeps account of them",
        fixed_width=True,
    ),
    Limit(
        "deterministic inference",
        lambda f: f.deterministic,
        "seeded sampling is indexed by width",
        "expected with --enable-deterministic-inference",
        fixed_width=True,
    ),
)


def limits_of(facts: ServerFacts) -> tuple[Limit, ...]:
    """Rows that apply, those that switch the feature off first."""
    found = [limit for limit in LIMITS if limit.applies(facts)]
    return tuple(sorted(found, key=lambda limit: limit.fixed_width))
