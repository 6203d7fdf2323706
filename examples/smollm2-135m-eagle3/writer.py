"""Continue thousands of prompts at once with the target.

Training data is the slow part of a short run. This loop writes several times faster than a general
one, because keys and values have their place from the start and query heads that share a key head
are read as one longer query, so nothing is copied or repeated as the texts grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from draft import rotary, rotate
from torch import Tensor, nn
from torch.nn import functional

CHECK_EVERY = 16  # steps between two looks at whether all texts have ended


def rounded(length: int) -> int:
    """Attention kernels want masks whose rows are aligned."""
    return -(-length // 16) * 16


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


class Writer:
    """One batch of texts, aligned at the right end of their prompts."""

    def __init__(self, target: nn.Module, prompts: Sequence[Sequence[int]], room: int) -> None:
        config, device = target.config, target.device
        self.target = target
        self.end = config.eos_token_id
        self.key_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        self.width = max(map(len, prompts))
        padding = [self.width - len(prompt) for prompt in prompts]
        self.ids = torch.tensor(
            [[self.end] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)],
            device=device,
        )
        self.padding = torch.tensor(padding, device=device)[:, None]
        self.columns = torch.arange(rounded(self.width + room), device=device)
        shape = (len(prompts), self.key_heads, len(self.columns), self.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=target.dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=target.dtype, device=device) for _ in layers]

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        """Logits after the last of `tokens`, whose first one stands in column `start`."""
        batch, length = tokens.shape
        columns = self.columns[start : start + length]
        span = self.columns[: rounded(start + length)]
        # Padding sees itself, so that no row of the softmax is empty.
        mask = (span <= columns[:, None]) & (span >= self.padding[:, :, None])
        mask = (mask | (span == columns[:, None]))[:, None]
        positions = (columns - self.padding).clamp(min=0)[:, None]
        cos, sin = rotary(positions, self.head_dim, self.theta)
        x = self.target.model.embed_tokens(tokens)

        def heads(projection: nn.Module, inputs: Tensor) -> Tensor:
            return projection(inputs).view(batch, length, -1, self.head_dim).transpose(1, 2)

        for layer, keys, values in zip(
            self.target.model.layers, self.keys, self.values, strict=True
        ):
            attention, y = layer.self_attn, normed(x, layer.input_layernorm)
            query = rotate(heads(attention.q_proj, y), cos, sin)
            keys[:, :, start : start + length] = rotate(heads(attention.k_proj, y), cos, sin)
            values[:, :, start : start + length] = heads(attention.v_proj, y)
            groups = query.shape[1] // self.key_heads
            mixed = functional.scaled_dot_product_attention(
                query.reshape(batch, self.key_heads, groups * length, self.head_dim),
                keys[:, :, : len(span)],
                values[:, :, : len(span)],
                attn_mask=mask.repeat(1, 1, groups, 1),
            ).reshape(query.shape)
            x = x + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
            x = x + layer.mlp(normed(x, layer.post_attention_layernorm))
        return self.target.lm_head(normed(x[:, -1], self.target.model.norm))

    def write(self, count: int, temperature: float | None) -> Tensor:
        """The next `count` tokens of every text; what follows an end token has no meaning."""
        written: list[Tensor] = []
        ended = torch.zeros(len(self.ids), dtype=torch.bool, device=self.ids.device)
        logits = self.forward(self.ids, 0)
        while True:
            token = pick(logits, temperature)
            written.append(token)
            ended |= token == self.end
            step = len(written)
            if step == count or (step % CHECK_EVERY == 0 and bool(ended.all())):
                return torch.stack(written, dim=1)
            logits = self.forward(token[:, None], self.width + step - 1)


def pick(logits: Tensor, temperature: float | None) -> Tensor:
    if temperature is None:
        return logits.argmax(-1)
    chances = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(chances, 1)[:, 0]


@torch.inference_mode()
def answer(
    target: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float | None = None,
) -> list[list[int]]:
    """Answers, each up to and with its end token; greedy unless a temperature is given."""
    writer = Writer(target, prompts, max_new_tokens)
    answers = []
    for tokens in writer.write(max_new_tokens, temperature).tolist():
        length = tokens.index(writer.end) + 1 if writer.end in tokens else len(tokens)
        answers.append(tokens[:length])
    return answers
