"""Adapter to a live SGLang scheduler: facts, state builds, the switch, memory, agreement."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.gate import BatchFacts, Phase
from sglang_verify_graphs.support import ServerFacts

_DECODE_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
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


class SGLangEngine:
    """The parts of one scheduler process that this package reads and drives."""

    def __init__(self, release: Release, scheduler: Any) -> None:
        self.release = release
        self.scheduler = scheduler
        self.worker = scheduler.draft_worker
        self.model_runner = scheduler.tp_worker.model_runner

    # -- facts -----------------------------------------------------------------------------------

    def config(self, name: str) -> Any:
        """A resolved server argument by its flat name."""
        context = _runtime_context().get_context()
        namespaces = _module("sglang.srt.arg_groups.arg_utils").namespace_of(
            type(self.scheduler.server_args)
        )
        top, *groups = namespaces[name].split(".")
        bag = context.config_bag(top)
        for group in groups:
            bag = getattr(bag, group)
        return getattr(bag, name)

    def server_facts(self) -> ServerFacts:
        config, runner = self.config, self.model_runner
        decode = config("cuda_graph_config").decode
        hybrid = _module("sglang.srt.configs.hybrid_arch").mambaish_config(runner.model_config)
        environ = _module("sglang.srt.environ").envs
        return ServerFacts(
            algorithm=config("speculative_algorithm"),
            worker=type(self.worker).__name__,
            topk=config("speculative_eagle_topk") or 1,
            draft_steps=config("speculative_num_steps") or 0,
            draft_tokens=config("speculative_num_draft_tokens") or 0,
            max_running_requests=int(runner.req_to_token_pool.size),
            tp_size=config("tp_size"),
            pp_size=config("pp_size"),
            attention_dp=bool(
                config("enable_dp_attention")
                or config("enable_dp_lm_head")
                or _runtime_context().get_parallel().attn_dp_size > 1
            ),
            disaggregation=config("disaggregation_mode"),
            two_batch_overlap=config("enable_two_batch_overlap"),
            pdmux=config("enable_pdmux"),
            multi_layer=config("enable_multi_layer_eagle"),
            mamba=hybrid is not None,
            lora=bool(config("enable_lora")),
            hisparse=config("enable_hisparse"),
            return_hidden_states=bool(config("enable_return_hidden_states")),
            deterministic=config("enable_deterministic_inference"),
            adaptive=config("speculative_adaptive"),
            plan_stream=bool(environ.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()),
            skip_zero_extend=bool(environ.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()),
            captured_prefill_metadata=bool(
                getattr(
                    getattr(runner, "attn_backend", None),
                    "use_captured_forward_metadata_for_breakable_cuda_graph",
                    False,
                )
            ),
            decode_graphs=bool(decode.bs) and decode.backend != "disabled",
            padding=not config("disable_cuda_graph_padding"),
            alignment=self._alignment(),
        )

    def _alignment(self) -> int:
        read = _module("sglang.srt.utils.common").get_cuda_graph_batch_size_alignment
        if self.release.alignment_from_server_args:
            return int(read(self.scheduler.server_args))
        return int(read())

    def facts_reader(
        self, phase: Phase, runner: Any, steps_of_width: Mapping[int, int]
    ) -> Callable[[Any], BatchFacts]:
        """Reads what the gate needs of a ForwardBatch; ``runner`` is one that captured the phase.

        What is constant for a runner is read once, here: the reader runs in every round.
        """
        dp_vote = self.release.dp_vote
        gathered, synced = runner.require_mlp_tp_gather, runner.require_mlp_sync
        encoder, ragged, overlap = (
            bool(getattr(runner, name, False))
            for name in ("is_encoder_decoder", "ragged_verify_mode", "enable_two_batch_overlap")
        )
        modes = _module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        verify_mode = modes.TARGET_VERIFY
        captured_mode = runner.capture_hidden_mode
        is_verify = phase is Phase.VERIFY
        own_steps: int = runner.speculative_num_steps
        ngram = self.model_runner.spec_algorithm.is_ngram()

        def read(batch: Any) -> BatchFacts:
            hidden_mode, steps = batch.capture_hidden_mode, own_steps
            if is_verify:
                width = 1 if batch.spec_info is None else batch.spec_info.num_tokens_per_req
                steps = steps_of_width.get(width, width - 1)
            return BatchFacts(
                max(batch.original_global_num_tokens_cpu) if gathered else batch.batch_size,
                steps,
                not is_verify or batch.forward_mode is verify_mode,
                batch.replace_embeds is not None,
                ragged,
                synced and not getattr(batch, dp_vote),
                encoder and not bool((batch.encoder_lens > 0).all()),
                overlap and not batch.can_run_tbo,
                is_verify and hidden_mode is not captured_mode and hidden_mode > captured_mode,
                ngram and batch.batch_size * width != batch.input_ids.numel(),
            )

        return read

    # -- states ----------------------------------------------------------------------------------

    def start_up_state(self) -> StepState:
        """The state that SGLang itself built for the configured step count."""
        draft, runner = self.worker._draft_worker, self.model_runner.decode_cuda_graph_runner
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

    def _state(self, draft_steps: int, draft_tokens: int, **parts: Any) -> StepState:
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
                chain_parents=draft._topk1_parents_prealloc,
                chain_score_indices=draft._topk1_score_indices_prealloc,
                **parts,
            )
        finally:
            draft.speculative_num_steps, draft.speculative_num_draft_tokens = saved

    def switch(self) -> Callable[[StepState], None]:
        """A function that makes a state the worker's; it allocates nothing and keeps no log.

        SGLang's own ``apply_runtime_state`` logs, frees and allocates chain buffers and grows the
        overrides log by an entry on every call.
        """
        worker, draft = self.worker, self.worker._draft_worker
        draft_runner, model_runner = draft.draft_runner, self.model_runner
        set_spec = _runtime_context().get_spec()._set

        def apply(state: StepState) -> None:
            steps, tokens = state.draft_steps, state.draft_tokens
            worker.speculative_num_steps = draft.speculative_num_steps = steps
            worker.speculative_num_draft_tokens = draft.speculative_num_draft_tokens = tokens
            draft.draft_attn_backend = draft_runner.draft_attn_backend = state.draft_attn_backend
            draft.cuda_graph_runner = state.draft_graphs
            draft.draft_extend_attn_backend = state.draft_extend_attn_backend
            if state.draft_extend_attn_backend is not None:
                draft_runner.attn_backend = state.draft_extend_attn_backend
            draft.cuda_graph_runner_for_draft_extend = state.draft_extend_graphs
            draft._topk1_parents_prealloc = state.chain_parents
            draft._topk1_score_indices_prealloc = state.chain_score_indices
            model_runner.attn_backend = state.target_attn_backend
            if state.target_graphs is not None:
                model_runner.decode_cuda_graph_runner = state.target_graphs
            set_spec("speculative_num_steps", steps)
            set_spec("speculative_num_draft_tokens", tokens)

        return apply

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
            runner_module = _module(_DECODE_RUNNER)
            stack.enter_context(_attribute(runner_module, "freeze_gc", lambda _: nullcontext()))
            if self.release.stream_per_capture and self.model_runner.device == "cuda":
                capture = partial(runner_module.graph_capture, stream=self._capture_stream())
                stack.enter_context(_attribute(runner_module, "graph_capture", capture))
            make_backend = self.model_runner._get_attention_backend
            stack.enter_context(
                _attribute(
                    self.model_runner,
                    "_get_attention_backend",
                    lambda init_new_workspace=False: make_backend(init_new_workspace=False),
                )
            )
            gc.collect()
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()
                gc.collect()  # or the first full collection of the heap falls into serving

    def stock_ladder(self) -> list[int]:
        """Batches that SGLang would capture."""
        return list(self.config("cuda_graph_config").decode.bs)

    def _ladder(self, batches: Sequence[int]) -> AbstractContextManager[None]:
        return _attribute(self.config("cuda_graph_config").decode, "bs", list(batches))

    def _capture_stream(self) -> Any:
        if not hasattr(self, "_stream"):
            self._stream = _module("torch").cuda.Stream()
        return self._stream

    @contextmanager
    def _draft_extend_width(self, width: int) -> Iterator[None]:
        """Hand the draft-extend runner the width it is built for, where the release forgets to."""
        if not self.release.draft_extend_width_from_server_args:
            yield
            return
        module = _module(_EXTEND_RUNNER)
        stock = module.resolve_num_tokens_per_req

        def resolve(*, phase: str, **kwargs: Any) -> Any:
            return width if phase == "draft_extend" else stock(phase=phase, **kwargs)

        with _attribute(module, "resolve_num_tokens_per_req", resolve):
            yield

    # -- resources -------------------------------------------------------------------------------

    def graph_usage(self) -> tuple[float, float]:
        """(GiB, seconds) of the graphs SGLang captured so far, prefill left out."""
        workers = (self.scheduler.tp_worker, self.worker)
        memory = [w.graph_memory_usage for w in workers]
        seconds = [w.graph_time_usage for w in workers]
        return _without_prefill(memory), _without_prefill(seconds)

    def free_gb(self) -> float:
        """Free device memory in GiB, the least over all TP ranks."""
        tp_size = self.config("tp_size")
        return float(
            _module("sglang.srt.utils.common").get_available_gpu_memory(
                self.model_runner.device,
                self.model_runner.gpu_id,
                distributed=tp_size > 1,
                cpu_group=self._cpu_group() if tp_size > 1 else None,
            )
        )

    def largest(self, value: float) -> float:
        """The largest ``value`` over all TP ranks."""
        return float(max(self.gather(value)))

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every TP rank, in rank order, on every rank."""
        size = self.config("tp_size")
        if size == 1:
            return [value]
        distributed = _module("torch").distributed
        found: list[Any] = [None] * size
        distributed.all_gather_object(found, value, group=self._cpu_group())
        return found

    def _cpu_group(self) -> Any:
        return _module("sglang.srt.distributed.parallel_state").get_tp_group().cpu_group

    def tp_rank(self) -> int:
        return int(_runtime_context().get_parallel().tp_rank)

    def kv_reserved_per_decode(self) -> int:
        """KV slots that one decode round may allocate for a request."""
        return int(_module("sglang.srt.mem_cache.allocation_sizing").get_alloc_len_per_decode())

    def overrides_logged(self) -> int:
        """Entries of SGLang's overrides log, which a switch must not grow."""
        return len(_runtime_context().get_context()._overrides_log)


def _without_prefill(usage: Sequence[dict[str, float]]) -> float:
    return sum(v for one in usage for phase, v in one.items() if "prefill" not in phase)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _runtime_context() -> Any:
    return _module("sglang.srt.runtime_context")


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
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
