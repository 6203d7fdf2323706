"""Every SGLang name that the adapter reads, sets or replaces exists in every release."""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import logging
import time
from pathlib import Path

import pytest

import sglang_verify_graphs
from sglang_verify_graphs.compat.releases import RELEASES
from sglang_verify_graphs.compat.requirements import requirements_of
from tests.contract.source import Missing, Source, dotted, stores

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_SPEC = f"{_SRT}.speculative"
_RUNNER = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner"
_DRAFT = f"{_SPEC}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner"
_EXTEND = f"{_SPEC}.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner"
_WORKER = f"{_SPEC}.eagle_worker_v2"

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_SRT}.managers.scheduler:Scheduler": (
        "draft_worker", "tp_worker", "server_args",
    ),
    f"{_SRT}.managers.tp_worker:TpModelWorker": (
        "model_runner", "graph_memory_usage", "graph_time_usage",
    ),
    f"{_SRT}.model_executor.model_runner:ModelRunner": (
        "attn_backend", "decode_cuda_graph_runner", "req_to_token_pool", "device", "gpu_id",
        "model_config", "forward_pass_id", "_get_attention_backend", "spec_algorithm",
    ),
    f"{_SRT}.mem_cache.memory_pool:ReqToTokenPool": ("size",),
    f"{_SRT}.model_executor.forward_batch_info:ForwardBatch": (
        "spec_info", "encoder_lens", "batch_size", "forward_mode", "replace_embeds", "can_run_tbo",
        "capture_hidden_mode", "original_global_num_tokens_cpu", "input_ids",
    ),
    f"{_SPEC}.spec_info:SpecInput": ("num_tokens_per_req",),
    f"{_RUNNER}:DecodeCudaGraphRunner": (
        "require_mlp_tp_gather", "require_mlp_sync", "is_encoder_decoder", "ragged_verify_mode",
        "enable_two_batch_overlap", "capture_hidden_mode", "capture_bs", "captured_req_width",
        "disable_padding", "can_run_graph", "load_batch", "execute", "speculative_num_steps",
    ),
    _DRAFT: (
        "require_mlp_tp_gather", "require_mlp_sync", "can_run_graph", "execute",
        "capture_hidden_mode", "speculative_num_steps",
    ),
    _EXTEND: (
        "require_mlp_tp_gather", "require_mlp_sync", "captured_req_width", "can_run_graph",
        "execute", "capture_hidden_mode", "speculative_num_steps",
    ),
    f"{_WORKER}:EAGLEWorkerV2": (
        "speculative_num_steps", "speculative_num_draft_tokens", "_draft_worker",
        "adaptive_controller", "build_adaptive_runtime_state", "graph_memory_usage",
        "graph_time_usage",
    ),
    f"{_WORKER}:EagleDraftWorker": (
        "draft_runner", "topk", "speculative_num_steps", "speculative_num_draft_tokens",
        "draft_attn_backend", "cuda_graph_runner", "draft_extend_attn_backend",
        "cuda_graph_runner_for_draft_extend", "_topk1_parents_prealloc",
        "_topk1_score_indices_prealloc", "_rebuild_topk1_chain_buffers",
    ),
    f"{_SPEC}.adaptive_runtime_state:SpecRuntimeState": (
        "draft_attn_backend", "cuda_graph_runner", "target_attn_backend", "target_graph_runner",
        "draft_extend_attn_backend", "cuda_graph_runner_for_draft_extend",
    ),
    f"{_SRT}.layers.attention.base_attn_backend:AttentionBackend": (
        "use_captured_forward_metadata_for_breakable_cuda_graph",
    ),
    f"{_SRT}.model_executor.forward_batch_info:ForwardMode": ("TARGET_VERIFY",),
    f"{_SRT}.speculative.spec_info:SpeculativeAlgorithm": ("is_ngram",),
    f"{_SRT}.distributed.parallel_state:GroupCoordinator": ("cpu_group",),
    f"{_SRT}.runtime_context:RuntimeContext": ("_overrides_log", "config_bag"),
    f"{_SRT}.runtime_context:_ConfigBag": ("_set",),
    f"{_SRT}.environ:Envs": (
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
    ),
    f"{_SRT}.managers.io_struct:GetInternalStateReqOutput": ("internal_state",),
    f"{_SRT}.model_executor.cuda_graph_config:CudaGraphConfig": ("decode",),
    f"{_SRT}.model_executor.cuda_graph_config:PhaseConfig": ("bs", "backend"),
}  # fmt: skip
"""Class, and what the adapter uses of its instances."""

GLOBALS: tuple[str, ...] = (
    f"{_RUNNER}:graph_capture",
    f"{_RUNNER}:freeze_gc",
    f"{_SPEC}.eagle_draft_extend_cuda_graph_runner:resolve_num_tokens_per_req",
    f"{_SRT}.runtime_context:get_parallel",
    f"{_SRT}.runtime_context:get_spec",
    f"{_SRT}.runtime_context:get_context",
    f"{_SRT}.environ:envs",
    f"{_SRT}.model_executor.forward_batch_info:ForwardMode",
)
"""Module-level names that the adapter reads or replaces."""


def _cases(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(owner, name) for owner, names in table.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), _cases(ATTRIBUTES), ids=lambda v: v.split(":")[-1])
def test_attribute(source: Source, owner: str, name: str) -> None:
    module, classname = owner.split(":")
    assert name in source.attributes(module, classname)


@pytest.mark.parametrize("place", GLOBALS, ids=lambda v: v.split(":")[-1])
def test_global(source: Source, place: str) -> None:
    source.find(*place.split(":"))


PARALLEL = ("tp_rank", "attn_dp_size")
"""Names of ``get_parallel()``: properties, or generated from declarations."""


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_context(source: Source, name: str) -> None:
    names = source.attributes(f"{_SRT}.runtime_context", "ParallelContext")
    with contextlib.suppress(Missing):
        names |= source.attributes(f"{_SRT}.arg_groups.fields.parallel", "Parallel")
    assert name in names


# -- what the adapter itself says ------------------------------------------------------------------

_PACKAGE = Path(sglang_verify_graphs.__file__).parent
_ADAPTER = ("compat/engine.py", "controller.py", "startup.py", "install.py", "runner.py")


def _trees(*files: str) -> list[ast.Module]:
    return [ast.parse((_PACKAGE / file).read_text(encoding="utf-8")) for file in files]


def _text_arguments(function: str) -> set[str]:
    """First arguments that are text, of every call of ``function`` in the adapter."""
    return {
        str(argument.value)
        for tree in _trees(*_ADAPTER)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and dotted(call.func).split(".")[-1] == function
        for argument in call.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def test_server_arguments(source: Source) -> None:
    """What ``engine.config`` reads and ``switch`` writes are fields of ServerArgs."""
    names = _text_arguments("config") | _text_arguments("set_spec")
    assert len(names) > 15
    assert names - _server_arguments(source) == set()


def _server_arguments(source: Source) -> set[str]:
    """Fields of the class, and of the classes that later releases assemble it from."""
    names = source.attributes(f"{_SRT}.server_args", "ServerArgs")
    for path in (source.root / "sglang/srt/arg_groups/fields").glob("*.py"):
        for node in source.tree(f"{_SRT}.arg_groups.fields.{path.stem}").body:
            if isinstance(node, ast.ClassDef):
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return names


def test_modules(source: Source) -> None:
    """Modules that the adapter imports by name."""
    names = {name for name in _text_arguments("_module") if name.startswith("sglang.")}
    names |= {
        node.value
        for tree in _trees(*_ADAPTER)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("sglang.srt.")
    }
    assert len(names) > 8
    for name in names:
        source.tree(name)


def test_switch_sets_all_that_stock_sets(source: Source) -> None:
    """SGLang's own switch, assignment by assignment."""
    stock = stores(source.function(_WORKER, "EAGLEWorkerV2.apply_runtime_state"))
    same_object = {"self": "worker", "dw": "draft", "self._target_worker.model_runner": "target"}
    renamed = set()
    for chain in stock:
        owner, name = chain.rsplit(".", 1)
        owner = owner.replace("dw.draft_runner", "draft_runner")
        renamed.add((same_object.get(owner, owner), name))
    assert renamed, stock
    switch = next(
        node
        for tree in _trees("compat/engine.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "apply"
    )
    ours = {tuple(chain.rsplit(".", 1)) for chain in stores(switch)}
    ours = {("target" if owner == "model_runner" else owner, name) for owner, name in ours}
    assert renamed - ours == set()
    written = {k.arg for k in _context_override(source)} - {None}
    assert written == _text_arguments("set_spec")


def _context_override(source: Source) -> list[ast.keyword]:
    apply = source.function(_WORKER, "EAGLEWorkerV2.apply_runtime_state")
    for call in ast.walk(apply):
        if isinstance(call, ast.Call) and dotted(call.func).endswith(".override"):
            return call.keywords
    return []


_PYTHON = {
    name
    for owner in (
        str, list, dict, set, Exception, gc, importlib, time, logging, logging.Logger, argparse,
        argparse.ArgumentParser, contextlib.ExitStack, collections, dataclasses, object, type,
        functools, classmethod,
    )
    for name in dir(owner)
}  # fmt: skip
_OTHERS = {
    "__dict__", "environ", "argv", "modules", "parent_process",
    "register_post_import_hook",
    "cuda", "Stream", "distributed", "all_gather_object", "all", "numel",
}  # fmt: skip


def test_the_tables_are_complete() -> None:
    """An attribute that the adapter starts to use must get an entry above."""
    listed = {name for names in ATTRIBUTES.values() for name in names} | set(PARALLEL)
    known = listed | {place.split(":")[1].split(".")[0] for place in GLOBALS}
    known |= {
        part
        for release in RELEASES
        for need in requirements_of(release)
        for part in need.qualname.split(".")
    }
    used = {
        node.attr
        for tree in _trees(*_ADAPTER)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    by_name = _text_arguments("getattr") | _text_arguments("_attribute")
    by_name |= {
        item.value
        for tree in _trees("compat/engine.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple)
        for item in node.elts
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    used |= by_name
    assert used - known - _ours() - _PYTHON - _OTHERS == set()
    assert listed - used == set()


def _ours() -> set[str]:
    """Every name that this package defines."""
    names: set[str] = set()
    for tree in _trees(*(str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py"))):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and dotted(node.value) == "self"
                and (isinstance(node.ctx, ast.Store) or node.attr.startswith("_"))
            ):
                names.add(node.attr)
    return names
