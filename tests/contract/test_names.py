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
import json
import logging
import socket
import time
from pathlib import Path

import pytest

import sglang_verify_graphs
from sglang_verify_graphs.compat.preflight import check_values, refused
from sglang_verify_graphs.compat.releases import RELEASES, Release
from sglang_verify_graphs.compat.requirements import requirements_of
from sglang_verify_graphs.compat.values import attributes
from tests.contract.source import Missing, Source, calls, dotted, reads, stores

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_SPEC = f"{_SRT}.speculative"
_WORKER = f"{_SPEC}.eagle_worker_v2"


def module_globals(release: Release) -> tuple[str, ...]:
    """Module-level names that the adapter reads or replaces and that are no requirement."""
    return (
        f"{release.runner_module}:graph_capture",
        f"{_SRT}.environ:envs",
        f"{_SRT}.model_executor.forward_batch_info:ForwardMode",
        f"{_SRT}.model_executor.forward_batch_info:CaptureHiddenMode",
        f"{_SRT}.model_executor.model_runner:ModelRunner",
        f"{_WORKER}:EagleDraftWorker",
    )


def test_attributes(source: Source, release: Release) -> None:
    assert refused(check_values(release, source)) == []


def test_globals(source: Source, release: Release) -> None:
    for place in module_globals(release):
        source.find(*place.split(":"))


def parallel_sizes(release: Release) -> tuple[str, ...]:
    """Names of ``get_parallel()``: properties, or generated from declarations."""
    alignment = () if release.alignment_function else ("attn_tp_size", "attn_cp_size")
    return ("attn_dp_size", *alignment)


def test_parallel_context(source: Source, release: Release) -> None:
    if not release.parallel_context:
        with pytest.raises(Missing):
            source.tree(f"{_SRT}.runtime_context")
        return
    names = source.attributes(f"{_SRT}.runtime_context", "ParallelContext")
    with contextlib.suppress(Missing):
        names |= source.attributes(f"{_SRT}.arg_groups.fields.parallel", "Parallel")
    assert set(parallel_sizes(release)) <= names


# -- what the adapter itself says ------------------------------------------------------------------

_PACKAGE = Path(sglang_verify_graphs.__file__).parent
_ADAPTER = (
    "compat/engine.py", "compat/facts.py", "compat/dialect.py", "compat/twophase.py",
    "controller.py", "startup.py", "install.py", "runner.py",
)  # fmt: skip


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


def test_server_arguments(source: Source, release: Release) -> None:
    """What ``config`` reads and ``switch`` writes are fields of ServerArgs."""
    names = _text_arguments("config") | _text_arguments("set_spec")
    assert len(names) > 15
    other = {"cuda_graph_bs"} if release.runner_package else {"cuda_graph_config"}
    names |= {"cuda_graph_bs", "cuda_graph_config"} - other
    assert names - other - _server_arguments(source) == set()


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


def test_modules(source: Source, release: Release) -> None:
    """Modules that the adapter imports by name."""
    names = {
        str(node.value)
        for tree in _trees(*_ADAPTER)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("sglang.srt.")
    }
    assert len(names) > 8
    reached = {
        f"{_SRT}.runtime_context": release.parallel_context,
        f"{_SRT}.arg_groups.arg_utils": release.config_bags,
        f"{_SRT}.configs.hybrid_arch": release.hybrid_arch,
    }
    for name in {*names, release.runner_module, release.allocation_module}:
        if reached.get(name, True):
            source.tree(name)


def test_switch_sets_all_that_stock_sets(source: Source, release: Release) -> None:
    """SGLang's own switch, assignment by assignment; the server arguments are looked at below."""
    apply = source.function(_WORKER, "EAGLEWorkerV2.apply_runtime_state")
    same_object = {
        "self": "worker", "dw": "draft", "dw.draft_runner": "draft_runner",
        "self._target_worker.model_runner": "model_runner",
    }  # fmt: skip
    stock = {
        (same_object.get(owner, owner), name)
        for owner, name in (chain.rsplit(".", 1) for chain in stores(apply))
        if owner != "self.server_args"
    }
    assert len(stock) >= 10
    switch = _our_switch()
    ours = {tuple(chain.rsplit(".", 1)) for chain in stores(switch)}
    ours.add(("model_runner", release.runner_attribute))  # set by that name
    assert stock - ours == set()
    extra = {("draft", "_topk1_parents_prealloc"), ("draft", "_topk1_score_indices_prealloc")}
    if not release.extend_backend_on_runner:
        extra.add(("draft_runner", "attn_backend"))  # left alone by that flag
    assert ours - stock == extra


def _our_switch() -> ast.FunctionDef:
    return next(
        node
        for tree in _trees("compat/engine.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "apply"
    )


def test_switch_writes_the_bags_and_not_the_server_arguments(
    source: Source, release: Release
) -> None:
    apply = source.function(_WORKER, "EAGLEWorkerV2.apply_runtime_state")
    overrides = [c for c in calls(apply, "override") if "get_context" in ast.unparse(c.func)]
    assert bool(overrides) == release.config_bags
    if overrides:
        written = {k.arg for call in overrides for k in call.keywords} - {None}
        assert written == _text_arguments("set_spec")
    assert not any("server_args" in chain for chain in stores(_our_switch()))


def test_kv_is_reserved_for_the_widest(source: Source, release: Release) -> None:
    """A switch may write the bags where the reservation reads something that it does not write."""
    if not release.config_bags:
        assert not release.switch_writes_bags
        return
    module = release.allocation_module
    kept = "server_args" in ast.unparse(source.function(module, "get_alloc_len_per_decode"))
    if not kept:
        bound = source.function(module, "max_speculative_num_draft_tokens")
        kept = "max_speculative_num_draft_tokens" in reads(bound)
    assert kept == release.switch_writes_bags


AT_START = {
    "__init__", "_autotune_buffers", "_build_dsv4_kv_pool", "_build_hybrid_mamba_decode_req_pool",
    "_build_hybrid_req_pool", "_dummy_run", "_handle_max_mamba_cache",
    "_init_multi_layer_eagle_model_runners", "_init_pools", "_init_unified_mamba_pools",
    "_init_unified_swa_pools", "_alloc_graph_buffers", "cutedsl_moe_max_num_tokens",
    "pre_capture_activation_reserve_mb", "_override_worker_state", "create_dummy_verify_input",
    "decode_num_tokens_per_bs", "from_args", "get_spec_info", "handle_max_mamba_cache",
    "init_decode_cuda_graph", "init_model_config", "install_canary", "resolve_num_tokens_per_req",
}  # fmt: skip
RESERVES = {
    "get_alloc_len_per_decode", "get_req_to_token_extra_context_len",
    "new_tokens_required_next_decode", "spec_decode_alloc_len_per_request",
    "compute_num_reserved_tokens", "max_speculative_num_draft_tokens",
}  # fmt: skip
REPORTS = {
    "_active_spec_config_snapshot", "_calculate_spec_decoding_metrics", "report_decode_stats",
}  # fmt: skip
NOT_OURS = {
    "build_eagle_disagg_draft_input",  # PD is refused
    "forward",  # models/deepseek_v2.py, while it is captured with torch.compile
    "prepare_for_decode",  # DFLASH
}
"""Functions that read the step counts from the server arguments, and why a switch may leave them.

What reserves KV must find the widest; what reports divides by it, as SGLang does without a switch.
"""


def test_no_round_reads_a_narrower_width_from_the_server_arguments(
    source: Source, release: Release
) -> None:
    if release.switch_writes_bags:
        return
    readers: set[str] = set()
    package = source.root / "sglang" / "srt"
    for path in package.rglob("*.py"):
        module = path.relative_to(package).as_posix()
        if not module.startswith(("server_args", "arg_groups/", "hardware_backend/")):
            text = path.read_text(encoding="utf-8-sig")
            if "speculative_num_" in text:
                readers |= _readers_of_step_counts(ast.parse(text))
    assert readers - AT_START - RESERVES - REPORTS - NOT_OURS == set()
    assert readers & RESERVES


def _readers_of_step_counts(tree: ast.Module) -> set[str]:
    names = {
        "speculative_num_steps", "speculative_num_draft_tokens", "max_speculative_num_draft_tokens",
    }  # fmt: skip
    found: set[str] = set()

    def walk(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and child.attr in names:
                owner = ast.unparse(child.value)
                named = owner.split(".")[-1] in ("server_args", "sa", "args", "spec")
                given = "server_args(" in owner or "get_spec(" in owner
                if isinstance(child.ctx, ast.Load) and (named or given):
                    found.add(function)
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            walk(child, child.name if inner else function)

    walk(tree, "")
    return found


_PYTHON = {
    name
    for owner in (
        str, list, dict, set, Exception, gc, importlib, time, logging, logging.Logger, argparse,
        argparse.ArgumentParser, contextlib.ExitStack, collections, dataclasses, object, type,
        functools, classmethod, json, socket,
    )
    for name in dir(owner)
}  # fmt: skip
_OTHERS = {
    "__dict__", "environ", "argv", "modules", "parent_process",
    "register_post_import_hook",
    "cuda", "Stream", "distributed", "all_gather_object", "all", "numel",
    "_get_default_store", "set", "broadcast", "tensor", "int64", "tolist", "get_device_name",
}  # fmt: skip


def test_the_tables_are_complete() -> None:
    """An attribute that the adapter starts to use must get an entry above."""
    listed: set[str] = set()
    known: set[str] = set()
    for release in RELEASES:
        listed |= {name for names in attributes(release).values() for name in names}
        known |= set(parallel_sizes(release))
        known |= {place.split(":")[1] for place in module_globals(release)}
        known |= {part for need in requirements_of(release) for part in need.qualname.split(".")}
    known |= listed | {"cuda_graph_bs", "cuda_graph_config", "speculative_adaptive"}  # arguments
    used = {
        node.attr
        for tree in _trees(*_ADAPTER, "compat/legacy.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    by_name = _text_arguments("getattr") | _text_arguments("replaced")
    by_name |= {
        item.value
        for tree in _trees("compat/engine.py", "compat/facts.py", "compat/releases.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple)
        for item in node.elts
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    used |= by_name
    for release in RELEASES:
        used |= {release.dp_vote, release.width_attribute, release.runner_attribute}
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
