"""Drives a live SGLang scheduler: builds the state of each step count, captures, and switches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_verify_graphs.compat.dialect import renamed
from sglang_verify_graphs.compat.facts import SchedulerFacts, module, runtime_context

_EXTEND_RUNNER = "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"


@dataclass(frozen=True)
class StepState:
    """Everything of a worker that depends on the draft step count; swapped as one.

    The chain buffers are made once per state and kept: SGLang frees them on a switch while the
    other stream may still read them.
    """

    draft_steps: int
    draft_tokens: int
    draft_attn_backend: Any
    draft_graphs: Any
    target_attn_backend: Any
    target_graphs: Any
    """None where SGLang built no graphs and runs every verify eager."""
    draft_extend_attn_backend: Any
    draft_extend_graphs: Any
    chain_parents: Any = None
    chain_score_indices: Any = None


class SGLangEngine(SchedulerFacts):
    """The parts of one scheduler process that this package drives."""

    # -- states ----------------------------------------------------------------------------------

    def verify_runner(self) -> Any:
        """What SGLang asks for a verify graph."""
        return getattr(self.model_runner, self.release.runner_attribute)

    def seat(self, controller: Any) -> None:
        """Have the worker ask ``controller`` at the head of a round, and report to it."""
        self.worker.adaptive_controller = controller

    def captured_width(self, runner: Any) -> int:
        """Tokens per request that a runner was captured for."""
        return int(getattr(runner, self.release.width_attribute))

    def start_up_state(self) -> StepState:
        """The state that SGLang itself built for the configured step count."""
        draft, runner = self.worker._draft_worker, self.verify_runner()
        return self._state(
            self.worker.speculative_num_steps,
            self.worker.speculative_num_draft_tokens,
            draft_attn_backend=draft.draft_attn_backend,
            draft_graphs=draft.cuda_graph_runner,
            target_attn_backend=self.model_runner.attn_backend,
            target_graphs=runner if getattr(runner, "capture_bs", None) else None,
            draft_extend_attn_backend=draft.draft_extend_attn_backend,
            draft_extend_graphs=draft.cuda_graph_runner_for_draft_extend,
        )

    def build_state(self, draft_steps: int, batches: Sequence[int]) -> StepState:
        """Let SGLang build backends and graphs for ``draft_steps`` over the given batches."""
        with self._ladder(batches), self._draft_extend_width(draft_steps + 1):
            built = self.worker.build_adaptive_runtime_state(
                speculative_num_steps=draft_steps,
                speculative_num_draft_tokens=draft_steps + 1,
            )
        return self._state(
            draft_steps,
            draft_steps + 1,
            draft_attn_backend=built.draft_attn_backend,
            draft_graphs=built.cuda_graph_runner,
            target_attn_backend=built.target_attn_backend,
            target_graphs=built.target_graph_runner,
            draft_extend_attn_backend=built.draft_extend_attn_backend,
            draft_extend_graphs=built.cuda_graph_runner_for_draft_extend,
        )

    def _state(
        self, draft_steps: int, draft_tokens: int, *, target_graphs: Any, draft_graphs: Any,
        draft_extend_graphs: Any, **backends: Any,
    ) -> StepState:  # fmt: skip
        draft = self.worker._draft_worker
        saved = draft.speculative_num_steps, draft.speculative_num_draft_tokens
        draft.speculative_num_steps = draft_steps
        draft.speculative_num_draft_tokens = draft_tokens
        try:
            if draft.topk == 1:
                draft._rebuild_topk1_chain_buffers()
            return StepState(
                draft_steps=draft_steps,
                draft_tokens=draft_tokens,
                target_graphs=renamed(self.release, target_graphs),
                draft_graphs=renamed(self.release, draft_graphs),
                draft_extend_graphs=renamed(self.release, draft_extend_graphs),
                chain_parents=draft._topk1_parents_prealloc,
                chain_score_indices=draft._topk1_score_indices_prealloc,
                **backends,
            )
        finally:
            draft.speculative_num_steps, draft.speculative_num_draft_tokens = saved

    def find_by_size(self, states: Sequence[StepState]) -> None:
        """Let stock's gate find a graph by its batch where it looks among keys of another type.

        It then answers for any batch up to its largest; ours has checked that the size is there.
        """
        if not self.release.integer_keys:
            return
        for state in states:
            for runner in (state.target_graphs, state.draft_graphs, state.draft_extend_graphs):
                if runner is not None:
                    runner.disable_padding = False

    def skip_extend_at_zero(self, skips: bool) -> None:
        """Whether SGLang leaves the draft extend out of rounds without drafts."""
        module("sglang.srt.environ").envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.set(skips)

    def switch(self) -> Callable[[StepState], None]:
        """A function that makes a state the worker's; it allocates nothing and keeps no log.

        SGLang's own ``apply_runtime_state`` logs, frees and allocates chain buffers and, on some
        releases, grows the overrides log by an entry on every call.
        """
        worker, draft = self.worker, self.worker._draft_worker
        draft_runner, model_runner = draft.draft_runner, self.model_runner
        runner_attribute = self.release.runner_attribute
        extend_on_runner = self.release.extend_backend_on_runner
        set_spec = runtime_context().get_spec()._set if self.release.switch_writes_bags else None

        def apply(state: StepState) -> None:
            steps, tokens = state.draft_steps, state.draft_tokens
            worker.speculative_num_steps = draft.speculative_num_steps = steps
            worker.speculative_num_draft_tokens = draft.speculative_num_draft_tokens = tokens
            draft.draft_attn_backend = draft_runner.draft_attn_backend = state.draft_attn_backend
            draft.cuda_graph_runner = state.draft_graphs
            draft.draft_extend_attn_backend = state.draft_extend_attn_backend
            if extend_on_runner and state.draft_extend_attn_backend is not None:
                draft_runner.attn_backend = state.draft_extend_attn_backend
            draft.cuda_graph_runner_for_draft_extend = state.draft_extend_graphs
            draft._topk1_parents_prealloc = state.chain_parents
            draft._topk1_score_indices_prealloc = state.chain_score_indices
            model_runner.attn_backend = state.target_attn_backend
            if state.target_graphs is not None:
                setattr(model_runner, runner_attribute, state.target_graphs)
            if set_spec is not None:
                set_spec("speculative_num_steps", steps)
                set_spec("speculative_num_draft_tokens", tokens)

        return apply

    # -- metrics ---------------------------------------------------------------------------------

    def metrics_labels(self) -> dict[str, Any] | None:
        """Labels of SGLang's metrics; None where this process publishes none."""
        collector = getattr(self.scheduler, "metrics_collector", None)
        rule = getattr(self.scheduler, "metrics_collector_context", self.scheduler)
        if collector is None or not rule.current_scheduler_metrics_enabled:
            return None
        return dict(collector.labels)

    def when_publishing(self, publish: Callable[[], None]) -> None:
        """Have ``publish`` called whenever SGLang publishes its own metrics."""
        collector = self.scheduler.metrics_collector
        stock = collector.log_stats

        def log_stats(stats: Any) -> None:
            stock(stats)
            publish()

        collector.log_stats = log_stats

    # -- capture ---------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, batches: Sequence[int]) -> Iterator[None]:
        """Around SGLang's whole capture: one pool stream, one workspace, one garbage collection.

        A stream per runner keeps the pool from reusing memory across runners, a workspace per
        width buys nothing because replays are serial, and SGLang collects garbage twice a runner.
        ``batches`` is the ladder of the configured width.
        """
        with ExitStack() as stack:
            stack.enter_context(self._ladder(batches))
            runner_module = module(self.release.runner_module)
            stack.enter_context(replaced(runner_module, "freeze_gc", lambda _: nullcontext()))
            if self.release.stream_per_capture and self.model_runner.device == "cuda":
                capture = partial(runner_module.graph_capture, stream=self._capture_stream())
                stack.enter_context(replaced(runner_module, "graph_capture", capture))
            make_backend = self.model_runner._get_attention_backend
            stack.enter_context(
                replaced(
                    self.model_runner,
                    "_get_attention_backend",
                    lambda init_new_workspace=False: make_backend(init_new_workspace=False),
                )
            )
            if not self.release.usage_per_phase:
                stack.enter_context(self._metered(runner_module))
            gc.collect()
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()
                gc.collect()  # or the first full collection of the heap falls into serving

    def graph_usage(self) -> tuple[float, float]:
        """(GiB, seconds) of the graphs SGLang captured so far, prefill left out."""
        if not self.release.usage_per_phase:
            return self._usage[0], self._usage[1]
        workers = (self.scheduler.tp_worker, self.worker)
        memory = [w.graph_memory_usage for w in workers]
        seconds = [w.graph_time_usage for w in workers]
        return _without_prefill(memory), _without_prefill(seconds)

    def _metered(self, runner_module: Any) -> AbstractContextManager[None]:
        """Count what every runner's capture takes, where the workers do not."""
        usage = self._usage = [0.0, 0.0]
        owner = getattr(runner_module, self.release.runner_class)
        capture, free_gb = owner.capture, self.free_gb

        def metered(runner: Any) -> None:
            before, started = free_gb(), time.perf_counter()
            capture(runner)
            usage[0] += before - free_gb()
            usage[1] += time.perf_counter() - started

        return replaced(owner, "capture", metered)

    @contextmanager
    def _ladder(self, batches: Sequence[int]) -> Iterator[None]:
        """Have every runner capture these batches."""
        owner, name = self.ladder()
        owners = [owner]
        if self.release.draft_arguments_copied:
            owners.append(self.worker.server_args.cuda_graph_config.decode)
        with ExitStack() as stack:
            for one in owners:
                stack.enter_context(replaced(one, name, list(batches)))
            yield

    def _capture_stream(self) -> Any:
        if not hasattr(self, "_stream"):
            self._stream = module("torch").cuda.Stream()
        return self._stream

    @contextmanager
    def _draft_extend_width(self, width: int) -> Iterator[None]:
        """Hand the draft-extend runner the width it is built for, where the release forgets to."""
        if not self.release.draft_extend_width_from_server_args:
            yield
            return
        runner_module = module(_EXTEND_RUNNER)
        stock = runner_module.resolve_num_tokens_per_req

        def resolve(*, phase: str, **kwargs: Any) -> Any:
            return width if phase == "draft_extend" else stock(phase=phase, **kwargs)

        with replaced(runner_module, "resolve_num_tokens_per_req", resolve):
            yield


def _without_prefill(usage: Sequence[dict[str, float]]) -> float:
    return sum(v for one in usage for phase, v in one.items() if "prefill" not in phase)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the time of a block; restore exactly what was there, or its absence."""
    missing = object()
    before = owner.__dict__.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
