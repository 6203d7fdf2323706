"""Faults of SGLang that this package removes, shown on the code of the wheels.

A function of stock is compiled from the source of its release and called, on the smallest object
that has what it reads. ``tests/engine/test_defects.py`` has the faults that real SGLang shows on a
CPU.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.compat.engine import SGLangEngine, StepState
from sglang_verify_graphs.compat.releases import Release
from tests.contract.source import Source, calls, dotted

pytestmark = pytest.mark.contract

_SRT = "sglang.srt"
_WORKER = f"{_SRT}.speculative.eagle_worker_v2"


class Mode(IntEnum):
    """``CaptureHiddenMode``; its order is checked in ``test_gate.py``."""

    NULL = 0
    LAST = 1
    FULL = 2


def compiled(source: Source, module: str, qualname: str, **names: Any) -> Callable[..., Any]:
    """A function of stock, with the names that it finds in its module."""
    function = source.function(module, qualname)
    body = ast.fix_missing_locations(ast.Module([function], []))
    flags = __future__.annotations.compiler_flag
    exec(compile(body, module, "exec", flags=flags), names)
    return names[function.name]


class Runner(SimpleNamespace):
    """A decode runner that captured the given batches at width 4; its own gate is stock's."""

    def __init__(self, source: Source, release: Release, batches: list[int], padding: bool) -> None:
        self.capture_hidden_mode = Mode.FULL
        self.captured_again = 0
        key: Callable[..., Any] = lambda size, stream=None, variant=None: size  # noqa: E731
        if release.runner_package:
            keys: dict[str, Any] = {"__name__": "dataclasses"}
            tree = source.tree(f"{_SRT}.model_executor.runner.shape_key")
            exec(compile(tree, "shape_key", "exec"), keys)
            key = keys["ShapeKey"]
        self.graphs = {key(size): "graph" for size in batches}
        super().__init__(
            **{release.width_attribute: 4},
            max_bs=max(batches),
            disable_padding=not padding,
            enable_return_hidden_states=False,
            backend=SimpleNamespace(
                can_run=lambda batch, asked: asked in self.graphs, cleanup=self.graphs.clear
            ),
            model_runner=SimpleNamespace(
                spec_algorithm=SimpleNamespace(is_ngram=lambda: False),
                server_args=SimpleNamespace(enable_return_hidden_states=False),
            ),
            **dict.fromkeys(
                (
                    "require_mlp_tp_gather", "require_mlp_sync", "is_encoder_decoder",
                    "enable_two_batch_overlap", "enable_pdmux", "ragged_verify_mode",
                ),
                False,
            ),
        )  # fmt: skip
        self._make_graph_key = lambda size, *rest, **others: key(size)
        for variant in ("lora", "attention"):
            setattr(self, f"_resolve_{variant}_variant", lambda *asked: None)
        self._sampling_variant = lambda *asked: None

    def capture(self) -> None:
        self.captured_again += 1


def verify_batch(size: int, width: int = 4, mode: Mode = Mode.FULL) -> Any:
    spec = SimpleNamespace(num_tokens_per_req=width, capture_hidden_mode=mode)
    return SimpleNamespace(
        batch_size=size, spec_info=spec, capture_hidden_mode=mode, replace_embeds=None
    )


def stock_gate(source: Source, release: Release) -> Callable[[Runner, Any], bool]:
    name = "can_run_graph" if release.runner_package else "can_run"
    gate = compiled(
        source, release.runner_module, f"{release.runner_class}.{name}", CaptureHiddenMode=Mode
    )
    return lambda runner, batch: bool(gate(runner, batch))


def test_number_looked_up_among_shape_keys(source: Source, release: Release) -> None:
    """0.5.14 and 0.5.15.post1: without padding no graph is ever replayed (case 4)."""
    gate = stock_gate(source, release)
    runner = Runner(source, release, [1, 2, 4], padding=False)
    broken = release.version in ("0.5.14", "0.5.15.post1")
    assert gate(runner, verify_batch(2)) != broken
    state: Any = StepState(3, 4, None, None, None, runner, None, None)
    engine = SimpleNamespace(release=release)
    SGLangEngine.find_by_size(engine, [state])  # type: ignore[arg-type]
    assert gate(runner, verify_batch(2))  # and 3, which stock now accepts, our gate refuses


def test_width_is_not_checked(source: Source, release: Release) -> None:
    """To 0.5.15.post1 a verify of width 2 is replayed in a graph of width 4; case 5 for ours."""
    gate = stock_gate(source, release)
    unchecked = release.version in ("0.5.13.post1", "0.5.14", "0.5.15.post1")
    assert gate(Runner(source, release, [1, 2, 4], padding=True), verify_batch(2, 2)) == unchecked


def test_whole_ladder_is_captured_anew_in_mid_serving(source: Source, release: Release) -> None:
    """To 0.5.16 a batch that passes stock's gate may capture every graph again."""
    if not release.recaptures_hidden_mode:
        assert release.version not in ("0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16")
        return
    runner = Runner(source, release, [1, 2, 4], padding=True)
    batch = verify_batch(2, mode=Mode.NULL)
    assert stock_gate(source, release)(runner, batch)
    name = f"{release.runner_class}.recapture_if_needed"
    compiled(source, release.runner_module, name, CaptureHiddenMode=Mode)(runner, batch)
    assert runner.captured_again == 1


def test_batches_of_a_step_count_are_pruned_where_nobody_looks(
    source: Source, release: Release
) -> None:
    """From 0.5.14: written to one argument, read from another. Ours: tests/engine."""
    override = source.function(_WORKER, "EAGLEWorkerV2._override_worker_state")
    written = {
        keyword.arg or ast.unparse(keyword.value)
        for call in calls(override, "override")
        for keyword in call.keywords
    } | {dotted(n) for n in ast.walk(override) if isinstance(n, ast.Attribute)}
    pruned = any("cuda_graph_bs_decode" in name for name in written)
    assert pruned == release.runner_package
    assert not any("cuda_graph_config" in name for name in written)
    field = "sa.cuda_graph_bs"
    assert (field in written) != release.runner_package


def test_draft_extend_of_fa3_has_no_graph(source: Source, release: Release) -> None:
    """To 0.5.22 the backend that Hopper uses by default is not on stock's list (case 8).

    Not removed: reported as BACKEND_NOT_GRAPHED, in each round that it costs.
    """
    draft = source.find(_WORKER, "EagleDraftWorker").node
    listed = "FlashAttentionBackend" in ast.unparse(draft)
    assert listed == release.graphs_fa3_draft_extend == (release.version == "0.5.23")


def test_logits_of_a_wider_step_count_do_not_fit(source: Source, release: Release) -> None:
    """0.5.15.post1 to 0.5.18 (upstream #35275): rows are counted for one width, of all candidates
    after. ``tests/engine`` shows stock fail."""
    runner = f"{_SRT}.model_executor.model_runner"
    try:
        rows = source.function(runner, "ModelRunner.max_decode_logits_rows")
    except LookupError:  # every runner has a buffer of its own
        assert not release.logits_of_configured_width
        return
    names = {dotted(n) for n in ast.walk(rows) if isinstance(n, ast.Attribute)}
    assert release.logits_of_configured_width != any("speculative_adaptive" in n for n in names)
