"""How well are draft steps chosen? No speculation, every fixed step count and the policy, in turn.

All on one GPU, on requests that decode on while steps and acceptance change between two rounds.
``README.md`` says what is measured; ``--plan`` prints what would run and how long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from serve import run_header  # noqa: E402
from serving import choices  # noqa: E402
from serving.choices import ADAPTIVE, CELL, NONE, OURS, PROFILES, STATIC, Round  # noqa: E402
from serving.engines import (  # noqa: E402
    EngineFailed,
    EngineProcess,
    EngineSpec,
    RequestFailed,
    write_site,
)  # fmt: skip
from serving.matrix import H200, SMOKE, STEPS, VERIFY, Matrix  # noqa: E402
from serving.models import Model, dummy_pair, write_prompts  # noqa: E402

from sglang_verify_graphs.buckets import batch_ladder  # noqa: E402

LISTS = ("rows", "ramp", "zero", "switches", "changes", "host", "failed")
ALL_STEPS = range(STEPS + 1)
SPARE = 12
"""Seconds kept for ending engines and writing."""
NOTES = {
    "acceptance": "each draft by a draw of its own, keyed by request and position "
    "(benchmarks/forced.py), alike in all engines; its eight kernels cost rounds of 1 and more "
    "steps some 0.02 ms, those of 0 steps and of engine 'none' nothing",
    "tok_s": "tokens committed over the time of the rounds; expected_tok_s takes the mean of the "
    "forced acceptance in place of what was drawn, and is what the summary compares",
    "itl": "time between the commits of two rounds in the scheduler, which every request of the "
    "batch waits for; not streamed times",
    "segments": "requests decode on while steps are pinned or left to the policy; the first "
    f"{choices.SKIP} rounds after each change are left out; the policy is told nothing of rounds "
    "in which steps were pinned",
    "changes": "the rounds from a new acceptance to verified requests enough; choice_* weighs the "
    "steps chosen by the cell's own fixed round times, 1 is the best fixed step count",
    "zero": "cold skips the draft extend; the bound of warm is D / (D + E), D a round of engine "
    "'none', E the draft extend between two CUDA events in rounds of their own",
    "switches": "a script changes steps every 6 rounds; p99_ratio is the p99 of round times, each "
    "over the median of its step count, against the worst of the fixed step counts",
    "policy_us": "host time a round of table, choice and feeding the policy; head_us is the whole "
    "head of the round, switches and the round timer among it",
}


@dataclass(frozen=True)
class Scale:
    batches: tuple[int, ...]
    long_batches: tuple[int, ...]
    few: tuple[int, ...]
    """Batches of the parts that look at one thing."""
    ramp: tuple[int, ...]
    repeats: int
    pinned: int
    """Rounds of a segment with pinned steps, head included."""
    chosen: int
    """And of one that is left to the policy."""
    level: int
    first: int
    """Least rounds to settle in where a batch is met for the first time."""
    verified: int
    most: int
    """Most rounds to settle in: without drafts nothing is verified."""
    prompt: int
    long_prompt: int


GPU = Scale(
    (8, 48, 1, 32, 4, 16), (1, 8), (1, 8, 48), (1, 4, 8, 16, 32, 48, 48, 32, 16, 8, 4, 1),
    3, 30, 90, 120, 150, 400, 450, 256, 8000,
)  # fmt: skip
CPU = Scale((1, 3), (2,), (2,), (1, 3, 3, 1), 2, 12, 24, 24, 120, 60, 160, 24, 60)
RAMP = ("high", "low")
"""Acceptance of the first half of the ramp and of the second."""


class Directed(EngineProcess):
    """An engine with a director in place of the mere probe."""

    def _environment(self) -> dict[str, str]:
        env = super()._environment()
        write_site(self.folder, "serving.director:load")
        return env


@dataclass(frozen=True)
class Segment:
    steps: int | list[int] | None
    """None: whoever chooses."""
    profile: str
    rounds: int
    verified: int = 0
    cap: int = 0
    cold: bool = False
    extend: bool = False

    def told(self) -> dict[str, Any]:
        return {**vars(self), "profile": PROFILES[self.profile], "cap": self.cap or self.rounds}


@dataclass(frozen=True)
class Led:
    """What came of a script."""

    segments: list[list[Round]]
    whole: list[list[Round]]
    """The heads of the segments included."""
    extend_ms: float | None
    host_us: dict[str, float]
    policy_rounds: int


class Bench:
    """The engines of one model, and the parts that are measured on them."""

    def __init__(self, arguments: argparse.Namespace, state: Path, store: Store) -> None:
        self.smoke = arguments.smoke
        self.scale, self.sizes = (CPU, SMOKE) if self.smoke else (GPU, H200)
        self.state = state
        self.store = store
        self.engines: dict[str, Directed] = {}
        self.model: Model | None = None
        self._port = arguments.port
        self._warm: dict[str, int] = {}
        self._profile = "none"

    # -- engines ---------------------------------------------------------------------------------

    def start(self, model: Model, *roles: str) -> None:
        """Boot what is not up; of another model nothing stays."""
        if self.model != model:
            self.stop()
        self.model = model
        new = {}
        for role in roles:
            if role not in self.engines:
                self._port += 7
                folder = self.state / "engines" / f"{model.name}-{role}"
                cores = sorted(os.sched_getaffinity(0))
                new[role] = self.engines[role] = Directed(
                    self._spec(role), folder, self._port, cores
                )
                new[role].start()
        for role, engine in new.items():
            state = engine.boot(self.sizes.boot_timeout)
            print(f"{model.name} {role}: up after {engine.booted_in:.0f} s", flush=True)
            if role == OURS and state["verify_graphs"]["control"] != "policy":
                raise EngineFailed(role, f"the policy does not choose: {state['verify_graphs']}")

    def _spec(self, role: str) -> EngineSpec:
        model, sizes = self.model, self.sizes
        assert model is not None
        config = self.state / "adaptive.json"
        config.write_text(json.dumps({"1": {"candidate_steps": list(ALL_STEPS)}}))
        matrix = Matrix(sizes, model, model, batch_ladder(sizes.max_batch), config, (), ())
        more: dict[str, Any] = {"max_total_tokens": 16384} if self.smoke else {}
        if role == ADAPTIVE:
            more |= {"speculative_adaptive": True, "speculative_adaptive_config": str(config)}
        spec = matrix._engine(VERIFY if role == OURS else role, sizes.attentions[0], model, **more)
        args = spec.args
        if role == NONE:
            args = {k: v for k, v in args.items() if not k.startswith("speculative")}
        return replace(spec, args=args)

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.stop()
        self.engines, self._warm = {}, {}

    def lead(self, role: str, prompt: int, batch: int, script: list[Segment]) -> Led:
        """Have one batch decode through the script."""
        assert self.model is not None
        engine, most = self.engines[role], self.sizes.max_batch
        folder = self.state / "prompts"
        folder.mkdir(exist_ok=True)
        prompts = write_prompts(self.model, folder, prompt, most, [])
        if self._warm.get(role) != prompt:
            rows = range(most if prompt == self.scale.prompt else max(self.scale.long_batches))
            engine.warm(prompts, rows)
            self._warm[role] = prompt
        engine.command("script", segments=[one.told() for one in script], batch=batch)
        rounds = sum(max(one.rounds, one.cap) for one in script) + 30
        engine.generate(prompts, range(batch), rounds * (1 if role == NONE else STEPS + 1), 300)
        led = engine.command("led")
        if not led["done"]:
            raise RequestFailed(f"{role}: batch {batch} ended before its script")
        log, count = led["rounds"], len(script)
        return Led(
            choices.segments(log, count), choices.segments(log, count, 0), led["extend_ms"],
            led["host_us"], led["policy_rounds"],
        )  # fmt: skip

    # -- parts -----------------------------------------------------------------------------------

    def cell(self, prompt: int, batch: int, profile: str) -> None:
        """Every engine in turn, the policy once it has settled on this acceptance."""
        assert self.model is not None
        scale, name = self.scale, self.model.name
        cell = (name, prompt, batch, profile)
        found: dict[str, list[list[Round]]] = {}
        settled: list[Round] = []
        first = not any(
            (r["model"], r["prompt"], r["batch"]) == cell[:3] for r in self.store.data["rows"]
        )
        for repeat in range(scale.repeats):
            named = [(f"{STATIC}{k}", Segment(k, profile, scale.pinned)) for k in ALL_STEPS]
            named.append((OURS, Segment(None, profile, scale.chosen)))
            turn = repeat * 2 % len(named)
            named = [*named[turn:], *named[:turn]]
            if repeat == 0:
                least = scale.first if first else 10
                settle = Segment(None, profile, least, scale.verified, scale.most)
                named = [("settle", settle), named[-1], *named[:-1]]
            led = self.lead(OURS, prompt, batch, [one for _, one in named])
            for at, (engine, _) in enumerate(named):
                if engine == "settle":
                    settled = led.whole[at]
                else:
                    found.setdefault(engine, []).append(led.segments[at])
            plain = self.lead(NONE, prompt, batch, [Segment(0, profile, scale.pinned)])
            found.setdefault(NONE, []).append(plain.segments[0])
            self._host(batch, led)
        for engine, samples in found.items():
            self.store.add("rows", choices.row(engine, cell, samples), ("engine", *CELL))
        of = choices.cells(self.store.data["rows"])[cell]
        change = {
            **dict(zip(CELL, cell, strict=True)),
            "before": self._profile,
            "rounds": len(settled),
            "verified": sum(batch for one in settled if one.steps),
            "verified_wanted": scale.verified,
            "first_at_this_batch": first,
            "choice_meanwhile": choices.choice(settled, of, profile),
            "choice_after": choices.choice(found[OURS][0], of, profile),
            "steps_meanwhile": choices.histogram(settled),
        }
        self.store.add("changes", change, CELL)
        self._profile = profile
        ours, (name, value) = of[OURS]["expected_tok_s"], choices.best(of)
        print(
            f"  {cell}: {name} {value:.1f}, ours {ours:.1f} tok/s, {ours / value:.3f}, "
            f"{of[OURS]['steps_histogram']}",
            flush=True,
        )

    def _host(self, batch: int, led: Led) -> None:
        assert self.model is not None
        us = {name: round(value, 3) for name, value in led.host_us.items()}
        entry = {
            "model": self.model.name,
            "batch": batch,
            "rounds": led.policy_rounds,
            "policy_us": round(us["agree"] + us["choose"] + us["sample"] + us["verified"], 3),
            "head_us": us["head"],
            "parts_us": us,
        }
        self.store.add("host", entry, ("model", "batch"))

    def ramp(self) -> None:
        """Batches up and down again, the acceptance another one on the way down."""
        assert self.model is not None
        scale = self.scale
        self.store.data["ramp"] = []
        for level, batch in enumerate(scale.ramp):
            profile = RAMP[level >= len(scale.ramp) // 2]
            pinned = [Segment(k, profile, scale.pinned) for k in ALL_STEPS]
            script = [Segment(None, profile, scale.level), *pinned]
            led = self.lead(OURS, scale.prompt, batch, script)
            rounds = led.whole[0]
            cell = (self.model.name, scale.prompt, batch, profile)
            entry = choices.row(OURS, cell, [rounds]) | {
                "level": level,
                "seconds": round(sum(one.ms for one in rounds) / 1e3, 4),
                "static": {
                    f"{STATIC}{k}": round(choices.speed(led.segments[1 + k], profile, batch), 2)
                    for k in ALL_STEPS
                },
            }
            self.store.add("ramp", entry, ("level",))
        self._profile = RAMP[1]

    def zero(self, batch: int) -> None:
        """0 draft steps: what a plain decode round takes, and what the draft extend adds."""
        scale, times = self.scale, dict[str, list[list[Round]]]()
        extend: list[float] = []
        for _ in range(scale.repeats):
            timed = Segment(0, "none", scale.pinned, extend=True)
            warm = Segment(0, "none", 2 * scale.pinned)
            for name, role, script in (
                ("none", NONE, [warm]),
                ("warm", OURS, [warm, timed]),
                ("cold", OURS, [replace(warm, cold=True)]),
            ):
                led = self.lead(role, scale.prompt, batch, script)
                times.setdefault(name, []).append(led.segments[0])
                extend += [led.extend_ms] if name == "warm" and led.extend_ms else []
        ms = {
            name: choices.row(name, ("", 0, batch, "none"), samples)["round_ms"]
            for name, samples in times.items()
        }
        e = sorted(extend)[len(extend) // 2]
        entry = {
            "batch": batch,
            "round_ms": ms,
            "draft_extend_ms": round(e, 4),
            "cold_of_none": round(ms["none"] / ms["cold"], 4),
            "warm_of_none": round(ms["none"] / ms["warm"], 4),
            "bound_of_warm": round(ms["none"] / (ms["none"] + e), 4),
            "warm_of_bound": round((ms["none"] + e) / ms["warm"], 4),
        }
        self.store.add("zero", entry, ("batch",))

    def switches(self, batch: int) -> None:
        """Round times where the steps change every few rounds, against fixed steps."""
        rounds, script = 3 * self.scale.pinned, [k for k in (3, 0, 2, 1) for _ in range(6)]
        steps = [*ALL_STEPS, script]
        named = [Segment(k, "mid", rounds * (2 if k is script else 1)) for k in steps]
        led = self.lead(OURS, self.scale.prompt, batch, named)
        typical = {
            k: choices.percentile([one.ms for one in led.segments[k]], 0.5) for k in ALL_STEPS
        }
        over = [
            choices.percentile([one.ms / typical[one.steps] for one in segment], 0.99)
            for segment in led.segments
        ]
        entry = {
            "batch": batch,
            "itl_p99_ms": {
                str(k): round(choices.percentile([one.ms for one in segment], 0.99), 4)
                for k, segment in zip((*ALL_STEPS, "script"), led.segments, strict=True)
            },
            "p99_over_median": {str(k): round(over[k], 4) for k in ALL_STEPS},
            "p99_over_median_script": round(over[-1], 4),
            "p99_ratio": round(over[-1] / max(over[:-1]), 4),
            "switches": sum(a.steps != b.steps for a, b in pairwise(led.whole[-1])),
        }
        self.store.add("switches", entry, ("batch",))

    def adaptive(self, batch: int, profile: str) -> None:
        """SGLang's own adaptive steps in the same cell."""
        assert self.model is not None
        scale = self.scale
        script = [
            Segment(None, profile, 10, scale.verified, scale.most),
            Segment(None, profile, scale.repeats * scale.pinned),
        ]
        led = self.lead(ADAPTIVE, scale.prompt, batch, script)
        cell = (self.model.name, scale.prompt, batch, profile)
        row = choices.row(ADAPTIVE, cell, [led.segments[1]])
        self.store.add("rows", row, ("engine", *CELL))


class Store:
    """The result file, written after everything that is added."""

    def __init__(self, path: Path, header: dict[str, Any], resume: bool, copy_to: Path | None):
        self.path, self._copy_to = path, copy_to
        self.data: dict[str, Any] = {**header, **{name: [] for name in LISTS}, "done": []}
        if resume and path.exists():
            kept = json.loads(path.read_text())
            self.data |= {name: kept[name] for name in (*LISTS, "done")} | {"failed": []}
            self.data["commands"] = [*kept.get("commands", [kept["command"]]), header["command"]]
        self.write()

    def add(self, name: str, entry: dict[str, Any], identity: tuple[str, ...]) -> None:
        self.data[name] = [
            old for old in self.data[name] if any(old[field] != entry[field] for field in identity)
        ] + [entry]
        self.write()

    def write(self) -> None:
        self.data["date"] = datetime.now(timezone.utc).isoformat("T", "seconds")
        self.data |= {"notes": NOTES, "profiles": PROFILES}
        self.data["oracle"] = choices.oracle(self.data["rows"])
        self.data["summary"] = choices.summary(self.data)
        text = json.dumps(self.data, indent=1) + "\n"
        for path in (self.path, self._copy_to and self._copy_to / self.path.name):
            if path:
                path.with_suffix(".part").write_text(text)
                path.with_suffix(".part").replace(path)


@dataclass(frozen=True)
class Task:
    key: str
    seconds: float
    model: str
    roles: tuple[str, ...]
    do: Callable[[Bench], None]


BOOT = {"llama-8b": (110, 25, 25), "moe": (60, 30, 25), "tiny-dummy": (20, 20, 20)}
"""Seconds of the first engine, and of each further one; SGLang compiles kernels in the first."""


def tasks(scale: Scale, model: str) -> Iterator[Task]:
    """Everything, in the order of its worth."""
    both = (NONE, OURS)

    def cells(part: str, prompt: int, batches: tuple[int, ...], name: str) -> Iterator[Task]:
        for batch in batches:
            for profile in PROFILES:
                yield Task(
                    f"{part}/{batch}/{profile}", 9 if batch == 1 else 7, name, both,
                    lambda bench, b=batch, p=profile: bench.cell(prompt, b, p),
                )  # fmt: skip

    def few(part: str, seconds: float, do: Callable[[Bench, int], None]) -> Iterator[Task]:
        for batch in scale.few:
            yield Task(f"{part}/{batch}", seconds, model, both, lambda bench, b=batch: do(bench, b))

    yield from cells("cells", scale.prompt, scale.batches, model)
    yield Task("ramp", 1.7 * len(scale.ramp), model, both, Bench.ramp)
    yield from few("zero", 6, Bench.zero)
    yield from few("switches", 5, Bench.switches)
    yield from cells("long", scale.long_prompt, scale.long_batches, model)
    for batch in scale.batches:
        for profile in PROFILES:
            yield Task(
                f"adaptive/{batch}/{profile}", 2.5, model, (ADAPTIVE,),
                lambda bench, b=batch, p=profile: bench.adaptive(b, p),
            )  # fmt: skip
    if model != "tiny-dummy":
        yield from cells("moe", scale.prompt, scale.few, "moe")


def models(state: Path, smoke: bool) -> dict[str, Model]:
    if smoke:
        made = [
            dummy_pair(
                "tiny-dummy", state / "models", layers=8, hidden=64, heads=4, kv_heads=4, inner=64,
                vocab=512, context=2048,
            )
        ]  # fmt: skip
    else:
        shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "inner": 14336}
        dense = dummy_pair("llama-8b", state / "models", **shape, vocab=32000, context=16384)
        moe = dummy_pair(
            "moe", state / "models", layers=24, hidden=2048, heads=16, kv_heads=4, inner=6144,
            vocab=32000, context=16384,
        )  # fmt: skip
        _experts(moe.target / "config.json")
        made = [dense, moe]
    return {model.name: replace(model, env={}) for model in made}


def _experts(path: Path) -> None:
    """128 small experts, 8 of them active, as in Qwen3-30B-A3B, on half of its layers."""
    config = json.loads(path.read_text()) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    }
    path.write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path("policy"), help="folder of this run")
    parser.add_argument("--copy-to", type=Path, help="folder that gets a copy of the result file")
    parser.add_argument("--budget", type=float, default=560, help="seconds this call may take")
    parser.add_argument("--resume", action="store_true", help="keep what --state already holds")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of tasks' names")
    parser.add_argument("--plan", action="store_true", help="print what would run, run nothing")
    parser.add_argument("--port", type=int, default=32000, help="first port of the engines")
    parser.add_argument("--smoke", action="store_true", help="the code path, on a CPU, in minutes")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget - SPARE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    scale, model = (CPU, "tiny-dummy") if arguments.smoke else (GPU, "llama-8b")
    wanted = [
        task
        for task in tasks(scale, model)
        if not arguments.only or task.key.startswith(tuple(arguments.only))
    ]
    if arguments.plan:
        for task in wanted:
            print(f"{task.key:<24}{task.seconds:>6.1f} s  {task.model} {', '.join(task.roles)}")
        print(f"{sum(task.seconds for task in wanted):.0f} s and boots {BOOT}")
        return
    state = arguments.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    if arguments.copy_to:
        arguments.copy_to.mkdir(parents=True, exist_ok=True)
    if arguments.smoke:
        from tests.engine.worker import engine_env

        os.environ.update(engine_env(graphs=True))
    header = run_header(arguments.smoke)
    path = state / f"policy-{header.pop('slug')}-{header['sglang']}.json"
    store = Store(path, header, arguments.resume, arguments.copy_to)
    bench, pairs = Bench(arguments, state, store), models(state, arguments.smoke)
    try:
        _run(wanted, bench, pairs, deadline)
    finally:
        bench.stop()
        store.write()
    print(choices.table(store.data))
    print(f"results: {path}")


def _run(wanted: list[Task], bench: Bench, pairs: dict[str, Model], deadline: float) -> None:
    dead: set[tuple[str, ...]] = set()
    for task in wanted:
        if task.key in bench.store.data["done"] or (task.model, *task.roles) in dead:
            continue
        up = bench.engines if bench.model == pairs[task.model] else {}
        boots = sorted(BOOT[task.model], reverse=not up)
        need = task.seconds + sum(boots[: len(set(task.roles) - set(up))])
        if need > deadline - time.monotonic():
            print(f"{task.key}: needs {need:.0f} s, {deadline - time.monotonic():.0f} s left")
            continue
        try:
            bench.start(pairs[task.model], *task.roles)
            task.do(bench)
            bench.store.data["done"].append(task.key)
        except Exception as error:
            tail = getattr(error, "log_tail", "") or traceback.format_exc()
            print(f"FAILED {task.key}: {error}\n{tail[-2000:]}", flush=True)
            entry = {"what": f"{task.key}: {error}", "detail": tail[-4000:]}
            bench.store.add("failed", entry, ("what",))
            if isinstance(error, EngineFailed):
                dead.add((task.model, *task.roles))
                bench.stop()
        bench.store.write()


if __name__ == "__main__":
    main()
