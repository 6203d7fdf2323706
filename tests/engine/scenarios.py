"""Scenarios of the harness's own tests."""

from __future__ import annotations

import random
from typing import Any

from tests.engine.driver import Engine, EngineConfig


def random_prompts(count: int, *, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, none of them special."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def serve(
    config: dict[str, Any],
    prompts: list[list[int]],
    max_new_tokens: int | list[int] = 32,
    stagger: int = 0,
    then_eager: bool = False,
) -> dict[str, Any]:
    """Serve the prompts and report tokens, acceptance, leaks and graphs.

    `then_eager` serves them once more with every graph refused, below "eager".
    """
    from sglang_cpu_engine import GRAPHS

    engine = Engine(EngineConfig(**config))
    captured = sum(GRAPHS.captures.values())

    def serve_once() -> dict[str, Any]:
        GRAPHS.replays.clear()
        run = engine.run(prompts, max_new_tokens, stagger=stagger)
        return run.as_json() | {
            "leaked": engine.leaked_tokens(),
            "captures_at_start": captured,
            "captures_in_service": sum(GRAPHS.captures.values()) - captured,
            "replays": GRAPHS.phase_replays(),
            "graphs": [[*graph, count] for graph, count in sorted(GRAPHS.replays.items())],
        }

    served = serve_once()
    if then_eager:
        engine.refuse_graphs()
        assert engine.scheduler.flush_cache()
        served["eager"] = serve_once()
    return served


def serve_spoiled(
    config: dict[str, Any],
    prompts: list[list[int]],
    spoil: str,
    max_new_tokens: int | list[int] = 32,
    stagger: int = 0,
) -> dict[str, Any]:
    """Serve while the draft's KV cache or the handed-over hidden states are zeroed each round."""
    engine = Engine(EngineConfig(**config))
    step = engine.step

    def spoiled_step() -> Any:
        if spoil == "draft_kv":
            pool = engine.draft_runner.token_to_kv_pool
            for layer in range(len(pool.k_buffer)):
                pool.k_buffer[layer].zero_()
                pool.v_buffer[layer].zero_()
        elif spoil == "hidden_states":
            draft_input = engine.scheduler.running_batch.spec_info
            if draft_input is not None:
                draft_input.hidden_states.zero_()
        return step()

    engine.step = spoiled_step  # type: ignore[method-assign]
    return engine.run(prompts, max_new_tokens, stagger=stagger).as_json()


def switch_steps(
    config: dict[str, Any],
    prompts: list[list[int]],
    script: list[int],
    max_new_tokens: int | list[int] = 32,
    stagger: int = 0,
) -> dict[str, Any]:
    """Stock's own narrower states, built after start-up; the steps of each round are scripted."""
    from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
    from sglang_cpu_engine import GRAPHS

    engine = Engine(EngineConfig(**config))
    worker, draft, target = (
        engine.spec_worker,
        engine.spec_worker.draft_worker,
        engine.target_runner,
    )
    widest = worker.speculative_num_steps
    states = {
        widest: SpecRuntimeState(
            speculative_num_steps=widest,
            speculative_num_draft_tokens=worker.speculative_num_draft_tokens,
            draft_attn_backend=draft.draft_attn_backend,
            cuda_graph_runner=draft.cuda_graph_runner,
            target_attn_backend=target.attn_backend,
            target_graph_runner=target.decode_cuda_graph_runner,
            draft_extend_attn_backend=draft.draft_extend_attn_backend,
            cuda_graph_runner_for_draft_extend=draft.cuda_graph_runner_for_draft_extend,
        )
    }
    for steps in sorted(set(script) - {widest}, reverse=True):
        states[steps] = worker.build_adaptive_runtime_state(steps, steps + 1)
    rounds: list[list[int]] = []

    def activate(batch_size: int) -> None:
        steps = script[len(rounds) % len(script)]
        worker.apply_runtime_state(states[steps])
        rounds.append([batch_size, steps])

    worker.activate_step_by_batch = activate
    captured = sum(GRAPHS.captures.values())
    run = engine.run(prompts, max_new_tokens, stagger=stagger)
    return run.as_json() | {
        "leaked": engine.leaked_tokens(),
        "captures_in_service": sum(GRAPHS.captures.values()) - captured,
        "rounds": rounds,
        "captured": [[*graph, count] for graph, count in sorted(GRAPHS.captures.items())],
        "graphs": [[*graph, count] for graph, count in sorted(GRAPHS.replays.items())],
    }
