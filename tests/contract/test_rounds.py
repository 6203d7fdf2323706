"""The seat of the adaptive controller: what stock calls, where, and in which order."""

from __future__ import annotations

import ast

import pytest

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.controller import DraftStepsController
from tests.contract.source import Source, calls, dotted

pytestmark = pytest.mark.contract

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_CLASS = "EAGLEWorkerV2"


def test_the_decode_branch_asks_for_the_steps_before_it_drafts(
    source: Source, release: Release
) -> None:
    forward = source.function(_WORKER, f"{_CLASS}.forward_batch_generation")
    branch = next(
        node for node in ast.walk(forward) if isinstance(node, ast.If) and node.orelse
    ).orelse
    decode = ast.Module(branch, [])
    (activate,) = calls(decode, "activate_step_by_batch")
    assert isinstance(branch[0], ast.Expr)
    assert branch[0].value is activate
    drafts = [c for c in calls(decode, "draft") if dotted(c.func) == "self.draft_worker.draft"]
    trivial = calls(decode, "_build_trivial_verify_input")
    verify = [call for call in calls(decode, "verify") if dotted(call.func) == "self.verify"]
    assert bool(trivial) == release.zero_steps
    assert drafts
    assert verify
    proposals = [call.lineno for call in (drafts[0], *trivial)]  # later ones draft for PP stages
    assert activate.lineno < min(proposals)
    assert max(proposals) < verify[0].lineno


def test_prefill_does_not_ask(source: Source) -> None:
    forward = source.function(_WORKER, f"{_CLASS}.forward_batch_generation")
    branch = next(node for node in ast.walk(forward) if isinstance(node, ast.If) and node.orelse)
    assert not calls(ast.Module(branch.body, []), "activate_step_by_batch")
    assert {"is_extend", "is_extend_in_batch"} <= {
        n.attr for n in ast.walk(branch.test) if isinstance(n, ast.Attribute)
    }


def test_steps_change_only_there(source: Source) -> None:
    """One call in the whole worker, and ``on_verify_complete_cpu`` is not it."""
    tree = source.tree(_WORKER)
    asked = [c for c in calls(tree, "activate_step_by_batch") if dotted(c.func).startswith("self.")]
    through = [c for c in asked if dotted(c.func) == "self.activate_step_by_batch"]
    assert len(through) == 1


def calls_on_the_controller(release: Release) -> dict[str, tuple[str, ...]]:
    """Method of the worker, and what it calls on its ``adaptive_controller``."""
    built = "init_cuda_graphs" if release.captures_apart else "__init__"
    return {
        built: ("register", "init_states"),
        "activate_step_by_batch": ("activate_step_by_batch",),
        "on_verify_complete_cpu": ("on_verify_complete",),
    }


def test_calls_on_the_controller(source: Source, release: Release) -> None:
    for method, expected in calls_on_the_controller(release).items():
        function = source.function(_WORKER, f"{_CLASS}.{method}")
        found = {
            call.func.attr: call
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and dotted(call.func.value) == "self.adaptive_controller"
        }
        assert tuple(found) == expected
        for name, call in found.items():
            _accepts(name, call)


def _accepts(name: str, call: ast.Call) -> None:
    """Our controller takes the call as stock writes it."""
    code = getattr(DraftStepsController, name).__code__
    names = code.co_varnames[1 : code.co_argcount]
    assert len(call.args) <= len(names)
    given = {*names[: len(call.args)], *(k.arg for k in call.keywords)}
    required = len(names) - len(getattr(DraftStepsController, name).__defaults__ or ())
    assert given <= set(names)
    assert set(names[:required]) <= given


def test_nobody_else_uses_the_controller(source: Source, release: Release) -> None:
    """Every other attribute of a controller that the worker reads would have to be ours too."""
    tree = source.find(_WORKER, _CLASS).node
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and dotted(node.value) == "self.adaptive_controller"
    }
    known = calls_on_the_controller(release).values()
    assert used == {name for names in known for name in names}


def test_controller_is_created_before_the_graphs(source: Source) -> None:
    """``__init__`` sets the attribute that start-up replaces."""
    init = source.function(_WORKER, f"{_CLASS}.__init__")
    assert any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and dotted(node) == "self.adaptive_controller"
        for node in ast.walk(init)
    )


def test_graphs_are_captured_target_first(source: Source, release: Release) -> None:
    """The wrapper around the capture has the target's runner when the draft's come."""
    scheduler = "sglang.srt.managers.scheduler"
    if release.captures_apart:
        start = source.function(scheduler, "Scheduler.init_all_cuda_graphs")
        order = [dotted(call.func) for call in calls(start, "init_cuda_graphs")]
    else:
        start = source.function(scheduler, "Scheduler.init_model_worker")
        order = [
            dotted(node.value.func)
            for node in start.body
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ][:2]
    assert len(order) >= 2
    assert "tp_" in order[0]
    assert "draft_worker" in order[-1]
