"""Decode and extend attention over a paged KV pool.

Each is registered as ONE operator of the dispatcher, with its mutations declared, for the same
reason that the real kernels are: a graph recorder must see a launch, not the Python inside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_LIBRARY = torch.library.Library("cpu_engine", "DEF")
_LIBRARY.define(
    "decode_attention(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, Tensor(c!) out,"
    " Tensor? k, Tensor? v, Tensor loc, Tensor req_to_token, Tensor rows, Tensor seq_lens,"
    " float scale) -> ()"
)
_LIBRARY.define(
    "extend_attention(Tensor q, Tensor(a!) out, Tensor k_buffer, Tensor v_buffer,"
    " Tensor req_to_token, Tensor rows, Tensor seq_lens, Tensor extend_lens, Tensor? tree_mask,"
    " bool causal, float scale) -> ()"
)


def _attend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [batch, width, heads, dim]; slots [batch, keys]; mask [batch, width, keys]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k_buffer[slots].to(q.dtype).transpose(1, 2),
        v_buffer[slots].to(q.dtype).transpose(1, 2),
        attn_mask=mask[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k_buffer.shape[1],
    )
    return out.transpose(1, 2)


def _key_slots(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Slots of the keys of each request; those past its end point at the padding slot 0."""
    longest = max(int(seq_lens.max()), 1)
    slots = req_to_token[rows.long(), :longest].long()
    return slots.masked_fill_(torch.arange(longest) >= seq_lens[:, None], 0)


def _decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    loc: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> None:
    if k is not None and v is not None:
        loc = loc.long()
        k_buffer[loc] = k.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    slots = _key_slots(req_to_token, rows, seq_lens)
    mask = torch.arange(slots.shape[1]) < seq_lens[:, None]
    out.copy_(_attend(q[:, None], k_buffer, v_buffer, slots, mask[:, None], scale)[:, 0])


def _extend_mask(
    keys: int, seq_lens: torch.Tensor, width: int, tree_mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    key = torch.arange(keys)
    if not causal:
        return (key < seq_lens[:, None])[:, None].expand(-1, width, -1)
    prefix = seq_lens - width
    if tree_mask is None:
        # A padding row is shorter than its width: let it see one key, an empty row gives NaN.
        last = (prefix[:, None] + torch.arange(width)).clamp_(min=0)
        return key <= last[:, :, None]
    mask = (key < prefix[:, None])[:, None].repeat(1, width, 1)
    columns = (prefix[:, None] + torch.arange(width)).clamp_(min=0)
    columns = columns[:, None].expand(-1, width, -1)
    return mask.scatter_(2, columns, tree_mask.view(-1, width, width).bool())


def _extend_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    widths = extend_lens.tolist()
    if len(set(widths)) == 1:
        groups = [(slice(0, len(widths)), widths[0])]
    else:
        assert tree_mask is None, "a token tree has one width for all requests"
        groups = [(slice(i, i + 1), width) for i, width in enumerate(widths)]
    start = 0
    for batch, width in groups:
        stop = start + width * (batch.stop - batch.start)
        lens = seq_lens[batch]
        slots = _key_slots(req_to_token, rows[batch], lens)
        mask = _extend_mask(slots.shape[1], lens, width, tree_mask, causal)
        queries = q[start:stop].view(-1, width, *q.shape[1:])
        result = _attend(queries, k_buffer, v_buffer, slots, mask, scale)
        out[start:stop] = result.reshape(-1, *out.shape[1:])
        start = stop


_LIBRARY.impl("decode_attention", _decode_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("extend_attention", _extend_attention, "CompositeExplicitAutograd")


def _plain_attention_only(logit_cap: float, sinks: object, encoder_lens: object) -> None:
    if logit_cap or sinks is not None or encoder_lens is not None:
        raise NotImplementedError("the stand-in knows no logit cap, sinks or cross attention")


def decode_attention_cpu(
    q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, *rest: Any
) -> None:
    """`torch.ops.sgl_kernel.decode_attention_cpu` as 0.5.17 (no scales) and 0.5.20+ call it."""
    if not isinstance(rest[0], torch.Tensor):
        assert rest[:2] == (1.0, 1.0), "the attention stand-in knows no KV scales"
        rest = rest[2:]
    out, k, v, loc, _logits, req_to_token, rows, seq_lens, scale, logit_cap = rest[:10]
    _cross, window, encoder_lens, sinks = rest[10:]
    assert window <= 0, "the attention stand-in knows no sliding window"
    _plain_attention_only(logit_cap, sinks, encoder_lens)
    torch.ops.cpu_engine.decode_attention(
        q, k_buffer, v_buffer, out, k, v, loc, req_to_token, rows, seq_lens, scale
    )


def extend_attention_cpu(
    q: torch.Tensor,
    _k: torch.Tensor,
    _v: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    *rest: Any,
) -> None:
    """`torch.ops.sgl_kernel.extend_attention_cpu` as 0.5.17 (no scales) and 0.5.20+ call it.

    Keys and values are read back from the pool, where the caller has just written them: a wrong
    `out_cache_loc` then shows in the output, as it does on a GPU.
    """
    if not isinstance(rest[0], torch.Tensor):
        assert rest[:2] == (1.0, 1.0), "the attention stand-in knows no KV scales"
        rest = rest[2:]
    req_to_token, rows, seq_lens, extend_lens, _start, _max_len, scale, logit_cap = rest[:8]
    _cross, window, encoder_lens, sinks, tree_mask = rest[8:13]
    causal = rest[13] if len(rest) > 13 else True
    assert window <= 0, "the attention stand-in knows no sliding window"
    _plain_attention_only(logit_cap, sinks, encoder_lens)
    torch.ops.cpu_engine.extend_attention(
        q,
        out,
        k_buffer,
        v_buffer,
        req_to_token,
        rows,
        seq_lens,
        extend_lens,
        tree_mask,
        causal,
        scale,
    )


def install() -> None:
    """Put the two ops where `IntelAMXAttnBackend` looks for them."""
    torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
    torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
