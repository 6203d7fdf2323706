"""Releases whose workers know one width: the seat that they lack, and what they capture wrong.

Later releases ask a controller at the head of every decode round. Here the engine asks for them, on
both workers (``EAGLEWorker``, ``EAGLEWorkerV2``); everything else is the one state of start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang_verify_graphs.compat.dialect import renamed
from sglang_verify_graphs.compat.engine import SGLangEngine, StepState, replaced
from sglang_verify_graphs.compat.facts import module
from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.gate import BatchFacts, Phase


def engine_of(release: Release, scheduler: Any) -> SGLangEngine:
    """The adapter to a scheduler of that release."""
    return (OneWidthEngine if release.one_width else SGLangEngine)(release, scheduler)


def v1_workers(release: Release) -> list[Any]:
    """Workers of the schedule without overlap, which draft themselves."""
    name = "sglang.srt.speculative.eagle_worker"
    return [module(name).EAGLEWorker] if release.one_width else []


def draft_runner(drafter: Any) -> Any:
    """The draft's ``ModelRunner``, by the name that v2 or v1 has for it."""
    v2 = hasattr(drafter, "draft_runner")
    return drafter.draft_runner if v2 else drafter.draft_model_runner


def set_layers(release: Release, runner: Any) -> None:
    """Ask for the configured EAGLE-3 layers again, where a capture goes back to the default ones.

    SGLang asks once, and captures before.
    """
    if release.captures_default_layers and runner.eagle_use_aux_hidden_state:
        runner.model.set_eagle3_layers_to_capture(runner.eagle_aux_hidden_state_layer_ids)


class OneWidthEngine(SGLangEngine):
    """Serves the configured width and no other."""

    def config(self, name: str) -> Any:
        """What a release has no argument for, it does not do."""
        return getattr(self.scheduler.server_args, name, False)

    def kv_reserved_per_decode(self) -> int:
        """SGLang's own width is the only one, and SGLang reserves for it."""
        return int(self.worker.speculative_num_draft_tokens)

    @property
    def _drafter(self) -> Any:
        """Who drafts: v1 is one worker, v2 has a second one inside."""
        return getattr(self.worker, "_draft_worker", self.worker)

    # -- the one state ---------------------------------------------------------------------------

    def start_up_state(self) -> StepState:
        drafter = self._drafter
        return StepState(
            draft_steps=self.worker.speculative_num_steps,
            draft_tokens=self.worker.speculative_num_draft_tokens,
            draft_attn_backend=drafter.draft_attn_backend,
            draft_graphs=renamed(self.release, drafter.cuda_graph_runner),
            target_attn_backend=self.model_runner.attn_backend,
            target_graphs=renamed(self.release, self.verify_runner()),
            draft_extend_attn_backend=drafter.draft_extend_attn_backend,
            draft_extend_graphs=renamed(self.release, drafter.cuda_graph_runner_for_draft_extend),
        )

    def switch(self) -> Callable[[StepState], None]:
        """Puts the routers in; nothing else of the state ever changes."""
        drafter, model_runner = self._drafter, self.model_runner

        def apply(state: StepState) -> None:
            drafter.cuda_graph_runner = state.draft_graphs
            drafter.cuda_graph_runner_for_draft_extend = state.draft_extend_graphs
            model_runner.graph_runner = state.target_graphs

        return apply

    def seat(self, controller: Any) -> None:
        super().seat(controller)
        drafter, draft = self._drafter, self._drafter.draft

        def round_begins(batch: Any) -> Any:
            controller.activate_step_by_batch(len(batch.seq_lens))
            return draft(batch)

        drafter.draft = round_begins

    # -- capture ---------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, batches: Sequence[int]) -> Iterator[None]:
        with ExitStack() as stack:
            runner = self.model_runner
            if self.release.captures_default_layers and runner.eagle_use_aux_hidden_state:
                ask = runner.model.set_eagle3_layers_to_capture
                layers = runner.eagle_aux_hidden_state_layer_ids

                def configured(layer_ids: Any = None) -> None:
                    ask(layers)

                stack.enter_context(
                    replaced(runner.model, "set_eagle3_layers_to_capture", configured)
                )
            stack.enter_context(super().capturing(batches))
            yield
        if self.release.prefill_graph_takes_verify:
            _keep_verify_from(runner.piecewise_cuda_graph_runner)

    # -- batches ---------------------------------------------------------------------------------

    def facts_reader(
        self, phase: Phase, runner: Any, steps_of_width: Mapping[int, int]
    ) -> Callable[[Any], BatchFacts]:
        width: int = runner.num_tokens_per_bs
        gathered, synced = runner.require_mlp_tp_gather, runner.require_mlp_sync
        modes = module("sglang.srt.model_executor.forward_batch_info")
        verify_mode, no_hidden_states = (
            modes.ForwardMode.TARGET_VERIFY,
            modes.CaptureHiddenMode.NULL,
        )
        own_steps = next(iter(steps_of_width.values()))
        if phase is not Phase.VERIFY:
            return lambda batch: BatchFacts(
                max(batch.global_num_tokens_cpu) // width if gathered else batch.batch_size,
                own_steps,
                dp_peer_blocked=synced and not batch.can_run_dp_cuda_graph,
            )
        encoder, overlap = runner.is_encoder_decoder, runner.enable_two_batch_overlap
        captured_mode = runner.capture_hidden_mode

        def read(batch: Any) -> BatchFacts:
            spec, wanted = batch.spec_info, batch.capture_hidden_mode
            tokens = width
            if spec is not None:
                tokens = spec.draft_token_num
                wanted = max(wanted, spec.capture_hidden_mode or no_hidden_states)
            return BatchFacts(
                max(batch.global_num_tokens_cpu) // width if gathered else batch.batch_size,
                steps_of_width.get(tokens, tokens - 1),
                batch.forward_mode is verify_mode,
                getattr(batch, "replace_embeds", None) is not None,
                False,
                synced and not batch.can_run_dp_cuda_graph,
                encoder and not bool((batch.encoder_lens > 0).all()),
                overlap and not batch.can_run_tbo,
                # SGLang would capture the whole ladder anew, in mid-serving.
                wanted is not captured_mode,
            )

        return read


def _keep_verify_from(prefill: Any) -> None:
    """A prefill graph holds no tree mask and no hidden states of every token: not for a verify."""
    if prefill is None:
        return
    can_run = prefill.can_run
    prefill.can_run = lambda batch: not batch.forward_mode.is_target_verify() and can_run(batch)
