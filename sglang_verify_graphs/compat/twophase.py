"""Releases that capture while they build their workers, started as the later ones are.

A plan needs the built workers: how many requests fit, which attention backend runs. Later releases
build every worker first and capture after, and let the speculative worker build its other states
last. Here both are done in that order, each by SGLang's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sglang_verify_graphs.compat.engine import replaced
from sglang_verify_graphs.compat.facts import module
from sglang_verify_graphs.compat.legacy import draft_runner, set_layers, v1_workers
from sglang_verify_graphs.compat.releases import Release


def build_workers(
    release: Release, scheduler: Any, start: Callable[[], None]
) -> Callable[[], None]:
    """Run ``start`` up to the capture; the function that is returned does the capture."""
    if release.captures_apart:
        return start
    adaptive = getattr(scheduler.server_args, "speculative_adaptive", False)
    if adaptive or not scheduler.spec_algorithm.is_eagle():  # not ours: as SGLang has it
        start()
        return lambda: None
    workers = module("sglang.srt.speculative.eagle_worker_v2")
    target_class = module("sglang.srt.model_executor.model_runner").ModelRunner
    draft_classes = [workers.EagleDraftWorker, *v1_workers(release)]
    capture_target = target_class.init_device_graphs
    waiting: list[Callable[[], None]] = []

    def target_later(runner: Any) -> None:
        if runner.is_draft_worker:
            capture_target(runner)  # captures nothing: the draft's graphs are its worker's
            return
        runner.graph_runner, runner.graph_mem_usage = None, 0
        waiting.append(lambda: capture_target(runner))
        waiting.append(lambda: set_layers(release, runner))

    def later(capture: Callable[[Any], None]) -> Callable[[Any], None]:
        def draft_later(draft: Any) -> None:
            draft.cuda_graph_runner = draft.cuda_graph_runner_for_draft_extend = None
            waiting.append(lambda: _in_draft_context(workers, draft, lambda: capture(draft)))

        return draft_later

    with ExitStack() as stack:
        stack.enter_context(replaced(target_class, "init_device_graphs", target_later))
        for draft_class in draft_classes:
            capture_draft = later(draft_class.init_cuda_graphs)
            stack.enter_context(replaced(draft_class, "init_cuda_graphs", capture_draft))
        start()

    def capture() -> None:
        for step in waiting:
            step()
        worker = scheduler.draft_worker
        controller = getattr(worker, "adaptive_controller", None)
        if controller is not None:
            controller.register(None)
            drafter = getattr(worker, "_draft_worker", worker)
            _in_draft_context(workers, drafter, controller.init_states)

    return capture


def _in_draft_context(workers: Any, draft: Any, build: Callable[[], None]) -> None:
    """As SGLang builds and runs a draft worker."""
    with (
        draft.draft_tp_context(draft_runner(draft).tp_group),
        workers.speculative_moe_backend_context(),
        workers.speculative_moe_a2a_backend_context(),
    ):
        build()
