"""Tiny target + EAGLE-3 draft pairs, seeded, built in place.

The target says `next = f(previous token)` plus attention noise of size `eps` over the whole
context. The draft knows f, not the noise: `eps` sets the acceptance. It learns one half of the
previous token from the KV cache of its own previous position and the other half from the hidden
state that it is handed, so stale draft KV or a mixed-up hidden state costs acceptance, as in life.

A token x is the code (u, w) of two orthogonal sign vectors. Channels of the residual stream:
CURRENT the token's code, PREVIOUS the code that the head reads, CARRIED w handed from draft step to
draft step, CONSTANT the same for every token: heads attend by distance, through RoPE, on it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, HEADS, MLP = 512, 256, 4, 16
HEAD = HIDDEN // HEADS
LAYERS = 8  # EAGLE-3 reads the layers 2, L/2 and L-3, which must differ
SPECIAL = 2  # the tokens 0 and 1 begin and end a text
ROPE_THETA = 10000.0
DEFAULT_EPS = 0.9

CURRENT, PREVIOUS = slice(0, 64), slice(64, 128)
CARRIED = slice(128, 160)
CONSTANT = 160
CONSTANT_VALUE = 8.0

_EMBEDDING_RMS = math.sqrt((64 + CONSTANT_VALUE**2) / HIDDEN)
_GUESS = 0.3
"""Size of the draft's guess beside what it carries: small, so that the norm hardly moves."""
_DRAFT_RMS = math.sqrt((32 + 64 * _GUESS**2) / HIDDEN)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 4,
    "once upon a time there was a little girl who liked to test graphs ",
] * 50


class Pair(NamedTuple):
    target: Path
    draft: Path


def build_pair(folder: Path, *, eps: float = DEFAULT_EPS, seed: int = 0) -> Pair:
    """Write a pair below `folder`; the same arguments give the same bytes."""
    pair = Pair(folder / "target", folder / "draft")
    for path in pair:
        path.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(pair.target)
    generator = torch.Generator().manual_seed(seed)
    codes = _codes()
    head = torch.zeros(VOCAB, HIDDEN)  # nothing is followed by a special token: no text ends
    followers = torch.randperm(VOCAB - SPECIAL, generator=generator) + SPECIAL
    head[followers, PREVIOUS] = codes[SPECIAL:]
    _write_model(
        pair.target,
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS},
        _target_weights(codes, head, eps, generator),
    )
    _write_model(
        pair.draft,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": VOCAB,
            "target_hidden_size": HIDDEN,
        },
        _draft_weights(head),
    )
    return pair


def _codes() -> torch.Tensor:
    """Token x is row x // 32 of a Hadamard matrix, then row x % 32."""
    signs = torch.ones(1, 1)
    while len(signs) < 32:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    token = torch.arange(VOCAB)
    return torch.cat([signs[token // 32], signs[token % 32]], 1)


def _attend_at_distance(distance: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of one head whose score is highest at exactly that distance."""
    frequencies = ROPE_THETA ** (-torch.arange(HEAD // 2) * 2 / HEAD)
    angles = distance * frequencies
    q, k = torch.zeros(HEAD, inputs), torch.zeros(HEAD, inputs)
    sharpness = 12 * _EMBEDDING_RMS / CONSTANT_VALUE
    q[: HEAD // 2, CONSTANT] = sharpness
    k[:, CONSTANT] = sharpness * torch.cat([angles.cos(), angles.sin()])
    return q, k


def _target_weights(
    codes: torch.Tensor, head: torch.Tensor, eps: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, CURRENT] = codes
    embedding[:, CONSTANT] = CONSTANT_VALUE
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head.clone(),
    }
    q, k, v, o = (torch.zeros(HIDDEN, HIDDEN) for _ in range(4))
    q[:HEAD], k[:HEAD] = _attend_at_distance(1, HIDDEN)
    v[:HEAD, CURRENT] = torch.eye(HEAD)
    o[PREVIOUS, :HEAD] = torch.eye(HEAD) * _EMBEDDING_RMS
    weights |= _layer("model.layers.0.", q=q, k=k, v=v, o=o)
    for layer in range(1, LAYERS):
        q, k, v, o = (torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.06 for _ in range(4))
        o *= eps
        o[CONSTANT] = 0
        weights |= _layer(f"model.layers.{layer}.", q=q, k=k, v=v, o=o)
    return weights


def _draft_weights(head: torch.Tensor) -> dict[str, torch.Tensor]:
    """Head 0 looks one position back, the heads 1 and 2 at themselves.

    u of the guess comes from the previous position's token, w from what was carried here; the last
    guess is taken back and w of this token is carried on.
    """
    u, w = slice(0, 32), slice(32, 64)
    previous_u, previous_w = slice(64, 96), slice(96, 128)
    handed = HIDDEN  # the inputs are [norm(embedding), norm(hidden state)]
    q, k, v = (torch.zeros(HIDDEN, 2 * HIDDEN) for _ in range(3))
    o = torch.zeros(HIDDEN, HIDDEN)
    for index, distance in enumerate((1, 0, 0)):
        rows = slice(index * HEAD, (index + 1) * HEAD)
        q[rows], k[rows] = _attend_at_distance(distance, 2 * HIDDEN)
    half, whole = torch.eye(32), torch.eye(64)
    v[0:32, u] = half
    o[previous_u, 0:32] = half * _EMBEDDING_RMS * _GUESS
    v[64:128, handed + PREVIOUS.start : handed + PREVIOUS.stop] = whole
    o[PREVIOUS, 64:128] = -whole * _DRAFT_RMS
    carried = slice(handed + CARRIED.start, handed + CARRIED.stop)
    v[128:160, carried] = half
    o[previous_w, 128:160] = half * _DRAFT_RMS * _GUESS
    v[160:192, w] = half * _EMBEDDING_RMS
    v[160:192, carried] = -half * _DRAFT_RMS
    o[CARRIED, 160:192] = half
    hand_over = torch.zeros(HIDDEN, 3 * HIDDEN)
    for layer in range(3):
        hand_over[CARRIED, layer * HIDDEN + w.start : layer * HIDDEN + w.stop] = half / 3
    return {
        "fc.weight": hand_over,
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head.clone(),
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
    } | _layer("midlayer.", q=q, k=k, v=v, o=o)


def _layer(
    prefix: str, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> dict[str, torch.Tensor]:
    attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o}
    return {
        **{f"{prefix}self_attn.{name}.weight": weight for name, weight in attention.items()},
        f"{prefix}mlp.gate_proj.weight": torch.zeros(MLP, HIDDEN),
        f"{prefix}mlp.up_proj.weight": torch.zeros(MLP, HIDDEN),
        f"{prefix}mlp.down_proj.weight": torch.zeros(HIDDEN, MLP),
        f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _write_model(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    shared = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
    }
    (path / "config.json").write_text(json.dumps(shared | config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 2048,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
