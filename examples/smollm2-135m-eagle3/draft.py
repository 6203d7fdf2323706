"""The one-layer EAGLE-3 draft as SGLang's `LlamaForCausalLMEagle3` runs it, for whole sequences.

Serving drafts one chain at a time. Here chains start at *every* position at once: chain step `j`
of position `t` sees the true features up to `t` and, of the chain itself, only its own earlier
steps. The same forward therefore trains the draft (training-time test) and measures its accept
length exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DraftConfig:
    """Shapes of the draft; all but the vocabulary are the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int

    @classmethod
    def of_target(cls, target: Mapping[str, Any], draft_vocab_size: int) -> DraftConfig:
        taken = {name: target[name] for name in cls.__dataclass_fields__ if name in target}
        return cls(**taken, draft_vocab_size=draft_vocab_size)

    def as_checkpoint(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **self.__dict__,
        }


def captured_layers(num_hidden_layers: int) -> tuple[int, int, int]:
    """Layers whose *input* SGLang hands to an EAGLE-3 draft of a Llama target by default."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class MidLayer(nn.Module):
    """A Llama layer whose attention reads the token embedding beside the hidden state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.config = config
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, query_size, bias=False),
                "k_proj": nn.Linear(2 * hidden, key_size, bias=False),
                "v_proj": nn.Linear(2 * hidden, key_size, bias=False),
                "o_proj": nn.Linear(query_size, hidden, bias=False),
            }
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(
        self, embeds: Tensor, hidden: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the hidden state before the last norm; append this step's keys and values."""
        inputs = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn["o_proj"](self.attend(inputs, step, cache))
        x = self.post_attention_layernorm(hidden)
        gated = functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return hidden + self.mlp["down_proj"](gated)

    def attend(self, inputs: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        batch, length, _ = inputs.shape
        config, device = self.config, inputs.device
        positions = torch.arange(length, device=device) + step
        cos, sin = rotary(positions, config.head_dim, config.rope_theta)

        def heads(name: str) -> Tensor:
            projected = self.self_attn[name](inputs)
            return projected.view(batch, length, -1, config.head_dim).transpose(1, 2)

        groups = config.num_attention_heads // config.num_key_value_heads
        query = rotate(heads("q_proj"), cos, sin)
        key = rotate(heads("k_proj"), cos, sin).repeat_interleave(groups, dim=1)
        value = heads("v_proj").repeat_interleave(groups, dim=1)
        cache.append((key, value))
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=device)
        mask = torch.cat((causal, *[itself] * step), dim=1) if step else None
        mixed = functional.scaled_dot_product_attention(
            query,
            torch.cat([k for k, _ in cache], dim=2),
            torch.cat([v for _, v in cache], dim=2),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class Draft(nn.Module):
    """Parameter names are those of the checkpoint."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def start_from_target(self, target: nn.Module, draft_to_target: Tensor) -> None:
        """Begin as the target's last layer on the last captured feature: faster than at random."""
        hidden = self.config.hidden_size
        last = target.model.layers[-1]
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = self.midlayer.self_attn[name].weight
                weight.mul_(0.1)[:, hidden:] = getattr(last.self_attn, name).weight
            self.midlayer.self_attn["o_proj"].weight.copy_(last.self_attn.o_proj.weight)
            for name, linear in self.midlayer.mlp.items():
                linear.weight.copy_(getattr(last.mlp, name).weight)
            self.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
            self.midlayer.post_attention_layernorm.weight.copy_(
                last.post_attention_layernorm.weight
            )
            self.norm.weight.copy_(target.model.norm.weight)
            self.lm_head.weight.copy_(target.model.embed_tokens.weight[draft_to_target])

    def forward(
        self, embeds: Tensor, hidden: Tensor, step: int, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One chain step at every position; `hidden` is the captured triple at step 0."""
        if step == 0:
            hidden = self.fc(hidden)
        return self.midlayer(embeds, hidden, step, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


def shifted(tokens: Tensor, by: int) -> Tensor:
    """Token `t + by` at index `t`; what runs past the end is never scored."""
    return functional.pad(tokens[:, by:], (0, by))


@torch.no_grad()
def chain_matches(
    draft: Draft,
    embed: nn.Module,
    draft_to_target: Tensor,
    tokens: Tensor,
    features: Tensor,
    steps: int,
) -> Tensor:
    """How many drafts of the chain that starts at each position agree with the text.

    The first chain input at position `t` is token `t + 1`, so the first draft stands for `t + 2`.
    """
    hidden, cache = features, []
    inputs = shifted(tokens, 1)
    alive = torch.ones_like(tokens, dtype=torch.bool)
    matches = torch.zeros_like(tokens)
    for step in range(steps):
        hidden = draft(embed(inputs), hidden, step, cache)
        inputs = draft_to_target[draft.logits(hidden).argmax(-1)]
        alive = alive & (inputs == shifted(tokens, step + 2))
        matches += alive
    return matches


def walk_rounds(matches: Sequence[int], prompt_length: int, total_length: int) -> list[int]:
    """Correct drafts of each verify round when the text is decoded with these chains.

    The token after the prompt comes from prefill; round after round then commits the correct
    drafts and one bonus token, until the text is complete.
    """
    rounds: list[int] = []
    last = prompt_length
    while last < total_length - 1:
        correct = min(matches[last - 1], total_length - 1 - last)
        rounds.append(correct)
        last += correct + 1
    return rounds


def export(draft: Draft, draft_to_target: Tensor, out: Path) -> None:
    """Write the checkpoint; `d2t` holds offsets, `t2d` a mask, the embedding is the target's."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in draft.state_dict().items()
    }
    ids = draft_to_target.cpu()
    weights["d2t"] = ids - torch.arange(ids.numel())
    weights["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
    weights["t2d"][ids] = True
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(draft.config.as_checkpoint(), indent=2)
    (out / "config.json").write_text(config + "\n", encoding="utf-8")
