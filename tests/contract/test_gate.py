"""Every condition under which stock refuses a replay is one that the gate has a reason for."""

from __future__ import annotations

import ast

import pytest

from sglang_verify_graphs.gate import RejectReason
from tests.contract.source import Source, calls, dotted, reads

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_DECODE = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner"
_BATCH = f"{_SRT}.model_executor.forward_batch_info"

CONDITIONS: dict[str, RejectReason] = {
    "replace_embeds": RejectReason.REPLACED_EMBEDDINGS,
    "ragged_verify_mode": RejectReason.RAGGED_VERIFY,
    "num_tokens_per_req": RejectReason.STEPS_NOT_CAPTURED,
    "captured_req_width": RejectReason.STEPS_NOT_CAPTURED,
    "max_bs": RejectReason.BATCH_ABOVE_LADDER,
    "batch_size": RejectReason.BATCH_ABOVE_LADDER,
    "original_global_num_tokens_cpu": RejectReason.BATCH_ABOVE_LADDER,
    "_max_dp_batch_size": RejectReason.BATCH_ABOVE_LADDER,
    "seq_lens": RejectReason.BATCH_ABOVE_LADDER,
    "disable_padding": RejectReason.EXACT_BATCH_MISSING,
    "can_run": RejectReason.EXACT_BATCH_MISSING,
    "can_run_dp_cuda_graph": RejectReason.DP_PEER,
    "can_run_decode_cuda_graph": RejectReason.DP_PEER,
    "can_run_dp_draft_cuda_graph": RejectReason.DP_PEER,
    "encoder_lens": RejectReason.ENCODER_LENGTH_ZERO,
    "can_run_tbo": RejectReason.TWO_BATCH_OVERLAP,
    "is_ngram": RejectReason.NGRAM_TOKEN_COUNT,
    "input_ids": RejectReason.NGRAM_TOKEN_COUNT,
    "_resolve_lora_variant": RejectReason.GRAPH_VARIANT_MISSING,
    "_resolve_attention_variant": RejectReason.GRAPH_VARIANT_MISSING,
    "_sampling_variant": RejectReason.GRAPH_VARIANT_MISSING,
    "enable_pdmux": RejectReason.GRAPH_VARIANT_MISSING,
}
PLUMBING = {
    "_can_run_ragged_verify_graph", "_make_graph_key", "all", "backend", "enable_two_batch_overlap",
    "forward_mode", "is_encoder_decoder", "is_target_verify", "model_runner", "numel",
    "require_mlp_sync", "require_mlp_tp_gather", "spec_algorithm", "spec_info",
}  # fmt: skip
"""Names on the way to a condition, none of them a condition of its own."""

GATES = [
    (_DECODE, "DecodeCudaGraphRunner.can_run_graph"),
    (
        f"{_SRT}.speculative.eagle_draft_cuda_graph_runner",
        "EAGLEDraftCudaGraphRunner.can_run_graph",
    ),
    (
        f"{_SRT}.speculative.eagle_draft_extend_cuda_graph_runner",
        "EAGLEDraftExtendCudaGraphRunner.can_run_graph",
    ),
]


@pytest.mark.parametrize(("module", "gate"), GATES, ids=lambda value: str(value).split(".")[0])
def test_no_condition_is_unknown(source: Source, module: str, gate: str) -> None:
    found = reads(source.function(module, gate)) - PLUMBING
    assert found - set(CONDITIONS) == set()
    assert {"captured_req_width", "max_bs", "disable_padding"} <= found


def test_every_known_condition_is_in_some_release(source: Source) -> None:
    """The verify gate has them all, but for names that another release or phase uses."""
    found = reads(source.function(*GATES[0]))
    elsewhere = {
        "original_global_num_tokens_cpu", "_max_dp_batch_size", "seq_lens",
        "can_run_dp_cuda_graph", "can_run_decode_cuda_graph", "can_run_dp_draft_cuda_graph",
        "_resolve_attention_variant", "_sampling_variant",
    }  # fmt: skip
    assert set(CONDITIONS) - found <= elsewhere


def test_what_stands_before_the_gate(source: Source) -> None:
    """FORWARD_MODE and NO_RUNNER: a forward asks its mode and its runner before the gate."""
    forward = source.function(f"{_SRT}.model_executor.model_runner", "ModelRunner._forward_raw")
    decode = next(
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.BoolOp)
        and isinstance(node.op, ast.And)
        and calls(node, "can_run_graph")
        and "decode_cuda_graph_runner" in reads(node)
    )
    assert [ast.unparse(value) for value in decode.values] == [
        "mode_check()",
        "self.decode_cuda_graph_runner",
        "self.decode_cuda_graph_runner.can_run_graph(forward_batch)",
    ]
    modes = {n.attr for n in ast.walk(forward) if isinstance(n, ast.Attribute)}
    assert {"is_cuda_graph", "is_cpu_graph"} <= modes


def test_verify_is_a_graph_mode(source: Source) -> None:
    names = reads(source.function(_BATCH, "ForwardMode.is_cuda_graph"))
    assert "TARGET_VERIFY" in names


def test_verify_asks_the_gate_when_it_prepares(source: Source) -> None:
    """The first of the two answers of a round; the second comes from ``_forward_raw``."""
    tree = source.tree(f"{_SRT}.speculative.eagle_utils")
    asked = [
        call
        for call in calls(tree, "can_run_graph")
        if dotted(call.func).endswith("decode_cuda_graph_runner.can_run_graph")
    ]
    assert len(asked) == 1


def test_hidden_mode_is_checked_by_stock_after_the_gate(source: Source) -> None:
    """HIDDEN_MODE: stock raises in ``load_batch``, so our gate must refuse before."""
    load = source.function(_DECODE, "DecodeCudaGraphRunner.load_batch")
    assert calls(load, "_validate_capture_hidden_mode")
    modes = source.find(_BATCH, "CaptureHiddenMode").node
    assert [dotted(base) for base in modes.bases] == ["IntEnum"]
    order = {
        target.id: item.value.value
        for item in modes.body
        if isinstance(item, ast.Assign)
        for target in item.targets
    }
    assert order == {"NULL": 0, "LAST": 1, "FULL": 2}
