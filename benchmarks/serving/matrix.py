"""What runs, in which order, and about how long it takes: plain data, no engine in sight.

A configuration is a group of engines that live on the GPU together and the measurements taken with
them. The order is the order of importance: whoever has less time gets the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.engines import EngineSpec
from serving.models import Model

STEPS = 3
STOCK, PLAN, VERIFY, OBSERVE = "stock", "stock-plan", "verify-graphs", "observe"
STOCK_ONE_STEP = "stock-one-step"
STOCK_AGAIN, VERIFY_AGAIN = "stock-again", "verify-graphs-again"
"""Second processes of the two: what two processes of one program differ by."""
ADAPTIVE, ADAPTIVE_PLAN = "stock-adaptive", "stock-adaptive-plan"


@dataclass(frozen=True)
class Task:
    """One kind of measurement; ``roles`` are the engines it cannot do without."""

    kind: str
    roles: tuple[str, ...]
    seconds: float
    prompt: int = 0
    batches: tuple[int, ...] = ()
    pairs: int = 0
    new_tokens: int = 0
    turns: int = 1
    """Turns of each side within one pair; a sample is all turns of a side."""

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.prompt}" if self.prompt else self.kind


@dataclass(frozen=True)
class Configuration:
    """Engines that are up together, in boot order, and what is measured with them."""

    key: str
    attention: str
    model: Model
    engines: tuple[EngineSpec, ...]
    tasks: tuple[Task, ...]
    boot_seconds: float
    ladder: str = "default"
    prefill_graphs: bool = False

    @property
    def seconds(self) -> float:
        return self.boot_seconds + sum(task.seconds for task in self.tasks)


@dataclass(frozen=True)
class Scale:
    """Sizes of a whole run: a real GPU, or the smoke test of the code path."""

    attentions: tuple[str, ...]
    base: dict[str, Any]
    batches: tuple[int, ...]
    long_batches: tuple[int, ...]
    dummy_batches: tuple[int, ...]
    dummy_long_batches: tuple[int, ...]
    cut_batches: tuple[int, ...]
    cut_to: int
    groups: tuple[int, ...]
    """Batches in which all prompts are served in turn, to compare tokens."""
    pinned_batches: tuple[int, ...]
    pairs: int
    turns: int
    prompt: int
    long_prompt: int
    new_tokens: int
    dummy_new_tokens: int
    max_batch: int
    real_kv_tokens: int
    dummy_kv_tokens: int
    prefill_ladder: tuple[int, ...]
    default_ladder: tuple[int, ...] | None
    """None: whatever SGLang chooses."""
    boot_timeout: float
    switches: int = 1000


H200 = Scale(
    attentions=("fa3", "triton", "flashinfer"),
    base={
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.9,
    },
    batches=(1, 3, 8, 12, 16, 20, 32, 48),
    long_batches=(1, 3, 16, 48),
    dummy_batches=(1, 2, 3, 4, 8, 12, 16, 20, 32, 40, 48),
    dummy_long_batches=(1, 3, 8, 16),
    cut_batches=(8, 12, 20, 32, 48),
    cut_to=8,
    groups=(48, 24, 18, 12, 6),
    pinned_batches=(1, 8, 12, 48),
    pairs=5,
    turns=4,
    prompt=256,
    long_prompt=8000,
    new_tokens=128,
    dummy_new_tokens=64,
    max_batch=48,
    real_kv_tokens=440_000,
    dummy_kv_tokens=170_000,
    prefill_ladder=(64, 256, 1024, 4096),
    default_ladder=None,
    boot_timeout=300,
)

SMOKE = Scale(
    attentions=("intel_amx",),
    base={
        "device": "cpu",
        "dtype": "float32",
        "mem_fraction_static": 0.3,
    },
    batches=(1, 2, 3),
    long_batches=(3,),
    dummy_batches=(2,),
    dummy_long_batches=(1,),
    cut_batches=(3,),
    cut_to=2,
    groups=(6, 3),
    pinned_batches=(2,),
    pairs=2,
    turns=2,
    prompt=24,
    long_prompt=60,
    new_tokens=24,
    dummy_new_tokens=12,
    max_batch=6,
    real_kv_tokens=2048,
    dummy_kv_tokens=2048,
    prefill_ladder=(32,),
    default_ladder=(1, 2, 3, 6),
    boot_timeout=400,
    switches=200,
)


@dataclass(frozen=True)
class Matrix:
    """Every configuration of a scale, most important first."""

    scale: Scale
    real: Model
    dummy: Model
    planned_ladder: tuple[int, ...]
    adaptive_config: Path
    steps: tuple[int, ...]
    """Step counts that the release can verify."""
    chosen: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[Configuration]:
        first, *others = self.scale.attentions
        everything = [
            self.pair(first),
            self.shape(first),
            self.cut(first, self.real),
            self.capture(first),
            *(self.pair(attention) for attention in others),
            self.prefill(first),
            *(self.capture(attention) for attention in others),
            *(self.cut(attention, self.real) for attention in others),
            *(self.shape(attention) for attention in others),
            self.cut(first, self.dummy),
        ]
        for one in everything:
            if not self.chosen or any(word in f"{one.key}$" for word in self.chosen):
                yield one

    # -- configurations --------------------------------------------------------------------------

    def pair(self, attention: str) -> Configuration:
        """The real pair: throughput, tokens, divergences, pinned steps, costs of the hot path."""
        scale, both = self.scale, (STOCK, VERIFY)
        batches, few = scale.batches, (min(8, scale.max_batch),)
        tasks = (
            self._paired(scale.prompt, batches, scale.new_tokens, 0.4),
            Task("equality", (*both, PLAN), 8, scale.prompt, batches, 0, scale.new_tokens),
            Task(
                "divergence",
                (*both, PLAN, STOCK_ONE_STEP),
                32,
                scale.prompt,
                scale.groups,
                0,
                scale.new_tokens,
            ),
            Task("pinned", both, 8, scale.prompt, scale.pinned_batches, 2, scale.new_tokens),
            Task("hot_path", (VERIFY,), 5, scale.prompt, few, 0, scale.new_tokens),
            self._paired(scale.long_prompt, scale.long_batches, scale.new_tokens, 0.5, warm=6),
        )
        engines = (
            self._engine(STOCK, attention, self.real),
            self._engine(PLAN, attention, self.real, ladder=self.planned_ladder),
            self._engine(
                STOCK_ONE_STEP, attention, self.real,
                speculative_num_steps=1, speculative_num_draft_tokens=2,
            ),
            self._engine(VERIFY, attention, self.real),
            self._engine(STOCK_AGAIN, attention, self.real),
            self._engine(VERIFY_AGAIN, attention, self.real),
        )  # fmt: skip
        key = f"{attention}/{self.real.name}"
        return Configuration(key, attention, self.real, engines, tasks, 110)

    def shape(self, attention: str) -> Configuration:
        """The dummy shape: throughput where the model, not the launches, takes the time."""
        scale, new = self.scale, self.scale.dummy_new_tokens
        tasks = (
            self._paired(scale.prompt, scale.dummy_batches, new, 0.45),
            self._paired(scale.long_prompt, scale.dummy_long_batches, new, 0.5, warm=10),
        )
        engines = (
            self._engine(STOCK, attention, self.dummy),
            self._engine(VERIFY, attention, self.dummy),
        )
        key = f"{attention}/{self.dummy.name}"
        return Configuration(key, attention, self.dummy, engines, tasks, 65)

    def cut(self, attention: str, model: Model) -> Configuration:
        """Stock's ladder cut on purpose: above it stock is eager, and the plugin is not."""
        scale = self.scale
        ladder = tuple(b for b in (1, 2, 4, 8) if b <= scale.cut_to)
        args = {"cuda_graph_max_bs_decode": scale.cut_to} if scale.default_ladder is None else {}
        use = ladder if scale.default_ladder is not None else None
        new = scale.dummy_new_tokens
        tasks = (
            self._paired(scale.prompt, scale.cut_batches, new, 0.8),
            Task("observe", (OBSERVE,), 8, scale.prompt, scale.cut_batches, 0, new),
        )
        engines = tuple(
            self._engine(role, attention, model, ladder=use, **args)
            for role in (STOCK, OBSERVE, VERIFY)
        )
        key = f"{attention}/{model.name}-ladder{scale.cut_to}"
        return Configuration(
            key, attention, model, engines, tasks, 60, ladder=f"cut to {scale.cut_to}"
        )

    def capture(self, attention: str) -> Configuration:
        """Cost of capture beside stock adaptive, kernels compiled, one engine after the other."""
        adaptive = {
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(self.adaptive_config),
        }
        small = {"max_total_tokens": min(20_000, self.scale.dummy_kv_tokens)}
        adaptive |= small
        engines = (
            self._engine(VERIFY, attention, self.dummy, **small),
            self._engine(
                ADAPTIVE_PLAN, attention, self.dummy, ladder=self.planned_ladder, **adaptive
            ),
            self._engine(ADAPTIVE, attention, self.dummy, **adaptive),
        )
        key = f"{attention}/capture"
        return Configuration(key, attention, self.dummy, engines, (), 120)

    def prefill(self, attention: str) -> Configuration:
        """Prefill graphs on, no prefix cache: every measurement replays them between the rounds."""
        scale = self.scale
        args = {
            "disable_prefill_cuda_graph": False,
            "disable_radix_cache": True,
        }
        if scale.default_ladder is None:
            args["cuda_graph_bs_prefill"] = list(scale.prefill_ladder)
        engines = (
            self._engine(STOCK, attention, self.real, **args),
            self._engine(VERIFY, attention, self.real, **args),
        )
        tasks = (self._paired(scale.prompt, scale.pinned_batches, scale.new_tokens, 0.6),)
        key = f"{attention}/{self.real.name}-prefill-graphs"
        return Configuration(key, attention, self.real, engines, tasks, 90, prefill_graphs=True)

    # -- parts -----------------------------------------------------------------------------------

    def _paired(
        self, prompt: int, batches: tuple[int, ...], new: int, seconds: float, warm: float = 2
    ) -> Task:
        scale = self.scale
        runs = 2 * (scale.pairs * scale.turns + 1) * len(batches)
        return Task(
            "paired", (STOCK, VERIFY), warm + runs * seconds, prompt, batches,
            scale.pairs, new, scale.turns,
        )  # fmt: skip

    def _engine(
        self, role: str, attention: str, model: Model, ladder: tuple[int, ...] | None = None,
        **more: Any,
    ) -> EngineSpec:  # fmt: skip
        scale = self.scale
        args: dict[str, Any] = {
            "model_path": str(model.target),
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(model.draft),
            "speculative_num_steps": STEPS,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": STEPS + 1,
            "attention_backend": attention,
            "max_running_requests": scale.max_batch,
            "max_total_tokens": scale.real_kv_tokens if model.real else scale.dummy_kv_tokens,
            "disable_prefill_cuda_graph": True,
            "skip_tokenizer_init": True,
            "grammar_backend": "none",
            "random_seed": 1,
            "sleep_on_idle": True,
            "stream_interval": 1 << 20,
            "log_level": "info",
        }
        ladder = ladder or scale.default_ladder
        if ladder is not None:
            args["cuda_graph_bs_decode"] = list(ladder)
        settings: dict[str, Any] | None = None
        if role in (VERIFY, VERIFY_AGAIN):
            settings = {"strict": True}
        elif role == OBSERVE:
            settings = {"observe": True}
        engine = {
            PLAN: STOCK, STOCK_ONE_STEP: STOCK, STOCK_AGAIN: STOCK, VERIFY_AGAIN: VERIFY,
            ADAPTIVE_PLAN: ADAPTIVE,
        }.get(role, role)  # fmt: skip
        return EngineSpec(role, engine, args | scale.base | model.args | more, settings, model.env)
