"""The releases of one width: what the adapter relies on, and the defects, in the wheels' source."""

from __future__ import annotations

import ast

import pytest

from sglang_verify_graphs.compat.preflight import (
    check,
    check_values,
    check_worker,
    in_source,
    refused,
)
from sglang_verify_graphs.compat.releases import RELEASES, Release
from sglang_verify_graphs.compat.requirements import requirements_of
from tests.contract.conftest import source_of
from tests.contract.source import Missing, Source, calls, dotted, parameters, reads, stores

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_SPEC = f"{_SRT}.speculative"
_RUNNER = f"{_SRT}.model_executor.cuda_graph_runner"
_MODEL = f"{_SRT}.model_executor.model_runner"


@pytest.fixture
def wheel(legacy: Release) -> Source:
    return source_of(legacy)


def test_requirements(wheel: Source, legacy: Release) -> None:
    needs, find = requirements_of(legacy), in_source(wheel)
    assert refused(check(needs.launcher, find)) == []
    assert refused(check_worker(needs, find)) == []
    assert refused(check_values(legacy, wheel)) == []


def test_what_a_later_release_needs_is_not_there(wheel: Source) -> None:
    """The check can fail: these releases are not served as the one after them is."""
    newer = next(r for r in RELEASES if not r.one_width)
    assert refused(check_worker(requirements_of(newer), in_source(wheel)))


# -- the gate --------------------------------------------------------------------------------------

CONDITIONS = {
    "batch_size", "max_bs", "global_num_tokens_cpu", "num_tokens_per_bs",  # BATCH_ABOVE_LADDER
    "disable_padding", "graphs",  # EXACT_BATCH_MISSING
    "can_run_dp_cuda_graph",  # DP_PEER
    "encoder_lens", "is_encoder_decoder",  # ENCODER_LENGTH_ZERO
    "capture_hidden_mode",  # HIDDEN_MODE
    "can_run_tbo", "enable_two_batch_overlap",  # TWO_BATCH_OVERLAP
    "is_ngram", "input_ids",  # other algorithms are refused
    "replace_embeds",  # REPLACED_EMBEDDINGS
    "enable_pdmux", "_resolve_lora_variant", "_make_graph_key",  # refused: PD multiplexing, LoRA
}  # fmt: skip
PLUMBING = {
    "NULL", "all", "is_dflash", "is_eagle", "is_standalone", "model_runner", "numel",
    "require_mlp_sync", "require_mlp_tp_gather", "seq_lens", "spec_algorithm", "spec_info",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (_RUNNER, "CudaGraphRunner"),
        (f"{_SPEC}.eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner"),
        (f"{_SPEC}.eagle_draft_extend_cuda_graph_runner", "EAGLEDraftExtendCudaGraphRunner"),
    ],
)
def test_every_condition_of_the_gate_is_known(wheel: Source, module: str, name: str) -> None:
    assert reads(wheel.function(module, f"{name}.can_run")) <= CONDITIONS | PLUMBING


def test_defect_no_width_check(wheel: Source) -> None:
    """Stock's gate divides by its width and never looks at the batch's; ours does."""
    gate = wheel.function(_RUNNER, "CudaGraphRunner.can_run")
    assert "draft_token_num" not in reads(gate)
    assert "num_tokens_per_req" not in reads(gate)


def test_defect_recapture_in_mid_serving(wheel: Source) -> None:
    """``replay_prepare`` captures the whole ladder anew where the hidden mode differs."""
    prepare = wheel.function(_RUNNER, "CudaGraphRunner.replay_prepare")
    again = wheel.function(_RUNNER, "CudaGraphRunner.recapture_if_needed")
    assert calls(prepare, "recapture_if_needed")
    (capture,) = calls(again, "capture")
    assert dotted(capture.func) == "self.capture"


def test_defect_a_batch_without_hidden_states_passes_the_gate(wheel: Source) -> None:
    """So it does reach ``replay_prepare``: the gate takes "none wanted" for a match."""
    gate = ast.unparse(wheel.function(_RUNNER, "CudaGraphRunner.can_run"))
    assert "requested_capture_hidden_mode == CaptureHiddenMode.NULL or" in gate


def test_defect_eagle3_layers(wheel: Source, legacy: Release) -> None:
    """The runner asks for layers without saying which, and before the model runner says which."""
    setup = wheel.function(_RUNNER, "CudaGraphRunner.__init__")
    asked = calls(setup, "set_eagle3_layers_to_capture")
    assert bool(asked) == legacy.captures_default_layers
    assert not any(call.args or call.keywords for call in asked)
    if asked:
        start = wheel.function(_MODEL, "ModelRunner.initialize")
        (configured,) = calls(start, "set_eagle3_layers_to_capture")
        captures = calls(start, "init_device_graphs")
        assert configured.lineno > max(call.lineno for call in captures)
        assert dotted(configured.args[0]) == "self.eagle_aux_hidden_state_layer_ids"


def test_defect_prefill_graph_takes_a_verify(wheel: Source, legacy: Release) -> None:
    """A refused verify is an extend, and that asks the graphs captured for prefill."""
    module = f"{_SRT}.model_executor.piecewise_cuda_graph_runner"
    gate = wheel.function(module, "PiecewiseCudaGraphRunner.can_run")
    assert parameters(gate) == ["self", "forward_batch"]
    assert ("is_target_verify" not in reads(gate)) == legacy.prefill_graph_takes_verify
    extend = wheel.function(_MODEL, "ModelRunner.forward_extend")
    (asked,) = calls(extend, "can_run")
    assert dotted(asked.func) == "self.piecewise_cuda_graph_runner.can_run"


def test_defect_truncated_ladder(wheel: Source, legacy: Release) -> None:
    """Case 3: of 100 asked for, 96 are captured, unless the limit itself is added."""
    build = wheel.function(f"{_SRT}.server_args", "ServerArgs._generate_cuda_graph_batch_sizes")
    namespace: dict[str, object] = {}
    exec(ast.unparse(ast.fix_missing_locations(ast.Module([build], []))), namespace)

    class Arguments:
        disable_cuda_graph_padding = False
        speculative_algorithm = "EAGLE3"
        cuda_graph_max_bs = 100

    ladder = namespace["_generate_cuda_graph_batch_sizes"](Arguments())  # type: ignore[operator]
    assert max(ladder) == (96 if legacy.truncates_ladder else 100)


# -- start-up and rounds ---------------------------------------------------------------------------

_DRAFTERS = [
    (f"{_SPEC}.eagle_worker", "EAGLEWorker"),
    (f"{_SPEC}.eagle_worker_v2", "EagleDraftWorker"),
]


@pytest.mark.parametrize(("module", "name"), _DRAFTERS)
def test_draft_graphs_are_the_last_that_a_constructor_makes(
    wheel: Source, module: str, name: str
) -> None:
    """They can be made later: after them a constructor sets tensors of its own and nothing else."""
    setup = wheel.function(module, f"{name}.__init__")
    (capture,) = calls(setup, "init_cuda_graphs")
    after = [n for n in ast.walk(setup) if isinstance(n, ast.Call) and n.lineno > capture.lineno]
    assert {dotted(call.func).split(".")[-1] for call in after} <= {
        "empty", "_get_plan_stream", "register", "init_states", "SpecRuntimeState",
    }  # fmt: skip


def test_the_target_captures_before_the_draft_worker_is_built(wheel: Source) -> None:
    start = wheel.function(f"{_SRT}.managers.scheduler", "Scheduler.init_model_worker")
    (target,), (draft,) = (
        calls(start, "init_tp_model_worker"),
        calls(start, "maybe_init_draft_worker"),
    )
    assert target.lineno < draft.lineno


def test_a_round_begins_with_its_draft(wheel: Source) -> None:
    """Both workers draft once in a decode round and never in prefill, by the wrapped name."""
    for module, name, call in (
        (f"{_SPEC}.eagle_worker", "EAGLEWorker", "self.draft"),
        (f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2", "self.draft_worker.draft"),
    ):
        forward = wheel.function(module, f"{name}.forward_batch_generation")
        (draft,) = [c for c in calls(forward, "draft") if dotted(c.func) == call]
        assert len(draft.args) == 1
        (verify,) = [c for c in calls(forward, "verify") if dotted(c.func) == "self.verify"]
        assert draft.lineno < verify.lineno
        prefill = next(n for n in forward.body if isinstance(n, ast.If)).body
        assert not calls(ast.Module(prefill, []), "draft")


def test_the_worker_asks_the_runners_that_are_replaced(wheel: Source) -> None:
    """v1 and v2 keep the draft's runners under the same two names."""
    for module, name in _DRAFTERS:
        names = stores(wheel.function(module, f"{name}.init_cuda_graphs"))
        assert names == {"self.cuda_graph_runner", "self.cuda_graph_runner_for_draft_extend"}


def test_no_worker_switches(wheel: Source) -> None:
    """What is refused: a decode round of these releases asks nobody for its step count."""
    for module, name in (_DRAFTERS[0], (f"{_SPEC}.eagle_worker_v2", "EAGLEWorkerV2")):
        with pytest.raises(Missing):
            wheel.function(module, f"{name}.activate_step_by_batch")


def test_server_arguments(wheel: Source) -> None:
    """What a release has no argument for reads as False; nothing that all have may be misspelt."""
    names = wheel.attributes(f"{_SRT}.server_args", "ServerArgs")
    assert {
        "speculative_algorithm", "speculative_eagle_topk", "speculative_num_steps",
        "speculative_num_draft_tokens", "tp_size", "pp_size", "enable_dp_attention",
        "enable_dp_lm_head", "disaggregation_mode", "enable_two_batch_overlap", "enable_pdmux",
        "enable_multi_layer_eagle", "enable_lora", "enable_return_hidden_states",
        "enable_deterministic_inference", "disable_cuda_graph_padding", "disable_cuda_graph",
        "cuda_graph_bs",
    } <= names  # fmt: skip
