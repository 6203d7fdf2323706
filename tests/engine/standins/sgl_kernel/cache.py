"""KV slots: who writes where. Every op mutates its output argument, as the real ones do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The topk * num_steps slots after the committed tokens of each request."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.copy_(slots.flatten())


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """Row of the table, its columns, and where they lie when the requests are laid end to end."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, slice(start, end), slice(at, at + end - start)
        at += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Slots [start, end) of each request, one request after the other."""
    for row, span, flat in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[flat] = req_to_token[row, span]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse of `assign_extend_cache_locs_cpu`: enter fresh slots in the table."""
    for row, span, flat in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, span] = out_cache_loc[flat]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows in every layer; all are read before one is written (moves may overlap)."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)
