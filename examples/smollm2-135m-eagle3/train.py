"""Train the EAGLE-3 draft on text that the target itself writes, within a time budget.

Four stages: the target answers the training prompts; its features are computed once and kept; the
draft learns to continue its own chains (training-time test); its accept length is measured on the
held-out prompts. One GPU is enough, and the features of 20 000 answers take about 30 GB of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from draft import Draft, DraftConfig, captured_layers, chain_matches, export, shifted, walk_rounds
from prompts import Prompt, read_prompts, training_prompts
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).parent
START = time.perf_counter()


@dataclass(frozen=True)
class TrainConfig:
    """Every field is also a flag of the command line."""

    target: Path = field(metadata={"help": "directory written by target.py"})
    out: Path = field(default=HERE / "draft", metadata={"help": "directory of the draft"})
    minutes: float = field(default=5.0, metadata={"help": "budget of the whole run"})
    seed: int = 17
    draft_vocab_size: int = 5120
    chain_steps: int = field(default=4, metadata={"help": "unrolled steps in training"})
    generation_share: float = field(default=0.4, metadata={"help": "share of the budget"})
    generation_batch: int = 3072
    max_prompt_tokens: int = 96
    max_new_tokens: int = 256
    temperature: float = field(default=0.7, metadata={"help": "of every third batch of answers"})
    feature_batch: int = 96
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    step_decay: float = field(default=0.8, metadata={"help": "loss weight ratio of later steps"})
    rejected_weight: float = field(
        default=0.25, metadata={"help": "loss weight where an earlier draft of the chain is wrong"}
    )
    heldout: Path = HERE / "heldout.txt"
    heldout_tokens: int = 128
    heldout_steps: int = 3
    save_seconds: float = 60.0


@dataclass(frozen=True)
class Text:
    """Prompt and answer; the answer ends with the end token unless it was cut."""

    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Corpus:
    """What the draft learns from, padded at the right, on the device."""

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    features: Tensor  # the three captured hidden states, side by side
    final: Tensor  # the target's last hidden state after its norm
    best: Tensor  # the target's greedy next token

    def select(self, rows: Tensor) -> Corpus:
        return Corpus(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class Acceptance:
    """Accept length counts the bonus token: it is the tokens committed by a verify round."""

    steps: int
    prompts: int
    rounds: int
    accept_length: float
    histogram: list[int]


def say(message: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {message}", flush=True)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    text = prompt.text
    if prompt.chat:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def answer(
    target: nn.Module,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float | None = None,
) -> list[Text]:
    """Continue all prompts in one batch; greedy unless a temperature is given."""
    device = target.device
    end = target.config.eos_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    answers = target.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=end,
        **sampling,
    )[:, width:].tolist()
    texts = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        texts.append(Text(prompt + tokens[:length], len(prompt)))
    return texts


def write_corpus(
    config: TrainConfig,
    target: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    heldout: Sequence[str],
) -> list[Text]:
    """Answer batches of prompts until the next one would overrun this stage's budget."""
    encoded = (encode(tokenizer, p) for p in training_prompts(heldout, config.seed))
    short: Iterator[list[int]] = (ids for ids in encoded if len(ids) <= config.max_prompt_tokens)
    deadline = 60 * config.minutes * config.generation_share
    texts: list[Text] = []
    for index in itertools.count():
        started = time.perf_counter()
        prompts = list(itertools.islice(short, config.generation_batch))
        temperature = config.temperature if index % 3 == 2 else None
        texts += answer(target, prompts, config.max_new_tokens, temperature)
        written = sum(len(t.tokens) - t.prompt_length for t in texts)
        say(f"answers: {len(texts)} texts, {written / 1e6:.2f} M tokens")
        now = time.perf_counter()
        if now - START + (now - started) > deadline:
            return texts
    raise AssertionError("unreachable")


def frequent_tokens(texts: Sequence[Text], vocab_size: int, size: int) -> Tensor:
    """Ids of the tokens that the target writes most often, in ascending order."""
    written = itertools.chain.from_iterable(t.tokens[t.prompt_length :] for t in texts)
    counts = torch.bincount(torch.tensor(list(written)), minlength=vocab_size)
    ranked = counts.argsort(descending=True, stable=True)
    for part in sorted({size // 2, size, 2 * size}):
        share = counts[ranked[:part]].sum() / counts.sum()
        say(f"vocabulary: {part} tokens cover {share:.2%} of the answers")
    return ranked[:size].sort().values


@torch.inference_mode()
def read_features(target: nn.Module, texts: Sequence[Text], batch: int) -> Corpus:
    """Run the target over whole texts; padding at the right cannot reach what precedes it."""
    device = target.device
    lengths = torch.tensor([len(t.tokens) for t in texts], device=device)
    width = -(-int(lengths.max()) // 16) * 16
    tokens = torch.tensor([t.tokens + [0] * (width - len(t.tokens)) for t in texts], device=device)
    layers = captured_layers(target.config.num_hidden_layers)
    hidden_size, dtype = target.config.hidden_size, target.dtype
    features = torch.empty(*tokens.shape, 3 * hidden_size, dtype=dtype, device=device)
    final = torch.empty(*tokens.shape, hidden_size, dtype=dtype, device=device)
    best = torch.empty_like(tokens)
    for start in range(0, len(texts), batch):
        rows = slice(start, start + batch)
        output = target.model(tokens[rows], output_hidden_states=True, use_cache=False)
        features[rows] = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
        final[rows] = output.last_hidden_state
        best[rows] = target.lm_head(output.last_hidden_state).argmax(-1)
    prompt_lengths = torch.tensor([t.prompt_length for t in texts], device=device)
    return Corpus(tokens, prompt_lengths, lengths, features, final, best)


def chain_loss(
    config: TrainConfig,
    draft: Draft,
    embed: nn.Module,
    head: Tensor,
    target_to_draft: Tensor,
    corpus: Corpus,
) -> tuple[Tensor, Tensor]:
    """Loss of the unrolled chains, and per step the share of drafts the target would accept.

    Half of the loss asks for the target's greedy token, which is what a greedy verify accepts,
    half for its distribution, which says more. A target token outside the draft's vocabulary
    cannot be learnt, but it ends the chain like any other mistake.
    """
    index = torch.arange(corpus.tokens.shape[1], device=corpus.tokens.device)
    starts = index >= corpus.prompt_lengths[:, None] - 1
    scored = index < corpus.lengths[:, None] - 1
    best = target_to_draft[corpus.best]
    alive = starts
    hidden, cache = corpus.features, []
    loss = torch.zeros((), device=index.device)
    accepted = []
    for step in range(config.chain_steps):
        hidden = draft(embed(shifted(corpus.tokens, step + 1)), hidden, step, cache)
        wanted = shifted(best, step + 1)
        counted = starts & shifted(scored, step + 1)
        known = counted & (wanted >= 0)
        logits = draft.logits(hidden[known])
        labels = wanted[known]
        with torch.no_grad():
            ahead = functional.pad(corpus.final[:, step + 1 :], (0, 0, 0, step + 1))
            teacher = functional.linear(ahead[known], head).float().softmax(-1)
            weights = torch.where(alive[known], 1.0, config.rejected_weight)
            hits = torch.zeros_like(alive)
            hits[known] = logits.argmax(-1) == labels
            accepted.append((hits & alive).sum() / (counted & alive).sum().clamp(min=1))
            alive = alive & hits
        chances = logits.float().log_softmax(-1)
        soft = -(teacher * chances).sum(-1)
        hard = -chances.gather(1, labels[:, None])[:, 0]
        step_loss = (weights * (soft + hard) / 2).sum() / weights.sum()
        loss = loss + config.step_decay**step * step_loss
    return loss, torch.stack(accepted)


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Warm up over the first 3 % of the time, then fall linearly: the end is always annealed."""
    return config.learning_rate * min(progress / 0.03, (1 - progress) / 0.97)


def train(
    config: TrainConfig,
    draft: Draft,
    target: nn.Module,
    corpus: Corpus,
    draft_to_target: Tensor,
    seconds: float,
) -> int:
    """Update the draft until the time is up; return the number of updates."""
    device = corpus.tokens.device
    embed = target.model.embed_tokens
    head = target.lm_head.weight.detach()[draft_to_target]
    target_to_draft = torch.full((target.config.vocab_size,), -1, device=device)
    target_to_draft[draft_to_target] = torch.arange(draft_to_target.numel(), device=device)
    optimizer = torch.optim.AdamW(
        draft.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    shuffle = torch.Generator().manual_seed(config.seed)
    begun = saved = told = time.perf_counter()
    updates = 0
    while True:
        order = torch.randperm(len(corpus.tokens), generator=shuffle).to(device)
        for rows in order.split(config.batch):
            now = time.perf_counter()
            progress = (now - begun) / seconds
            if progress >= 1:
                return updates
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, progress)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss, accepted = chain_loss(
                    config, draft, embed, head, target_to_draft, corpus.select(rows)
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            updates += 1
            if now - told >= 10 or updates == 1:
                told = now
                rates = " ".join(f"{rate:.3f}" for rate in accepted.tolist())
                epochs = updates * config.batch / len(corpus.tokens)
                say(f"update {updates} epoch {epochs:.1f} loss {loss.item():.3f} accept {rates}")
            if now - saved >= config.save_seconds:
                saved = now
                export(draft, draft_to_target, config.out)


@torch.inference_mode()
def measure(
    draft: Draft, embed: nn.Module, draft_to_target: Tensor, corpus: Corpus, steps: int
) -> Acceptance:
    """Accept length of greedy decoding, from chains at every position of greedy texts."""
    device = corpus.tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        matches = chain_matches(
            draft, embed, draft_to_target, corpus.tokens, corpus.features, steps
        ).tolist()
    sizes = zip(corpus.prompt_lengths.tolist(), corpus.lengths.tolist(), strict=True)
    rounds = [
        correct
        for row, (prompt_length, length) in zip(matches, sizes, strict=True)
        for correct in walk_rounds(row, prompt_length, length)
    ]
    histogram = [rounds.count(correct) for correct in range(steps + 1)]
    committed = int((corpus.lengths - corpus.prompt_lengths - 1).sum())
    return Acceptance(steps, len(matches), len(rounds), committed / len(rounds), histogram)


def run(config: TrainConfig) -> None:
    torch.manual_seed(config.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # slower than its siblings for masks that change
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype).to(device)
    target.eval().requires_grad_(False)
    heldout = read_prompts(config.heldout)
    say(f"target on {device} in {dtype}, budget {config.minutes:g} min")

    texts = write_corpus(config, target, tokenizer, heldout)
    draft_to_target = frequent_tokens(texts, target.config.vocab_size, config.draft_vocab_size)
    draft_to_target = draft_to_target.to(device)
    corpus = read_features(target, texts, config.feature_batch)
    say(f"features: {corpus.features.nbytes / 1e9 + corpus.final.nbytes / 1e9:.1f} GB")
    prompts = [encode(tokenizer, Prompt(text, chat=True)) for text in heldout]
    unseen = read_features(target, answer(target, prompts, config.heldout_tokens), len(prompts))
    say(f"held-out: {len(prompts)} prompts answered")

    source = json.loads((config.target / "config.json").read_text(encoding="utf-8"))
    draft = Draft(DraftConfig.of_target(source, config.draft_vocab_size)).to(device)
    draft.start_from_target(target, draft_to_target)
    left = 60 * config.minutes - (time.perf_counter() - START)
    updates = train(config, draft, target, corpus, draft_to_target, max(left - 5, 5))
    export(draft, draft_to_target, config.out)
    say(f"wrote {config.out} after {updates} updates")

    embed = target.model.embed_tokens
    results = [
        measure(draft, embed, draft_to_target, unseen, steps)
        for steps in (config.heldout_steps, config.heldout_steps + 2)
    ]
    for result in results:
        say(f"held-out: {result}")
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "config": {name: value for name, value in asdict(config).items() if name not in PATHS},
        "texts": len(texts),
        "answer_tokens": sum(len(t.tokens) - t.prompt_length for t in texts),
        "updates": updates,
        "seconds": round(time.perf_counter() - START, 1),
        "simulated": [asdict(result) for result in results],
    }
    path = config.out.parent / "training.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


PATHS = ("target", "out", "heldout")


def parse_arguments() -> TrainConfig:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for f in fields(TrainConfig):
        flag = f"--{f.name.replace('_', '-')}"
        kind = Path if f.name in PATHS else type(f.default)
        text = f.metadata.get("help", " ")
        if f.name == "target":
            parser.add_argument(flag, type=kind, required=True, help=text)
        else:
            parser.add_argument(flag, type=kind, default=f.default, help=text)
    return TrainConfig(**vars(parser.parse_args()))


if __name__ == "__main__":
    run(parse_arguments())
