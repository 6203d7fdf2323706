"""Every attribute of SGLang's objects that the adapter reads, sets or calls, by class.

Looked up in the source, in a running process too: most exist on instances only, and those are made
after the preflight.
"""

from __future__ import annotations

from sglang_verify_graphs.compat.releases import Release

_SRT = "sglang.srt"
_SPEC = f"{_SRT}.speculative"
_WORKER = f"{_SPEC}.eagle_worker_v2"
_METRICS = f"{_SRT}.observability.metrics_collector"


def attributes(release: Release) -> dict[str, tuple[str, ...]]:
    """Class, and what the adapter uses of its instances on that release."""
    if release.one_width:
        return _one_width(release)
    width = release.width_attribute
    later: tuple[str, ...] = ()
    ladder: dict[str, tuple[str, ...]] = {}
    calls_of_runner = ("can_run", "replay_prepare", "replay")
    if release.runner_package:
        calls_of_runner = ("can_run_graph", "load_batch", "execute")
        later = ("is_encoder_decoder", "enable_two_batch_overlap")
        later += ("ragged_verify_mode",) if width == "captured_req_width" else ()
        ladder = {
            f"{_SRT}.model_executor.cuda_graph_config:CudaGraphConfig": ("decode",),
            f"{_SRT}.model_executor.cuda_graph_config:PhaseConfig": ("bs", "backend"),
        }
    asked, _, replayed = calls_of_runner
    synced = (
        "require_mlp_tp_gather", "require_mlp_sync", "speculative_num_steps", "disable_padding",
    )  # fmt: skip
    usage = ("graph_memory_usage", "graph_time_usage") if release.usage_per_phase else ()
    table = {
        f"{_SRT}.managers.scheduler:Scheduler": (
            "draft_worker", "tp_worker", "server_args", "spec_algorithm", "metrics_collector",
            "metrics_collector_context",
        ),
        f"{_METRICS}:SchedulerMetricsCollectorContext": ("current_scheduler_metrics_enabled",),
        f"{_METRICS}:SchedulerMetricsCollector": ("labels", "log_stats"),
        f"{_SRT}.managers.tp_worker:TpModelWorker": ("model_runner", *usage),
        f"{_SRT}.model_executor.model_runner:ModelRunner": (
            "attn_backend", release.runner_attribute, "req_to_token_pool", "device", "gpu_id",
            "model_config", "forward_pass_id", "_get_attention_backend", "spec_algorithm",
            *(() if release.hybrid_arch else ("mambaish_config",)),
            *(() if release.captures_apart else (
                "is_draft_worker", "graph_mem_usage", "tp_group", "init_device_graphs",
            )),
        ),
        f"{_SRT}.mem_cache.memory_pool:ReqToTokenPool": ("size",),
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch": (
            "spec_info", "encoder_lens", "batch_size", "forward_mode", "replace_embeds",
            "can_run_tbo", "capture_hidden_mode", "original_global_num_tokens_cpu", "input_ids",
            release.dp_vote,
        ),
        f"{_SPEC}.eagle_info:EagleVerifyInput": ("num_tokens_per_req", "capture_hidden_mode"),
        f"{release.runner_module}:{release.runner_class}": (
            *synced, *calls_of_runner, *later, width, "capture_hidden_mode", "capture_bs",
            "capture",
        ),
        f"{_SPEC}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner": (
            *synced, asked, replayed,
        ),
        f"{_SPEC}.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner": (
            *synced, asked, replayed, width,
        ),
        f"{_WORKER}:EAGLEWorkerV2": (
            "speculative_num_steps", "speculative_num_draft_tokens", "_draft_worker",
            "adaptive_controller", "build_adaptive_runtime_state", *usage,
            *(("server_args",) if release.draft_arguments_copied else ()),
        ),
        f"{_WORKER}:EagleDraftWorker": (
            "draft_runner", "topk", "speculative_num_steps", "speculative_num_draft_tokens",
            "draft_attn_backend", "cuda_graph_runner", "draft_extend_attn_backend",
            "cuda_graph_runner_for_draft_extend", "_topk1_parents_prealloc",
            "_topk1_score_indices_prealloc", "_rebuild_topk1_chain_buffers",
            *(() if release.captures_apart else ("draft_tp_context", "init_cuda_graphs")),
        ),
        f"{_SPEC}.adaptive_runtime_state:SpecRuntimeState": (
            "draft_attn_backend", "cuda_graph_runner", "target_attn_backend",
            "target_graph_runner", "draft_extend_attn_backend",
            "cuda_graph_runner_for_draft_extend",
        ),
        f"{_SRT}.layers.attention.base_attn_backend:AttentionBackend": (
            "use_captured_forward_metadata_for_breakable_cuda_graph",
        ),
        f"{_SRT}.model_executor.forward_batch_info:ForwardMode": ("TARGET_VERIFY",),
        f"{_SRT}.model_executor.forward_batch_info:CaptureHiddenMode": ("NULL",),
        f"{_SPEC}.spec_info:SpeculativeAlgorithm": ("is_ngram", "is_eagle"),
        f"{_SRT}.distributed.parallel_state:GroupCoordinator": ("cpu_group", "rank_in_group"),
        f"{_SRT}.environ:Envs": (
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
            *(("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",) if release.zero_steps else ()),
        ),
        f"{_SRT}.managers.io_struct:GetInternalStateReqOutput": ("internal_state",),
        f"{_SRT}.managers.io_struct:SetInternalStateReq": ("server_args",),
        f"{_SRT}.managers.io_struct:SetInternalStateReqOutput": ("updated",),
        f"{_SRT}.managers.schedule_batch:ScheduleBatch": ("reqs",),
        f"{_SRT}.managers.schedule_batch:Req": ("skip_radix_cache_insert",),
        f"{_SRT}.managers.utils:GenerationBatchResult": ("speculative_num_draft_tokens",),
        f"{_SRT}.configs.model_config:ModelConfig": ("model_path", "revision", "dtype"),
    }  # fmt: skip
    if release.config_bags:
        table[f"{_SRT}.runtime_context:RuntimeContext"] = ("_overrides_log", "config_bag")
        table[f"{_SRT}.runtime_context:_ConfigBag"] = ("_set",)
    return table | ladder


def _one_width(release: Release) -> dict[str, tuple[str, ...]]:
    graphs = (
        "init_cuda_graphs", "cuda_graph_runner", "cuda_graph_runner_for_draft_extend",
        "draft_attn_backend", "draft_extend_attn_backend", "draft_tp_context", "draft",
    )  # fmt: skip
    steps = ("speculative_num_steps", "speculative_num_draft_tokens")
    gate = ("require_mlp_tp_gather", "require_mlp_sync", "num_tokens_per_bs", "can_run", "replay")
    llama = f"{_SRT}.models.llama:LlamaForCausalLM"
    layers = ("eagle_use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "model")
    return {
        f"{_SRT}.managers.scheduler:Scheduler": (
            "draft_worker", "tp_worker", "server_args", "spec_algorithm", "metrics_collector",
            "current_scheduler_metrics_enabled",
        ),
        f"{_SRT}.managers.tp_worker:TpModelWorker": ("model_runner",),
        f"{_SRT}.managers.schedule_batch:ScheduleBatch": ("seq_lens",),
        f"{_SRT}.managers.schedule_batch:ModelWorkerBatch": ("seq_lens",),
        f"{_SRT}.model_executor.model_runner:ModelRunner": (
            "attn_backend", "graph_runner", "req_to_token_pool", "device", "gpu_id",
            "forward_pass_id", "_get_attention_backend", "mambaish_config", "spec_algorithm",
            "is_draft_worker", "graph_mem_usage", "tp_group", "init_device_graphs",
            *(layers if release.captures_default_layers else ()),
            *(("piecewise_cuda_graph_runner",) if release.prefill_graph_takes_verify else ()),
        ),
        f"{_SRT}.mem_cache.memory_pool:ReqToTokenPool": ("size",),
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch": (
            "spec_info", "encoder_lens", "batch_size", "forward_mode", "can_run_tbo",
            "capture_hidden_mode", "global_num_tokens_cpu", release.dp_vote,
        ),
        f"{_SRT}.model_executor.forward_batch_info:ForwardMode": (
            "TARGET_VERIFY", "is_target_verify",
        ),
        f"{_SRT}.model_executor.forward_batch_info:CaptureHiddenMode": ("NULL",),
        f"{_SPEC}.eagle_info:EagleVerifyInput": ("draft_token_num", "capture_hidden_mode"),
        f"{release.runner_module}:{release.runner_class}": (
            *gate, "replay_prepare", "capture", "capture_bs", "capture_hidden_mode",
            "disable_padding", "is_encoder_decoder", "enable_two_batch_overlap",
        ),
        f"{_SPEC}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner": gate,
        f"{_SPEC}.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner": gate,
        f"{_WORKER}:EAGLEWorkerV2": (*steps, "_draft_worker"),
        f"{_WORKER}:EagleDraftWorker": (*graphs, "draft_runner"),
        f"{_SPEC}.eagle_worker:EAGLEWorker": (*steps, *graphs, "draft_model_runner"),
        f"{_SRT}.distributed.parallel_state:GroupCoordinator": ("cpu_group", "rank_in_group"),
        f"{_SRT}.environ:Envs": ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM",),
        f"{_SRT}.managers.io_struct:GetInternalStateReqOutput": ("internal_state",),
        f"{_SRT}.managers.io_struct:SetInternalStateReq": ("server_args",),
        f"{_SRT}.managers.io_struct:SetInternalStateReqOutput": ("updated",),
        **({llama: ("set_eagle3_layers_to_capture",)} if release.captures_default_layers else {}),
    }  # fmt: skip
