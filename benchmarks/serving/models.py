"""Models and prompts: the real pair, and dummy shapes that need no weights."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIMULATED_ACCEPT_LENGTH = 2.0


@dataclass(frozen=True)
class Model:
    """A pair on disk. ``real`` pairs say something about tokens; dummy ones about time only."""

    name: str
    target: Path
    draft: Path
    real: bool
    vocab: int
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def real_pair(name: str, target: Path, draft: Path) -> Model:
    for path in (target, draft):
        if not (path / "config.json").exists():
            raise SystemExit(f"no model in {path}: see examples/ for how to make the pair")
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    return Model(name, target, draft, True, vocab)


def dummy_pair(
    name: str, folder: Path, *, layers: int, hidden: int, heads: int, kv_heads: int, inner: int,
    vocab: int, context: int,
) -> Model:  # fmt: skip
    """A Llama shape and a one-layer EAGLE-3 draft of it; weights are SGLang's random ones.

    Drafts of random weights are never right, so acceptance is simulated; tokens mean nothing then.
    """
    shape = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    configs = {
        "target": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers},
        "draft": {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": vocab,
        },
    }
    for part, config in configs.items():
        path = folder / name / part
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(shape | config))
    return Model(
        name,
        folder / name / "target",
        folder / name / "draft",
        False,
        vocab,
        {"load_format": "dummy", "speculative_draft_load_format": "dummy"},
        {
            "SGLANG_SIMULATE_ACC_LEN": str(SIMULATED_ACCEPT_LENGTH),
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",  # the default since 0.5.11
        },
    )


def write_prompts(model: Model, folder: Path, length: int, count: int, texts: list[str]) -> Path:
    """``count`` distinct prompts of exactly ``length`` tokens; the same ones at every call."""
    path = folder / f"{model.name}-{length}.json"
    if not path.exists():
        prompts = (_written if model.real else _random)(model, length, count, texts)
        assert len({tuple(prompt) for prompt in prompts}) == count, "prompts must differ"
        path.write_text(json.dumps(prompts))
    return path


def _random(model: Model, length: int, count: int, _texts: list[str]) -> list[list[int]]:
    rng = random.Random(length)
    return [[rng.randrange(3, model.vocab) for _ in range(length)] for _ in range(count)]


def _written(model: Model, length: int, count: int, texts: list[str]) -> list[list[int]]:
    """Questions in the chat format, shuffled anew for each prompt and cut to the length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.target / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    head, tail = encode("<|im_start|>user\n"), encode("<|im_end|>\n<|im_start|>assistant\n")
    if len(head) + len(tail) >= length // 2:
        head, tail = [], []
    lines = [encode(text + "\n") for text in texts]
    prompts = []
    for index in range(count):
        rng = random.Random(f"{length}/{index}")
        body: list[int] = []
        body += lines[index % len(lines)]
        while len(body) < length:
            for line in rng.sample(lines, len(lines)):
                body += line
        prompts.append([*head, *body[: length - len(head) - len(tail)], *tail])
    return prompts


def tokens_sha256(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
