"""Reads a live SGLang scheduler: its configuration, its batches, and what its ranks agree on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.costs import CostKey, model_digest
from sglang_verify_graphs.gate import BatchFacts, Phase
from sglang_verify_graphs.support import ServerFacts


class SchedulerFacts:
    """One scheduler process, read and never changed."""

    def __init__(self, release: Release, scheduler: Any) -> None:
        self.release = release
        self.scheduler = scheduler
        self.worker = scheduler.draft_worker
        self.model_runner = scheduler.tp_worker.model_runner

    # -- configuration ---------------------------------------------------------------------------

    def config(self, name: str) -> Any:
        """A resolved server argument by its flat name."""
        if not self.release.config_bags:
            return getattr(self.scheduler.server_args, name)
        context = runtime_context().get_context()
        namespaces = module("sglang.srt.arg_groups.arg_utils").namespace_of(
            type(self.scheduler.server_args)
        )
        top, *groups = namespaces[name].split(".")
        bag = context.config_bag(top)
        for group in groups:
            bag = getattr(bag, group)
        return getattr(bag, name)

    def server_facts(self) -> ServerFacts:
        config, runner = self.config, self.model_runner
        environ = module("sglang.srt.environ").envs
        skip_extend = getattr(environ, "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", None)
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
                or self._parallel("attn_dp_size") > 1
            ),
            disaggregation=config("disaggregation_mode"),
            two_batch_overlap=config("enable_two_batch_overlap"),
            pdmux=config("enable_pdmux"),
            multi_layer=config("enable_multi_layer_eagle"),
            mamba=self._hybrid() is not None,
            lora=bool(config("enable_lora")),
            hisparse=config("enable_hisparse"),
            return_hidden_states=bool(config("enable_return_hidden_states")),
            deterministic=config("enable_deterministic_inference"),
            adaptive=config("speculative_adaptive"),
            plan_stream=bool(environ.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()),
            skip_zero_extend=skip_extend is not None and bool(skip_extend.get()),
            captured_prefill_metadata=bool(
                getattr(
                    getattr(runner, "attn_backend", None),
                    "use_captured_forward_metadata_for_breakable_cuda_graph",
                    False,
                )
            ),
            decode_graphs=self._decode_graphs(),
            zero_steps=self.release.zero_steps,
            one_width=self.release.one_width,
            padding=not config("disable_cuda_graph_padding"),
            alignment=self._alignment(),
        )

    def ladder(self) -> tuple[Any, str]:
        """Object and attribute that hold the batches SGLang captures."""
        if self.release.runner_package:
            return self.config("cuda_graph_config").decode, "bs"
        return self.scheduler.server_args, "cuda_graph_bs"

    def stock_ladder(self) -> list[int]:
        """Batches that SGLang would capture."""
        owner, name = self.ladder()
        return list(getattr(owner, name) or ())

    def _decode_graphs(self) -> bool:
        if not self.release.runner_package:
            disabled = bool(self.config("disable_cuda_graph"))
        else:
            disabled = self.config("cuda_graph_config").decode.backend == "disabled"
        return bool(self.stock_ladder()) and not disabled

    def _hybrid(self) -> Any:
        if not self.release.hybrid_arch:
            return self.model_runner.mambaish_config
        return module("sglang.srt.configs.hybrid_arch").mambaish_config(
            self.model_runner.model_config
        )

    def _alignment(self) -> int:
        common = module("sglang.srt.utils.common")
        if self.release.alignment_function:
            from_args = self.release.alignment_from_server_args
            arguments = (self.scheduler.server_args,) if from_args else ()
            return int(common.get_cuda_graph_batch_size_alignment(*arguments))
        gathered = common.require_gathered_buffer(self.scheduler.server_args)
        tp_size = self._parallel("attn_tp_size") if gathered else 1
        cp_size = self._parallel("attn_cp_size")
        return tp_size if tp_size % cp_size == 0 else tp_size * cp_size

    def _parallel(self, name: str) -> int:
        """Size of a group by its name in the parallel context."""
        if self.release.parallel_context:
            return int(getattr(runtime_context().get_parallel(), name))
        sizes = module("sglang.srt.layers.dp_attention")
        read = {
            "attn_dp_size": sizes.get_attention_dp_size,
            "attn_tp_size": sizes.get_attention_tp_size,
            "attn_cp_size": sizes.get_attention_cp_size,
        }[name]
        return int(read())

    def cost_key(self) -> CostKey:
        """What round costs depend on, and what they may not be carried across."""
        torch = module("torch")
        draft = getattr(self.worker, "_draft_worker", self.worker)
        models = self.model_runner.model_config, draft.draft_runner.model_config
        backend = self.config("decode_attention_backend") or self.config("attention_backend")
        device = self.model_runner.device
        return CostKey(
            gpu=torch.cuda.get_device_name() if device == "cuda" else device,
            tp_size=self.config("tp_size"),
            model_digest=model_digest(models[0].model_path, models[0].revision),
            draft_digest=model_digest(models[1].model_path, models[1].revision),
            sglang_version=self.release.version,
            attention_backend=str(backend),
            dtype=str(models[0].dtype).removeprefix("torch."),
        )

    # -- batches ---------------------------------------------------------------------------------

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
        modes = module("sglang.srt.model_executor.forward_batch_info")
        verify_mode, no_hidden_states = (
            modes.ForwardMode.TARGET_VERIFY,
            modes.CaptureHiddenMode.NULL,
        )
        is_verify = phase is Phase.VERIFY
        captured_mode = runner.capture_hidden_mode if is_verify else no_hidden_states
        recaptures = self.release.recaptures_hidden_mode
        own_steps: int = runner.speculative_num_steps
        ngram = self.model_runner.spec_algorithm.is_ngram()

        def hidden_mode_missing(batch: Any) -> bool:
            wanted, spec = batch.capture_hidden_mode, batch.spec_info
            if not recaptures:
                return bool(wanted is not captured_mode and wanted > captured_mode)
            if spec is not None:
                wanted = max(wanted, spec.capture_hidden_mode or no_hidden_states)
            return wanted is not captured_mode

        def read(batch: Any) -> BatchFacts:
            steps = own_steps
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
                is_verify and hidden_mode_missing(batch),
                ngram and batch.batch_size * width != batch.input_ids.numel(),
            )

        return read

    # -- ranks and memory ------------------------------------------------------------------------

    def free_gb(self) -> float:
        """Free device memory in GiB, the least over all TP ranks."""
        tp_size = self.config("tp_size")
        return float(
            module("sglang.srt.utils.common").get_available_gpu_memory(
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
        distributed = module("torch").distributed
        found: list[Any] = [None] * size
        distributed.all_gather_object(found, value, group=self._cpu_group())
        return found

    def from_rank_0(self, numbers: list[int]) -> list[int]:
        """These numbers as rank 0 has them, on every rank; as many everywhere."""
        if self.config("tp_size") == 1:
            return numbers
        torch = module("torch")
        group = module("sglang.srt.distributed.parallel_state").get_tp_group()
        sent = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.broadcast(sent, src=group.ranks[0], group=group.cpu_group)
        return list(sent.tolist())

    def meet(self, note: str, seconds: float) -> list[str | None]:
        """``note`` of every TP rank, in rank order; None for one that does not come here in time.

        Through the store of the process group, where a rank that is missing keeps nobody waiting
        for ever, as it would in ``gather``.
        """
        if self.config("tp_size") == 1:
            return [note]
        group = module("sglang.srt.distributed.parallel_state").get_tp_group()
        store = module("torch.distributed.distributed_c10d")._get_default_store()
        keys = [f"verify_graphs/{rank}" for rank in group.ranks]
        store.set(keys[group.rank_in_group], note)
        with suppress(RuntimeError):  # it took too long
            store.wait(keys, timedelta(seconds=seconds))
        return [store.get(key).decode() if store.check([key]) else None for key in keys]

    def _cpu_group(self) -> Any:
        return module("sglang.srt.distributed.parallel_state").get_tp_group().cpu_group

    def tp_rank(self) -> int:
        return int(module("sglang.srt.distributed.parallel_state").get_tp_group().rank_in_group)

    def kv_reserved_per_decode(self) -> int:
        """KV slots that one decode round may allocate for a request."""
        return int(module(self.release.allocation_module).get_alloc_len_per_decode())

    def overrides_logged(self) -> int:
        """Entries of SGLang's overrides log, which a switch must not grow."""
        if not self.release.config_bags:
            return 0
        return len(runtime_context().get_context()._overrides_log)


def width_and_requests(result: Any, batch: Any) -> tuple[int, Sequence[Any]]:
    """Tokens per request that a verify ran with, and its requests."""
    return result.speculative_num_draft_tokens, batch.reqs


def keep_uncached(request: Any) -> None:
    """Nothing more of a request goes into the radix cache: its prompt is there already."""
    request.skip_radix_cache_insert = True


def module(name: str) -> Any:
    return importlib.import_module(name)


def runtime_context() -> Any:
    return module("sglang.srt.runtime_context")
