"""Scenarios on an SGLang with the patches of ``patches/`` applied; each in a process of its own."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from tests.engine.driver import Engine, EngineConfig
from tests.engine.scenarios import random_prompts


class _Warnings(logging.Handler):
    """Keeps the warnings of SGLang's own modules."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("sglang").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _internal_state(engine: Engine) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    state: dict[str, Any] = engine.scheduler.get_internal_state(
        GetInternalStateReq()
    ).internal_state
    return state


def serve(config: dict[str, Any], requests: int, max_new_tokens: int) -> dict[str, Any]:
    """Serve all requests at once; what SGLang itself reports of it."""
    import sglang
    from sglang_cpu_engine import GRAPHS

    warnings = _Warnings()
    engine = Engine(EngineConfig(**config))
    captured = GRAPHS.captures.copy()
    run = engine.run(random_prompts(requests, longest=8), max_new_tokens)
    state = _internal_state(engine)
    return run.as_json() | {
        "leaked": engine.leaked_tokens(),
        "captured": [[*graph, count] for graph, count in sorted(captured.items())],
        "captured_while_serving": sum((GRAPHS.captures - captured).values()),
        "graphs": [[*graph, count] for graph, count in sorted(GRAPHS.replays.items())],
        "graph_rejects": state.get("graph_rejects"),
        "nccl": state.get("nccl"),
        "warnings": warnings.lines,
        "sglang": sglang.__file__,
    }


def adaptive(
    config: dict[str, Any], batches: list[int], max_new_tokens: int, rounds: int
) -> dict[str, Any]:
    """SGLang's own ``--speculative-adaptive`` at each batch, then switches without a round."""
    from sglang.srt.runtime_context import get_context
    from sglang_cpu_engine import GRAPHS

    engine = Engine(EngineConfig(**config))
    captured = GRAPHS.captures.copy()
    tokens = {}
    for batch in batches:
        prompts = random_prompts(batch, seed=batch)
        tokens[batch] = engine.run(prompts, max_new_tokens).tokens
    served = GRAPHS.replays.copy()
    draft_extends = Counter(graph.steps for graph in served.elements() if _extends(graph))

    worker, draft = engine.spec_worker, engine.spec_worker._draft_worker
    states = list(worker.adaptive_controller._states.values())
    chains: dict[int, set[int]] = {}
    entries = None
    for turn in range(rounds):
        state = states[turn % len(states)]
        worker.apply_runtime_state(state)
        chain = draft._topk1_parents_prealloc
        chains.setdefault(state.speculative_num_steps, set()).add(id(chain))
        if turn == len(states):
            entries = len(get_context().overrides_log())
    return {
        "tokens": tokens,
        "leaked": engine.leaked_tokens(),
        "captured": [[*graph, count] for graph, count in sorted(captured.items())],
        "captured_while_serving": sum((GRAPHS.captures - captured).values()),
        "graphs": [[*graph, count] for graph, count in sorted(served.items())],
        "draft_extends": draft_extends,
        "verifies": sum(n for graph, n in served.items() if graph.phase == "target_verify"),
        "graph_rejects": _internal_state(engine).get("graph_rejects"),
        "overrides_grown": len(get_context().overrides_log()) - (entries or 0),
        "chains_of_a_state": max(len(seen) for seen in chains.values()),
    }


def _extends(graph: Any) -> bool:
    return bool(graph.phase == "draft_extend")


def plugin_and_patch(
    config: dict[str, Any], settings: dict[str, Any], requests: int, max_new_tokens: int
) -> dict[str, Any]:
    """The plugin beside the patches: what each says of every verify batch."""
    from tests.engine.plugin import start

    engine, lines = start(config, settings)
    runner = engine.target_runner
    record, said = runner.graph_reject_stats.record, []

    def recorded(reason: Any, *args: Any, **kwargs: Any) -> None:
        said.append(reason.name)
        record(reason, *args, **kwargs)

    runner.graph_reject_stats.record = recorded
    run = engine.run(random_prompts(requests, longest=8), max_new_tokens)
    state = _internal_state(engine)
    return run.as_json() | {
        "plugin": state["verify_graphs"],
        "patch": state["graph_rejects"],
        "patch_said": said,
        "log": lines,
        "leaked": engine.leaked_tokens(),
    }


def plain(config: dict[str, Any], batches: list[int], max_new_tokens: int) -> dict[int, Any]:
    """Tokens without speculation."""
    engine = Engine(EngineConfig(**config))
    return {b: engine.run(random_prompts(b, seed=b), max_new_tokens).tokens for b in batches}
