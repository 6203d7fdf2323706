"""Scenarios on the old releases; each runs in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.driver import EngineConfig
from tests.engine.legacy.driver import Engine
from tests.engine.scenarios import random_prompts


def start(
    config: dict[str, Any], settings: dict[str, Any] | None, *, graphs: bool = True
) -> Engine:
    """An engine with the plugin (`settings`) or without (None)."""
    import sglang_verify_graphs

    if settings is not None:
        sglang_verify_graphs.enable(**settings)
    return Engine(EngineConfig(**config), graphs=graphs)


def serve(
    config: dict[str, Any],
    settings: dict[str, Any] | None,
    with_graphs: bool = True,
    requests: int = 6,
    max_new_tokens: int = 12,
) -> dict[str, Any]:
    """Serve random prompts: tokens, acceptance, what was captured and replayed, the report."""
    import sglang

    from tests.engine.legacy.standins import CAPTURES, REPLAYS

    engine = start(config, settings, graphs=with_graphs)
    captured = dict(CAPTURES)
    served = engine.serve(random_prompts(requests, longest=8), max_new_tokens)
    return served | {
        "captured": captured,
        "captured_while_serving": sum(CAPTURES.values()) - sum(captured.values()),
        "verify": {batch: n for (name, batch), n in REPLAYS.items() if name == "CudaGraphRunner"},
        "status": report(engine) if settings is not None else None,
        "ladder": engine.scheduler.server_args.cuda_graph_bs,
        "leaked": engine.leaked_tokens(),
        "sglang": sglang.__file__,
    }


def report(engine: Engine) -> dict[str, Any]:
    """What ``/server_info`` would show."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    answer = engine.scheduler.get_internal_state(GetInternalStateReq())
    return answer.internal_state["verify_graphs"]


def odd_batches(config: dict[str, Any], settings: dict[str, Any] | None) -> dict[str, Any]:
    """A verify batch of another width, and one without hidden states, offered to the gate."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    from tests.engine.legacy.standins import CAPTURES

    engine = start(config, settings)
    gate = engine.target_runner.graph_runner
    seen: list[Any] = []
    model_forward = engine.target_runner.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            seen.append(batch)
        return model_forward(batch, *args, **kwargs)

    engine.target_runner.forward = forward
    engine.serve(random_prompts(2, longest=8), 8)
    width, answers = _copy(seen[-1]), {}
    width.spec_info = _copy(width.spec_info)
    width.spec_info.draft_token_num = 2
    answers["width"] = bool(gate.can_run(width))
    hidden = _copy(seen[-1])
    hidden.spec_info = _copy(hidden.spec_info)
    hidden.capture_hidden_mode = hidden.spec_info.capture_hidden_mode = CaptureHiddenMode.NULL
    answers["hidden"] = bool(gate.can_run(hidden))
    before = sum(CAPTURES.values())
    if answers["hidden"]:
        gate.replay_prepare(hidden)
    answers["recaptured"] = sum(CAPTURES.values()) - before
    return answers | {"status": report(engine) if settings is not None else None}


def _copy(thing: Any) -> Any:
    """As SGLang would have made it: nothing of ours is on it yet."""
    new = object.__new__(type(thing))
    new.__dict__.update({k: v for k, v in vars(thing).items() if not k.startswith("_verify")})
    return new


def prefill_graph(config: dict[str, Any], settings: dict[str, Any]) -> list[bool]:
    """Whether a prefill graph that takes any extend takes a verify, and an extend."""
    from types import SimpleNamespace

    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def init_piecewise_cuda_graphs(self: Any) -> None:
        self.piecewise_cuda_graph_runner = SimpleNamespace(can_run=lambda batch: True)

    model_runner.ModelRunner.init_piecewise_cuda_graphs = init_piecewise_cuda_graphs
    engine = start(config, settings)
    prefill = engine.target_runner.piecewise_cuda_graph_runner
    return [
        prefill.can_run(SimpleNamespace(forward_mode=mode))
        for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND)
    ]


def layers(
    config: dict[str, Any], settings: dict[str, Any] | None, draft: str, ids: list[int]
) -> dict[str, Any]:
    """Layers that were asked for while graphs were captured, and that eager forwards read after.

    ``draft`` is a folder to write: the draft of the pair, with ``ids`` in its configuration.
    """
    from sglang.srt.models.llama import LlamaForCausalLM

    from tests.engine.legacy import standins

    source, target = Path(config["draft"]), Path(draft)
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    settings_file = target / "config.json"
    asked = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    changed = json.loads(settings_file.read_text()) | {"eagle_config": asked}
    settings_file.write_text(json.dumps(changed))
    captured: set[tuple[int, ...]] = set()
    models: list[Any] = []
    stock = LlamaForCausalLM.set_eagle3_layers_to_capture

    def watched(self: Any, layer_ids: Any = None) -> None:
        models.append(self)
        stock(self, layer_ids)

    LlamaForCausalLM.set_eagle3_layers_to_capture = watched
    capture = standins.Graph.capture

    def capture_watched(self: Any, call: Any) -> Any:
        if type(self._runner).__name__ == "CudaGraphRunner":
            captured.add(tuple(models[-1].model.layers_to_capture))
        return capture(self, call)

    standins.Graph.capture = capture_watched
    start(config | {"draft": draft}, settings)
    return {
        "captured": sorted(map(list, captured)),
        "after": models[-1].model.layers_to_capture,
    }
