"""What a server's command line says, read without SGLang: it may be planned on another machine.

Names are SGLang's of all releases together; arguments that decide nothing here are passed over.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, NoReturn

from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.support import ServerFacts

RUNNING_REQUESTS = 48
"""``max_running_requests`` of a server that speculates and was given none."""
_LADDERS = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512))
"""GiB that a GPU has less than, and the largest batch captured there below and from TP 4 on."""
_LADDERS_LATER = (_LADDERS[0], (35, 48, 160), *_LADDERS[2:])
_NUMBERS = (
    "--tp-size --tensor-parallel-size", "--pp-size --pipeline-parallel-size", "--attn-dp-size",
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    "--max-running-requests", "--cuda-graph-max-bs-decode --cuda-graph-max-bs",
    "--moe-dense-tp-size",
)  # fmt: skip
_TEXTS = (
    "--speculative-algorithm", "--disaggregation-mode", "--attention-backend", "--moe-a2a-backend",
    "--cuda-graph-backend-decode", "--cuda-graph-config", "--rl-on-policy-target", "--config",
)  # fmt: skip
_SWITCHES = (
    "--enable-dp-attention", "--enable-dp-lm-head", "--enable-two-batch-overlap", "--enable-pdmux",
    "--enable-multi-layer-eagle", "--enable-lora", "--enable-hisparse", "--speculative-adaptive",
    "--enable-return-hidden-states", "--enable-deterministic-inference", "--disable-cuda-graph",
    "--disable-decode-cuda-graph", "--disable-cuda-graph-padding", "--disable-attn-tp-gather",
)  # fmt: skip


class Unknown(LookupError):
    """Only SGLang can tell, when it starts; the text says why, and what would settle it."""


class ServerParser(argparse.ArgumentParser):
    """Takes abbreviations, as SGLang's parser does (``--tp 2``), and raises instead of exiting."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        for names in _NUMBERS:
            self.add_argument(*names.split(), type=_whole)
        for name in _TEXTS:
            self.add_argument(name)
        for name in _SWITCHES:
            self.add_argument(name, action="store_true")
        self.add_argument("--cuda-graph-bs-decode", "--cuda-graph-bs", nargs="+", type=_whole)
        self.add_argument("--lora-paths", nargs="*")

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; give what sglang.launch_server takes")


def facts_of(args: argparse.Namespace, release: Release) -> ServerFacts:
    """What the arguments decide; the model may still decide otherwise when SGLang starts."""
    if args.config:
        raise SettingsError("--config is not read here; give its arguments on the command line")
    algorithm = "EAGLE" if args.speculative_algorithm == "NEXTN" else args.speculative_algorithm
    steps, topk = args.speculative_num_steps or 0, args.speculative_eagle_topk or 1
    tokens = steps + 1 if topk == 1 else args.speculative_num_draft_tokens or 0
    chosen = args.speculative_num_steps and args.speculative_eagle_topk and tokens
    if algorithm in ("EAGLE", "EAGLE3") and not chosen and not args.speculative_adaptive:
        raise SettingsError(
            "draft steps are configured by SGLang at start, from the model; give "
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens"
        )
    scattered = args.moe_a2a_backend not in (None, "none") or args.moe_dense_tp_size is not None
    gathered = scattered and not args.disable_attn_tp_gather
    return ServerFacts(
        algorithm=algorithm,
        topk=topk,
        draft_steps=steps,
        draft_tokens=tokens,
        max_running_requests=args.max_running_requests or RUNNING_REQUESTS,
        tp_size=args.tp_size or 1,
        pp_size=args.pp_size or 1,
        attention_dp=args.enable_dp_attention
        or args.enable_dp_lm_head
        or (args.attn_dp_size or 1) > 1,
        disaggregation=args.disaggregation_mode or "null",
        two_batch_overlap=args.enable_two_batch_overlap,
        pdmux=args.enable_pdmux,
        multi_layer=args.enable_multi_layer_eagle,
        lora=bool(args.enable_lora or args.lora_paths),
        hisparse=args.enable_hisparse,
        deterministic=args.enable_deterministic_inference or args.rl_on_policy_target is not None,
        adaptive=args.speculative_adaptive,
        plan_stream=_is_on("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
        skip_zero_extend=release.zero_steps and _is_on("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"),
        return_hidden_states=args.enable_return_hidden_states,
        decode_graphs=_decode_graphs(args),
        zero_steps=release.zero_steps,
        one_width=release.one_width,
        padding=not args.disable_cuda_graph_padding,
        alignment=(args.tp_size or 1) if gathered else 1,
    )


def stock_ladder(
    args: argparse.Namespace, facts: ServerFacts, release: Release, gpu_gb: float | None
) -> tuple[int, ...]:
    """Batches that SGLang itself captures."""
    if not facts.decode_graphs:
        return ()
    if facts.attention_dp or facts.alignment > 1:
        raise Unknown("configured by SGLang at start: attention DP or a scattered MoE input")
    config, limit = _decode_config(args), facts.max_running_requests
    sizes = config.get("bs") or args.cuda_graph_bs_decode
    if not sizes:
        top = config.get("max_bs") or args.cuda_graph_max_bs_decode
        if top is None:
            if gpu_gb is None:
                flag = "--cuda-graph-max-bs" + "-decode" * release.runner_package
                raise Unknown(f"configured by SGLang at start; give --gpu-memory-gb or {flag}")
            top = _largest(release, gpu_gb, facts.tp_size)
        sizes = _sizes(release, top, facts.padding)
    if max(sizes) > limit:
        sizes = [*sizes, limit]
    return tuple(sorted({size for size in sizes if size <= limit}))


def _largest(release: Release, gpu_gb: float, tp_size: int) -> int:
    for limit, *largest in _LADDERS if release.short_ladder else _LADDERS_LATER:
        if gpu_gb < limit:
            return largest[tp_size >= 4]
    return 512


def _sizes(release: Release, top: int, padding: bool) -> list[int]:
    """``generate_decode_cuda_graph_batch_sizes`` with speculation."""
    if not padding:
        return list(range(1, top + 1))
    dense = (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8))
    sizes = [size for size in (*dense, *range(272, top + 1, 16)) if size <= top]
    return sizes if release.truncates_ladder else [*sizes, top]


def _decode_graphs(args: argparse.Namespace) -> bool:
    off = args.disable_cuda_graph or args.disable_decode_cuda_graph
    backend = _decode_config(args).get("backend") or args.cuda_graph_backend_decode
    if args.attention_backend in ("torch_native", "flex_attention"):
        return False
    return bool(backend != "disabled" if backend else not off)


def _decode_config(args: argparse.Namespace) -> dict[str, Any]:
    """What ``--cuda-graph-config`` says of decode; it goes over the other flags."""
    text = args.cuda_graph_config or "{}"
    try:
        found = json.loads(text).get("decode", {})
        for size in (*(found.get("bs") or ()), found.get("max_bs") or 1):
            _whole(str(size))
    except (ValueError, AttributeError, TypeError, argparse.ArgumentTypeError):
        raise SettingsError(
            f"--cuda-graph-config {text!r}: it must be JSON such as "
            '{"decode": {"backend": "full", "max_bs": 64}}'
        ) from None
    return dict(found)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1", "yes", "y")
