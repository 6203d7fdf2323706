"""Stand-in for SGLang's CPU build of sgl-kernel, which is not on PyPI.

Pure PyTorch, written from the call sites of SGLang 0.5.17 - 0.5.23. It serves tests only: it has
the ops that a Llama with an EAGLE-3 draft reaches on a CPU, and refuses every other name when it
is called, so that a test never runs on an op that nobody wrote.
"""

from __future__ import annotations

from sgl_kernel.attention import install as _install_attention_ops
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel.missing import MissingOp
from sgl_kernel.tree import (
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

_install_attention_ops()


def __getattr__(name: str) -> MissingOp:
    # A submodule must stay an ImportError: SGLang falls back properly only on that.
    if name.startswith("__") or name == "scalar_type":
        raise AttributeError(name)
    return MissingOp(name)
