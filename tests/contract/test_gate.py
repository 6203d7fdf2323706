"""Every condition under which stock refuses a replay is one that the gate has a reason for."""

from __future__ import annotations

import ast

import pytest

from sglang_verify_graphs.compat.releases import RELEASES, Release
from sglang_verify_graphs.gate import RejectReason
from tests.contract.conftest import source_of, sources
from tests.contract.source import Source, calls, dotted, reads

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_BATCH = f"{_SRT}.model_executor.forward_batch_info"

CONDITIONS: dict[str, RejectReason] = {
    "replace_embeds": RejectReason.REPLACED_EMBEDDINGS,
    "ragged_verify_mode": RejectReason.RAGGED_VERIFY,
    "num_tokens_per_req": RejectReason.STEPS_NOT_CAPTURED,
    "num_tokens_per_bs": RejectReason.STEPS_NOT_CAPTURED,
    "captured_req_width": RejectReason.STEPS_NOT_CAPTURED,
    "max_bs": RejectReason.BATCH_ABOVE_LADDER,
    "batch_size": RejectReason.BATCH_ABOVE_LADDER,
    "original_global_num_tokens_cpu": RejectReason.BATCH_ABOVE_LADDER,
    "global_num_tokens_cpu": RejectReason.BATCH_ABOVE_LADDER,
    "_max_dp_batch_size": RejectReason.BATCH_ABOVE_LADDER,
    "seq_lens": RejectReason.BATCH_ABOVE_LADDER,
    "disable_padding": RejectReason.EXACT_BATCH_MISSING,
    "can_run": RejectReason.EXACT_BATCH_MISSING,
    "graphs": RejectReason.EXACT_BATCH_MISSING,
    "can_run_dp_cuda_graph": RejectReason.DP_PEER,
    "can_run_decode_cuda_graph": RejectReason.DP_PEER,
    "can_run_dp_draft_cuda_graph": RejectReason.DP_PEER,
    "encoder_lens": RejectReason.ENCODER_LENGTH_ZERO,
    "can_run_tbo": RejectReason.TWO_BATCH_OVERLAP,
    "capture_hidden_mode": RejectReason.HIDDEN_MODE,
    "is_ngram": RejectReason.NGRAM_TOKEN_COUNT,
    "input_ids": RejectReason.NGRAM_TOKEN_COUNT,
    "_resolve_lora_variant": RejectReason.GRAPH_VARIANT_MISSING,
    "_resolve_attention_variant": RejectReason.GRAPH_VARIANT_MISSING,
    "_sampling_variant": RejectReason.GRAPH_VARIANT_MISSING,
    "enable_pdmux": RejectReason.GRAPH_VARIANT_MISSING,
}
PLUMBING = {
    "NULL",
    "_can_run_ragged_verify_graph", "_make_graph_key", "all", "backend", "enable_two_batch_overlap",
    "forward_mode", "is_dflash", "is_eagle", "is_encoder_decoder", "is_standalone",
    "is_target_verify", "model_runner", "numel", "require_mlp_sync", "require_mlp_tp_gather",
    "spec_algorithm", "spec_info",
}  # fmt: skip
"""Names on the way to a condition, none of them a condition of its own."""


def gates(release: Release) -> list[tuple[str, str]]:
    name = "can_run_graph" if release.runner_package else "can_run"
    spec = f"{_SRT}.speculative"
    return [
        (release.runner_module, f"{release.runner_class}.{name}"),
        (f"{spec}.eagle_draft_cuda_graph_runner", f"EAGLEDraftCudaGraphRunner.{name}"),
        (
            f"{spec}.eagle_draft_extend_cuda_graph_runner",
            f"EAGLEDraftExtendCudaGraphRunner.{name}",
        ),
    ]


def test_no_condition_is_unknown(source: Source, release: Release) -> None:
    for module, gate in gates(release):
        found = reads(source.function(module, gate)) - PLUMBING
        assert found - set(CONDITIONS) == set()
        assert {release.width_attribute, "max_bs", "disable_padding"} <= found


def test_every_known_condition_is_in_some_release() -> None:
    """Names that no gate of any release reads any more do not stay in the table."""
    found: set[str] = set()
    for release in RELEASES:
        if (sources() / release.version).is_dir():
            unpacked = source_of(release)
            for module, gate in gates(release):
                found |= reads(unpacked.function(module, gate))
    assert set(CONDITIONS) - found == set()
    assert PLUMBING - found == set()


def test_what_stands_before_the_gate(source: Source, release: Release) -> None:
    """FORWARD_MODE and NO_RUNNER: a forward asks its mode and its runner before the gate."""
    gate = gates(release)[0][1].split(".")[-1]
    kept = f"self.{release.runner_attribute}"
    forward = source.function(f"{_SRT}.model_executor.model_runner", "ModelRunner._forward_raw")
    decode = next(
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.BoolOp)
        and isinstance(node.op, ast.And)
        and calls(node, gate)
        and release.runner_attribute in reads(node)
    )
    assert [ast.unparse(value) for value in decode.values] == [
        "mode_check()",
        kept,
        f"{kept}.{gate}(forward_batch)",
    ]
    modes = {n.attr for n in ast.walk(forward) if isinstance(n, ast.Attribute)}
    assert {"is_cuda_graph", "is_cpu_graph"} <= modes


def test_verify_is_a_graph_mode(source: Source) -> None:
    names = reads(source.function(_BATCH, "ForwardMode.is_cuda_graph"))
    assert "TARGET_VERIFY" in names


def test_verify_asks_the_gate_when_it_prepares(source: Source, release: Release) -> None:
    """The first of the two answers of a round; the second comes from ``_forward_raw``."""
    module = "eagle_utils" if release.runner_package else "eagle_info_v2"
    gate = gates(release)[0][1].split(".")[-1]
    asked = [
        call
        for call in calls(source.tree(f"{_SRT}.speculative.{module}"), gate)
        if dotted(call.func).endswith(f"model_runner.{release.runner_attribute}.{gate}")
    ]
    assert len(asked) == 1


def test_hidden_modes_are_ordered(source: Source) -> None:
    """HIDDEN_MODE compares them. What stock does after the gate is a flag of the release."""
    modes = source.find(_BATCH, "CaptureHiddenMode").node
    assert [dotted(base) for base in modes.bases] == ["IntEnum"]
    order = {
        target.id: item.value.value
        for item in modes.body
        if isinstance(item, ast.Assign)
        for target in item.targets
    }
    assert order == {"NULL": 0, "LAST": 1, "FULL": 2}
