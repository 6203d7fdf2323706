"""Each capability flag of ``compat/releases.py`` says what the source of that release says."""

from __future__ import annotations

import ast

import pytest

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.compat.source import required
from tests.contract.source import (
    Function,
    Missing,
    Source,
    calls,
    dotted,
    parameters,
    reads,
    stores,
)

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_SPEC = f"{_SRT}.speculative"
_WORKER = f"{_SPEC}.eagle_worker_v2"
_EXTEND = f"{_SPEC}.eagle_draft_extend_cuda_graph_runner"
_BATCH = f"{_SRT}.model_executor.forward_batch_info"
_DRAFT_RUNNERS = (
    (f"{_SPEC}.eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner"),
    (_EXTEND, "EAGLEDraftExtendCudaGraphRunner"),
)


def runner(source: Source, release: Release, method: str) -> Function:
    """A method of the decode runner."""
    return source.function(release.runner_module, f"{release.runner_class}.{method}")


def gate_of(release: Release) -> str:
    return "can_run_graph" if release.runner_package else "can_run"


def load_of(release: Release) -> str:
    return "load_batch" if release.runner_package else "replay_prepare"


def has(source: Source, module: str, qualname: str = "") -> bool:
    try:
        source.find(module, qualname) if qualname else source.tree(module)
    except Missing:
        return False
    return True


def test_runner_package(source: Source, release: Release) -> None:
    package = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner"
    assert has(source, package) == release.runner_package
    assert has(source, f"{_SRT}.model_executor.cuda_graph_runner") != release.runner_package
    kept = source.attributes(f"{_SRT}.model_executor.model_runner", "ModelRunner")
    assert release.runner_attribute in kept
    assert ("graph_runner" in kept) != release.runner_package


def test_captures_apart(source: Source, release: Release) -> None:
    scheduler = source.attributes(f"{_SRT}.managers.scheduler", "Scheduler")
    assert ("init_all_cuda_graphs" in scheduler) == release.captures_apart
    built = source.function(_WORKER, "EagleDraftWorker.__init__")
    assert bool(calls(built, "init_cuda_graphs")) != release.captures_apart


def test_what_is_put_off_is_what_captures(source: Source, release: Release) -> None:
    """Two methods capture in constructors; the draft's runs in the contexts that we enter again."""
    if release.captures_apart:
        return
    target = f"{_SRT}.model_executor.model_runner"
    (made,) = (
        ast.unparse(node)
        for node in ast.walk(source.function(target, "ModelRunner.init_device_graphs"))
        if isinstance(node, ast.Assign) and "graph_runners[" in ast.unparse(node.value)
    )
    assert made == "self.graph_runner = graph_runners[self.device](self)"
    init = source.function(_WORKER, "EagleDraftWorker.__init__")
    entered = [
        [ast.unparse(item.context_expr) for item in node.items]
        for node in ast.walk(init)
        if isinstance(node, ast.With) and calls(node, "init_cuda_graphs")
    ]
    assert entered == [
        [
            "self.draft_tp_context(self.draft_runner.tp_group)",
            "speculative_moe_backend_context()",
            "speculative_moe_a2a_backend_context()",
        ]
    ]
    start = source.function(f"{_SRT}.managers.scheduler", "Scheduler.init_model_worker")
    assert [dotted(c.func) for c in calls(start, "init_tp_model_worker")]
    assert not calls(start, "init_device_graphs")
    assert "graph_runner" not in reads(start)


def test_zero_steps(source: Source, release: Release) -> None:
    assert has(source, _WORKER, "EAGLEWorkerV2._build_trivial_verify_input") == release.zero_steps
    environ = source.attributes(f"{_SRT}.environ", "Envs")
    assert ("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND" in environ) == release.zero_steps


def test_extend_backend_on_runner(source: Source, release: Release) -> None:
    apply = source.function(_WORKER, "EAGLEWorkerV2.apply_runtime_state")
    assert ("dw.draft_runner.attn_backend" in stores(apply)) == release.extend_backend_on_runner


def test_config_bags(source: Source, release: Release) -> None:
    bags = has(source, f"{_SRT}.runtime_context", "RuntimeContext.config_bag")
    assert bags == release.config_bags
    assert has(source, f"{_SRT}.arg_groups.arg_utils", "namespace_of") == release.config_bags


def test_parallel_context(source: Source, release: Release) -> None:
    assert has(source, f"{_SRT}.runtime_context", "get_parallel") == release.parallel_context


def test_hybrid_arch(source: Source, release: Release) -> None:
    assert has(source, f"{_SRT}.configs.hybrid_arch") == release.hybrid_arch


def test_usage_per_phase(source: Source, release: Release) -> None:
    names = source.attributes(f"{_SRT}.managers.tp_worker", "TpModelWorker")
    assert ("graph_memory_usage" in names) == release.usage_per_phase


def test_width_attribute(source: Source, release: Release) -> None:
    """The name came together with the check of the width in stock's own gate."""
    gate = runner(source, release, gate_of(release))
    checked = "captured_req_width" in reads(gate)
    assert checked == (release.width_attribute == "captured_req_width")
    assert f"self.{release.width_attribute}" in stores(runner(source, release, "__init__"))


def test_integer_keys(source: Source, release: Release) -> None:
    """Without padding the gate asks for a number where graphs are kept under a ShapeKey."""
    if not release.runner_package:
        assert not release.integer_keys  # numbers there on both sides
        return
    gate = runner(source, release, "can_run_graph")
    asked = [call for call in calls(gate, "can_run") if "backend" in dotted(call.func)]
    keyed = {
        dotted(node.targets[0])
        for node in ast.walk(gate)
        if isinstance(node, ast.Assign) and calls(node.value, "_make_graph_key")
    }
    by_key = all(ast.unparse(call.args[1]) in keyed for call in asked)
    assert asked
    assert by_key != release.integer_keys
    for module, name in _DRAFT_RUNNERS:
        setup = source.function(module, f"{name}.__init__")
        assert "self.disable_padding" in stores(setup)  # what the adapter sets after the capture


def test_padding_is_read_by_the_gate_alone(source: Source, release: Release) -> None:
    """Where we clear ``disable_padding`` of a runner after its capture, nothing else may change."""
    if not release.integer_keys:
        return
    for module, name in ((release.runner_module, release.runner_class), *_DRAFT_RUNNERS):
        readers = {
            item.name
            for item in source.find(module, name).node.body
            if isinstance(item, ast.FunctionDef) and "disable_padding" in reads(item)
        }
        assert readers == {"can_run_graph"}


def test_recaptures_hidden_mode(source: Source, release: Release) -> None:
    load = runner(source, release, load_of(release))
    assert bool(calls(load, "recapture_if_needed")) == release.recaptures_hidden_mode
    assert bool(calls(load, "_validate_capture_hidden_mode")) != release.recaptures_hidden_mode


def test_allocation_module(source: Source, release: Release) -> None:
    function = source.function(release.allocation_module, "get_alloc_len_per_decode")
    assert len(function.args.args) == len(function.args.defaults)


def test_draft_extend_width_from_server_args(source: Source, release: Release) -> None:
    setup = source.function(_EXTEND, "EAGLEDraftExtendCudaGraphRunner.__init__")
    widths = calls(setup, "resolve_num_tokens_per_req")
    # Without the bags, ``build_adaptive_runtime_state`` writes the width into the server args.
    from_args = bool(widths) and "server_args" in {k.arg for k in widths[0].keywords}
    assert (from_args and release.config_bags) == release.draft_extend_width_from_server_args


def test_draft_extend_width_can_be_handed_over(source: Source, release: Release) -> None:
    """The adapter replaces the name in that module, by keyword, for the phase ``draft_extend``."""
    if not release.draft_extend_width_from_server_args:
        return
    setup = source.function(_EXTEND, "EAGLEDraftExtendCudaGraphRunner.__init__")
    (call,) = calls(setup, "resolve_num_tokens_per_req")
    assert isinstance(call.func, ast.Name)
    assert not call.args
    phase = next(k.value for k in call.keywords if k.arg == "phase")
    assert isinstance(phase, ast.Constant)
    assert phase.value == "draft_extend"


def test_stream_per_capture(source: Source, release: Release) -> None:
    captures = calls(source.find(release.runner_module, release.runner_class).node, "graph_capture")
    bare = [call for call in captures if not call.args and not call.keywords]
    assert len(captures) == 2
    assert len(bare) == int(release.stream_per_capture)


def test_the_draft_runners_capture_as_the_decode_runner_does(
    source: Source, release: Release
) -> None:
    """One replaced ``graph_capture`` reaches all three phases, and so does one meter."""
    for module, name in _DRAFT_RUNNERS:
        capture = source.find(module, f"{name}.capture")
        if release.runner_package:
            assert capture.module == release.runner_module
        else:
            (call,) = calls(capture.node, "capture")
            assert dotted(call.func) == f"{release.runner_class}.capture"


def test_dp_vote(source: Source, release: Release) -> None:
    batch = source.find(_BATCH, "ForwardBatch").node
    fields = {dotted(item.target) for item in batch.body if isinstance(item, ast.AnnAssign)}
    gate = runner(source, release, gate_of(release))
    votes = {
        n.attr for n in ast.walk(gate) if isinstance(n, ast.Attribute) and "can_run_d" in n.attr
    }
    assert votes == {release.dp_vote}
    assert release.dp_vote in fields


def test_alignment(source: Source, release: Release) -> None:
    name = "get_cuda_graph_batch_size_alignment"
    assert has(source, f"{_SRT}.utils.common", name) == release.alignment_function
    if not release.alignment_function:
        assert not release.alignment_from_server_args
        return
    function = source.function(f"{_SRT}.utils.common", name)
    assert ("server_args" in parameters(function)) == release.alignment_from_server_args
    assert required(function) == ["server_args"] * release.alignment_from_server_args


def test_alignment_by_hand(source: Source, release: Release) -> None:
    """Where we work the alignment out, from the three sizes that stock takes it from."""
    if release.alignment_function:
        return
    module = release.runner_module
    if release.runner_package:
        module = f"{_SRT}.model_executor.runner.base_cuda_graph_runner"
    text = ast.unparse(source.function(module, "get_batch_sizes_to_capture"))
    assert "if require_gathered_buffer(server_args):\n        mul_base *= " in text
    assert text.count("mul_base *=") == 3  # the third: two-batch overlap, which is refused
    assert "attn_tp_size" in text or "get_attention_tp_size()" in text
    assert "attn_cp_size" in text or "get_attention_cp_size()" in text


def test_captured_batches_come_from_the_ladder_that_is_replaced(
    source: Source, release: Release
) -> None:
    """The adapter sets it for the time of a capture."""
    module, field = (
        f"{_SRT}.model_executor.runner.base_cuda_graph_runner",
        "cuda_graph_config.decode.bs",
    )
    if not release.runner_package:
        module, field = release.runner_module, "server_args.cuda_graph_bs"
    choose = source.function(module, "get_batch_sizes_to_capture")
    read = {dotted(n) for n in ast.walk(choose) if isinstance(n, ast.Attribute)}
    assert any(chain.endswith(field) for chain in read)


def test_draft_arguments_copied(source: Source, release: Release) -> None:
    """The decode ladder of the copy is an object of its own, and the draft's runners read it."""
    copied = "draft_server_args_copy" in source.text(f"{_SRT}.managers.scheduler")
    assert copied == release.draft_arguments_copied
