"""The graph side of the `intel_amx` attention backends, which stock has for no CPU.

Planned metadata goes into tensors that belong to the bucket: allocated at capture, refreshed in
place before a replay, as the CUDA backends do it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sglang_cpu_engine.tape import StaleGraphError, tensors_of


class BucketMetadata:
    """Static metadata of one backend, by bucket."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], Any] = {}

    def place(self, forward_batch: Any, planned: Any, in_capture: bool) -> Any:
        """Give back the bucket's own tensors, holding the values of `planned`."""
        key = (forward_batch.forward_mode.name, forward_batch.batch_size)
        if in_capture:
            self._of[key] = tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, planned
            )
        elif key not in self._of:
            raise StaleGraphError(f"planned for {key}, which this backend was not captured for")
        static = self._of[key]
        for kept, fresh in zip(tensors_of(static), tensors_of(planned), strict=True):
            assert kept.shape == fresh.shape, f"{key}: metadata {fresh.shape}, not {kept.shape}"
            kept.copy_(fresh)
        return static


def _bucket_view(forward_batch: Any) -> SimpleNamespace:
    """What planning reads, cut to the bucket: the draft-extend runner hands over whole buffers."""
    batch_size = forward_batch.batch_size
    spec_info = forward_batch.spec_info
    extend_seq_lens = getattr(forward_batch, "extend_seq_lens", None)
    if extend_seq_lens is None:
        extend_seq_lens = getattr(spec_info, "extend_seq_lens_tensor", None)
    view = SimpleNamespace(
        batch_size=batch_size,
        forward_mode=forward_batch.forward_mode,
        req_pool_indices=forward_batch.req_pool_indices[:batch_size],
        seq_lens=forward_batch.seq_lens[:batch_size],
        out_cache_loc=forward_batch.out_cache_loc,
        spec_info=spec_info,
        extend_seq_lens=None,
        extend_start_loc=None,
    )
    if extend_seq_lens is not None:
        view.extend_seq_lens = extend_seq_lens[:batch_size]
        view.extend_start_loc = view.extend_seq_lens.cumsum(0) - view.extend_seq_lens
    return view


def _pad_tree_mask(extend_metadata: Any, batch_size: int, width: int) -> Any:
    """The mask of a batch is shorter than its bucket's, the buffer at capture is longer."""
    if extend_metadata is None or extend_metadata[3] is None:
        return extend_metadata
    *lengths, mask = extend_metadata
    padded = mask.new_ones(batch_size * width * width)
    common = min(padded.numel(), mask.numel())
    padded[:common] = mask.flatten()[:common]
    return (*lengths, padded)


def _backend_init_state(self: Any, max_bs: int, max_num_tokens: int) -> None:
    self.bucket_metadata = BucketMetadata()


def _backend_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
    view = _bucket_view(forward_batch)
    self.init_forward_metadata(view)
    if view.forward_mode.is_target_verify():
        width = view.spec_info.draft_token_num
        self.extend_metadata = _pad_tree_mask(self.extend_metadata, view.batch_size, width)
    self.forward_metadata, self.extend_metadata = self.bucket_metadata.place(
        view, (self.forward_metadata, self.extend_metadata), in_capture
    )


def _draft_init_state(self: Any, max_bs: int, max_num_tokens: int) -> None:
    self.bucket_metadata = BucketMetadata()


def _draft_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
    view = _bucket_view(forward_batch)
    self.init_forward_metadata(view)
    planned = [(b.forward_metadata, b.draft_decode_metadata) for b in self.attn_backends]
    placed = self.bucket_metadata.place(view, planned, in_capture)
    for backend, (forward_metadata, draft_decode_metadata) in zip(
        self.attn_backends, placed, strict=True
    ):
        backend.forward_metadata = forward_metadata
        backend.draft_decode_metadata = draft_decode_metadata


def install() -> None:
    """Add the hooks that the graph runners call."""
    from sglang.srt.layers.attention import intel_amx_backend

    backend = intel_amx_backend.IntelAMXAttnBackend
    backend.init_cuda_graph_state = _backend_init_state
    backend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    backend.init_forward_metadata_out_graph = _backend_out_graph
    backend.init_forward_metadata_in_graph = lambda self, forward_batch: None
    draft = intel_amx_backend.IntelAMXMultiStepDraftBackend
    draft.init_cuda_graph_state = _draft_init_state
    draft.init_forward_metadata_out_graph = _draft_out_graph
    draft.init_forward_metadata_in_graph = lambda self, forward_batch: None
    _declare_shared_reads(backend)


def _declare_shared_reads(backend: type) -> None:
    """0.5.20+: say nothing of when shared buffers were read; the scheduler then fences it all."""
    from sglang.srt.layers.attention import base_attn_backend

    if hasattr(base_attn_backend, "SharedReadEnds"):
        unknown = base_attn_backend.SharedReadEnds.UNKNOWN
        backend.shared_read_ends = lambda self, forward_mode: unknown
