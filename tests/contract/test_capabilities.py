"""Each capability flag of ``compat/releases.py`` says what the source of that release says."""

from __future__ import annotations

import ast

import pytest

from sglang_verify_graphs.compat.releases import Release
from tests.contract.source import Source, calls, dotted, parameters

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_DECODE = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner"
_EXTEND = f"{_SRT}.speculative.eagle_draft_extend_cuda_graph_runner"


def test_draft_extend_width_from_server_args(source: Source, release: Release) -> None:
    setup = source.function(_EXTEND, "EAGLEDraftExtendCudaGraphRunner.__init__")
    widths = calls(setup, "resolve_num_tokens_per_req")
    assert len(widths) == 1
    given = {keyword.arg for keyword in widths[0].keywords}
    assert ("server_args" in given) == release.draft_extend_width_from_server_args
    assert "phase" in given


def test_draft_extend_width_can_be_handed_over(source: Source) -> None:
    """The adapter replaces the name in that module, by keyword, for the phase ``draft_extend``."""
    setup = source.function(_EXTEND, "EAGLEDraftExtendCudaGraphRunner.__init__")
    (call,) = calls(setup, "resolve_num_tokens_per_req")
    assert isinstance(call.func, ast.Name)
    assert not call.args
    phase = next(k.value for k in call.keywords if k.arg == "phase")
    assert isinstance(phase, ast.Constant)
    assert phase.value == "draft_extend"


def test_stream_per_capture(source: Source, release: Release) -> None:
    captures = calls(source.find(_DECODE, "DecodeCudaGraphRunner").node, "graph_capture")
    bare = [call for call in captures if not call.args and not call.keywords]
    assert len(captures) == 2
    assert len(bare) == int(release.stream_per_capture)


def test_the_draft_runners_capture_as_the_decode_runner_does(source: Source) -> None:
    """One replaced ``graph_capture`` reaches all three phases."""
    for module, name in (
        (f"{_SRT}.speculative.eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner"),
        (_EXTEND, "EAGLEDraftExtendCudaGraphRunner"),
    ):
        assert source.find(module, f"{name}.capture").module == _DECODE


def test_dp_vote(source: Source, release: Release) -> None:
    batch = source.find(f"{_SRT}.model_executor.forward_batch_info", "ForwardBatch").node
    fields = {dotted(item.target) for item in batch.body if isinstance(item, ast.AnnAssign)}
    gate = source.function(_DECODE, "DecodeCudaGraphRunner.can_run_graph")
    votes = {
        n.attr for n in ast.walk(gate) if isinstance(n, ast.Attribute) and "can_run_d" in n.attr
    }
    assert votes == {release.dp_vote}
    assert release.dp_vote in fields


def test_alignment_signature(source: Source, release: Release) -> None:
    function = source.function(f"{_SRT}.utils.common", "get_cuda_graph_batch_size_alignment")
    assert ("server_args" in parameters(function)) == release.alignment_from_server_args
    required = len(function.args.args) - len(function.args.defaults)
    assert required == int(release.alignment_from_server_args)


def test_captured_batches_come_from_the_ladder_that_is_replaced(source: Source) -> None:
    """The adapter sets ``cuda_graph_config.decode.bs`` for the time of a capture."""
    choose = source.function(
        f"{_SRT}.model_executor.runner.base_cuda_graph_runner", "get_batch_sizes_to_capture"
    )
    read = {dotted(n) for n in ast.walk(choose) if isinstance(n, ast.Attribute)}
    assert any(chain.endswith("cuda_graph_config.decode.bs") for chain in read)
