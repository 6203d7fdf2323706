"""Scenarios of the plugin on a real scheduler; each runs in a process of its own."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from tests.engine.driver import Engine, EngineConfig
from tests.engine.scenarios import random_prompts


class _Lines(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def start(config: dict[str, Any], settings: dict[str, Any] | None) -> tuple[Engine, list[str]]:
    """An engine with the plugin (`settings`) or without (None), and the package's log lines."""
    import sglang_verify_graphs

    handler = _Lines()
    log = logging.getLogger("sglang_verify_graphs")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    if settings is not None:
        sglang_verify_graphs.enable(**settings)
    engine = Engine(EngineConfig(**config))
    if settings is not None:
        _check_kv_before_verify(engine)
    return engine, handler.lines


def _check_kv_before_verify(engine: Engine) -> None:
    """Every verify must find room for its whole width in every request's KV."""
    worker = engine.spec_worker
    if worker is None or not hasattr(worker, "verify"):
        return
    verify = worker.verify

    def checked(batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        for request, length in zip(batch.reqs, lengths, strict=True):
            kv = getattr(request, "kv", request)
            assert kv.kv_allocated_len >= length + batch.spec_info.draft_token_num
        return verify(batch, *args, **kwargs)

    worker.verify = checked


def serve(
    config: dict[str, Any],
    settings: dict[str, Any] | None,
    requests: int = 8,
    max_new_tokens: int = 24,
    stagger: int = 2,
    longest: int = 30,
) -> dict[str, Any]:
    """Serve random prompts; tokens, acceptance, status, and what was captured when."""
    from sglang_cpu_engine import GRAPHS

    import sglang_verify_graphs

    engine, lines = start(config, settings)
    captured = sum(GRAPHS.captures.values())
    prompts = random_prompts(requests, longest=longest)
    limits = [max_new_tokens + 5 * (i % 4) for i in range(requests)]
    run = engine.run(prompts, limits, stagger=stagger)
    return run.as_json() | {
        "status": sglang_verify_graphs.status(),
        "log": lines,
        "leaked": engine.leaked_tokens(),
        "captured_while_serving": sum(GRAPHS.captures.values()) - captured,
        "phase_replays": GRAPHS.phase_replays(),
        "graphs": [[*graph, count] for graph, count in sorted(GRAPHS.replays.items())],
        "internal_state": _internal_state(engine) if settings is not None else None,
    }


def _internal_state(engine: Engine) -> dict[str, Any]:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    answer = engine.scheduler.get_internal_state(GetInternalStateReq())
    return answer.internal_state["verify_graphs"]


def every_batch_and_steps(
    config: dict[str, Any], settings: dict[str, Any] | None, steps: list[int], batches: list[int]
) -> dict[str, Any]:
    """The same prompts at every fixed batch and, with the plugin, at every pinned step count."""
    from sglang_verify_graphs.policy import FixedSteps

    engine, _ = start(config, settings)
    results: dict[str, Any] = {}
    for k in steps if settings is not None else [0]:
        if settings is not None:
            engine.spec_worker.adaptive_controller.policy = FixedSteps(k)
        for batch in batches:
            run = engine.run(random_prompts(batch, seed=batch), 12)
            results[f"{batch}x{k}"] = {
                "tokens": run.tokens,
                "histogram": run.histogram if config.get("draft") else [],
            }
    status = _internal_state(engine) if settings is not None else {}
    return {"results": results, "status": status, "leaked": engine.leaked_tokens()}


def switches(config: dict[str, Any], settings: dict[str, Any], count: int) -> dict[str, Any]:
    """`count` switches without a round: nothing may grow."""
    import sys

    engine, _ = start(config, settings)
    controller = engine.spec_worker.adaptive_controller
    sizes = lambda: [  # noqa: E731
        controller.engine.overrides_logged(),
        *(sys.getsizeof(v) for v in vars(controller).values()),
        len(controller.states),
    ]
    controller.activate_step_by_batch(1)
    before = sizes()
    for _ in range(count):
        controller.activate_step_by_batch(1)
    return {"before": before, "after": sizes(), "rounds": controller.counters.rounds}


def steered(
    config: dict[str, Any],
    settings: dict[str, Any],
    changes: list[tuple[int, dict[str, int]]],
    requests: int = 4,
    max_new_tokens: int = 120,
) -> dict[str, Any]:
    """Serve while `set_internal_state` asks for something else before some of the rounds."""
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang_cpu_engine import GRAPHS

    engine, lines = start(config, settings)
    controller = engine.spec_worker.adaptive_controller
    parts: list[dict[str, Any]] = []

    def begin() -> None:
        GRAPHS.replays.clear()
        parts.append({"rounds": [], "rounds_counted": -controller.counters.rounds})

    def end() -> None:
        observed = controller.measured.chooser.acceptance.observed
        parts[-1] |= {
            "replays": GRAPHS.phase_replays(),
            "stock_runner": "sglang_verify_graphs" not in type(controller._in_charge).__module__,
            "counted": parts[-1].pop("rounds_counted") + controller.counters.rounds,
            "observed": observed - sum(part["observed"] for part in parts[:-1]),
        }

    asked, head = dict(changes), controller.activate_step_by_batch
    seen = 0

    def recorded(batch: int) -> None:
        nonlocal seen
        if seen in asked:
            end()
            request = SetInternalStateReq(server_args=dict(asked[seen]))
            answer = engine.scheduler.set_internal_state(request)
            begin()
            parts[-1]["updated"] = answer.updated
        seen += 1
        head(batch)
        parts[-1]["rounds"].append([batch, engine.spec_worker.speculative_num_steps])

    controller.activate_step_by_batch = recorded
    begin()
    run = engine.run(random_prompts(requests), max_new_tokens)
    end()
    return run.as_json() | {
        "parts": parts,
        "log": lines,
        "status": _internal_state(engine),
        "uncached": [bool(r.skip_radix_cache_insert) for r in engine.requests],
        "leaked": engine.leaked_tokens(),
    }


def odd_width(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A verify batch of a width nobody captured, offered to the router (case 5)."""
    engine, _ = start(config, settings)
    router = engine.target_runner.decode_cuda_graph_runner
    seen: list[Any] = []
    ask = router._read_facts
    router._read_facts = lambda batch: (seen.append(batch), ask(batch))[1]
    engine.run(random_prompts(2), 8)
    batch = seen[-1]
    spec = dataclasses.replace(batch.spec_info, draft_token_num=2, num_tokens_per_req=2)
    other = dataclasses.replace(batch, spec_info=spec)
    answers = [router.can_run_graph(other), router.can_run_graph(other)]
    return {"answers": answers, "status": _internal_state(engine)}


def replaced_runner(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """SGLang puts a runner of its own in place while serving; the server must go on."""
    engine, lines = start(config, settings)
    controller = engine.spec_worker.adaptive_controller
    runner = engine.target_runner
    before = controller.current_steps
    attribute = controller.engine.release.runner_attribute
    setattr(runner, attribute, controller._in_charge._runners[before])
    run = engine.run(random_prompts(3), 16)
    return {"tokens": run.tokens, "steps": [before, controller.current_steps], "log": lines}


def start_only(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Start an engine; what it says, or the message it ended with."""
    import sglang_verify_graphs

    try:
        _, lines = start(config, settings)
    except SystemExit as error:
        return {"exit": str(error)}
    return {"log": lines, "status": sglang_verify_graphs.status()}


def draft_extend_widths(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Width of the draft-extend graphs of every state (trap T0), and chain buffers (T4)."""
    engine, _ = start(config, settings)
    states = engine.spec_worker.adaptive_controller.states
    width = engine.spec_worker.adaptive_controller.engine.captured_width
    draft = engine.spec_worker._draft_worker
    before = {k: s.chain_parents.data_ptr() for k, s in states.items()}
    engine.run(random_prompts(2), 16)
    read = engine.spec_worker.adaptive_controller.engine.config
    return {
        "config": [read("speculative_num_steps"), read("speculative_num_draft_tokens")],
        "worker": [draft.speculative_num_steps, draft.speculative_num_draft_tokens],
        "widths": {k: width(s.draft_extend_graphs) for k, s in states.items()},
        "kept": all(states[k].chain_parents.data_ptr() == p for k, p in before.items()),
        "current": draft._topk1_parents_prealloc.data_ptr()
        == states[draft.speculative_num_steps].chain_parents.data_ptr(),
    }


def states_of_stock(
    config: dict[str, Any], settings: None, steps: list[int], batches: list[int]
) -> dict[str, Any]:
    """States of other step counts, pruned to `batches`, as stock's adaptive mode builds them."""
    engine, _ = start(config, settings)
    built: dict[str, Any] = {}
    for k in steps:
        state = engine.spec_worker.build_adaptive_runtime_state(k, k + 1, batches)
        built[str(k)] = _as_built(
            state.target_graph_runner, state.cuda_graph_runner_for_draft_extend
        )
    return built


def states_of_ours(
    config: dict[str, Any], settings: dict[str, Any], steps: list[int], batches: list[int]
) -> dict[str, Any]:
    """The same from the adapter."""
    engine, _ = start(config, settings)
    adapter = engine.spec_worker.adaptive_controller.engine
    states = {str(k): adapter.build_state(k, batches) for k in steps}
    return {k: _as_built(s.target_graphs, s.draft_extend_graphs) for k, s in states.items()}


def _as_built(verify: Any, draft_extend: Any) -> dict[str, Any]:
    return {"batches": verify.capture_bs, "draft_extend_width": draft_extend.captured_req_width}


def hidden_mode(config: dict[str, Any], settings: dict[str, Any] | None) -> dict[str, Any]:
    """A verify that wants no hidden states: what stock does after its gate, what ours answers."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    engine, _ = start(config, settings)
    target = engine.target_runner
    runner = target.decode_cuda_graph_runner
    seen: list[Any] = []
    ask = runner.can_run_graph
    runner.can_run_graph = lambda batch: (seen.append(batch), ask(batch))[1]
    engine.run(random_prompts(2), 8)
    batch = seen[-1]
    spec = dataclasses.replace(batch.spec_info, capture_hidden_mode=CaptureHiddenMode.NULL)
    other = dataclasses.replace(batch, spec_info=spec, capture_hidden_mode=CaptureHiddenMode.NULL)
    captured: list[Any] = []
    stock = runner if settings is None else runner._runners[config["steps"]]
    stock.capture = lambda: captured.append(1)
    answer = bool(ask(other))
    if answer:
        stock.recapture_if_needed(other)
    status = _internal_state(engine) if settings is not None else {}
    return {"answer": answer, "captured": len(captured), "status": status}


def stock_batches(config: dict[str, Any], settings: None, batches: list[int]) -> dict[str, Any]:
    """Accepted-draft histograms of stock SGLang, batch by batch."""
    engine, _ = start(config, settings)
    return {b: engine.run(random_prompts(b, seed=b), 12).histogram for b in batches}


def plain(
    config: dict[str, Any], settings: None, prompts: list[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Tokens of the given prompts."""
    engine, _ = start(config, settings)
    return engine.run(prompts, max_new_tokens).tokens
