"""Train the EAGLE-3 draft on text that the target itself writes, within a time budget.

The target answers prompts: some are templates filled with topics, as many are questions that the
target makes up itself, for templates alone are too narrow to learn from. The draft then learns to
continue its own chains (training-time test), and its accept length is measured on prompts that
were held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from draft import Draft, DraftConfig, captured_layers, chain_matches, export, shifted, walk_rounds
from prompts import Prompt, key, read_prompts, template_prompts
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from writer import answer, rounded

HERE = Path(__file__).parent
START = time.perf_counter()
PATHS = ("target", "out", "heldout")


@dataclass(frozen=True)
class TrainConfig:
    """Every field is also a flag of the command line."""

    target: Path = field(metadata={"help": "directory written by target.py"})
    out: Path = field(default=HERE / "draft", metadata={"help": "directory of the draft"})
    minutes: float = field(default=12.0, metadata={"help": "budget of the whole run"})
    seed: int = 17
    draft_vocab_size: int = 5632
    chain_steps: int = field(default=4, metadata={"help": "unrolled steps in training"})
    writing_share: float = field(default=0.35, metadata={"help": "share of the budget for texts"})
    writing_batch: int = 3072
    max_prompt_tokens: int = 96
    max_new_tokens: int = 256
    temperature: float = field(default=0.7, metadata={"help": "of every third batch of answers"})
    batch: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    step_decay: float = field(default=0.8, metadata={"help": "loss weight ratio of later steps"})
    rejected_weight: float = field(
        default=0.25, metadata={"help": "loss weight where an earlier draft of the chain is wrong"}
    )
    heldout: Path = HERE / "heldout.txt"
    heldout_tokens: int = 128
    heldout_steps: int = 3
    save_seconds: float = 40.0


@dataclass(frozen=True)
class Text:
    """Prompt and answer; the answer ends with the end token unless it was cut."""

    tokens: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Batch:
    """Texts padded at the right, and what the target thinks of them."""

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    features: Tensor  # the three captured hidden states, side by side
    final: Tensor  # the last hidden state after its norm
    best: Tensor  # the greedy next token


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


class PromptSource:
    """Deals prompts for the target to answer, as token ids and no prompt twice."""

    def __init__(
        self,
        config: TrainConfig,
        target: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        heldout: Sequence[str],
    ) -> None:
        self.config, self.target, self.tokenizer = config, target, tokenizer
        self.seen = {key(text) for text in heldout}
        self.templates = template_prompts(self.seen, config.seed)
        self.invented = self.invent_questions()

    def encode(self, prompt: Prompt) -> list[int]:
        text = prompt.text
        if prompt.chat:
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def invent_questions(self) -> Iterator[list[int]]:
        """Let the target write the user's turn too; a turn that does not end is dropped.

        Stops when the target has nothing new to ask.
        """
        marker = "\x00"
        message = [{"role": "user", "content": marker}]
        opening = self.tokenizer.apply_chat_template(message, tokenize=False).split(marker)[0]
        ids = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        fresh = True
        while fresh:
            fresh = False
            turns = answer(self.target, [ids] * self.config.writing_batch, 48, temperature=0.9)
            for turn in turns:
                text = self.tokenizer.decode(turn[:-1]).strip()
                if turn[-1] == self.tokenizer.eos_token_id and key(text) not in self.seen:
                    fresh = True
                    self.seen.add(key(text))
                    yield self.encode(Prompt(text, chat=True))

    def invent_openings(self, count: int) -> list[list[int]]:
        """Beginnings of texts of any kind: what the target writes after nothing at all."""
        first = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        openings = answer(self.target, [[first]] * count, 24, temperature=1.0)
        return [opening for opening in openings if opening[-1] != self.tokenizer.eos_token_id]

    def deal(self, count: int) -> list[list[int]]:
        filled = itertools.islice(map(self.encode, self.templates), count * 4 // 10)
        invented = itertools.islice(self.invented, count * 5 // 10)
        prompts = [*filled, *invented, *self.invent_openings(count // 10)]
        return [ids for ids in prompts if len(ids) <= self.config.max_prompt_tokens]


def write_texts(config: TrainConfig, source: PromptSource) -> list[Text]:
    """Answer batches of prompts until the next one would overrun this stage's budget."""
    deadline = 60 * config.minutes * config.writing_share
    texts: list[Text] = []
    for index in itertools.count():
        started = time.perf_counter()
        prompts = source.deal(config.writing_batch)
        temperature = config.temperature if index % 3 == 2 else None
        answers = answer(source.target, prompts, config.max_new_tokens, temperature)
        texts += [Text(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]
        now = time.perf_counter()
        if now - START + (now - started) > deadline:
            break
    written = sum(len(t.tokens) - t.prompt_length for t in texts)
    say(f"texts: {len(texts)} with {written / 1e6:.2f} M tokens of answers")
    return texts


def frequent_tokens(texts: Sequence[Text], vocab_size: int, size: int) -> Tensor:
    """Ids of the tokens that the target writes most often, in ascending order."""
    written = itertools.chain.from_iterable(t.tokens[t.prompt_length :] for t in texts)
    counts = torch.bincount(torch.tensor(list(written)), minlength=vocab_size)
    ranked = counts.argsort(descending=True, stable=True)
    for part in (size // 2, size, 2 * size):
        share = counts[ranked[:part]].sum() / counts.sum()
        say(f"vocabulary: {part} tokens cover {share:.2%} of the answers")
    return ranked[:size].sort().values


@torch.no_grad()
def read(target: nn.Module, texts: Sequence[Text]) -> Batch:
    """Run the target over whole texts; padding at the right cannot reach what precedes it."""
    device = target.device
    width = rounded(max(len(t.tokens) for t in texts))
    tokens = torch.tensor([t.tokens + [0] * (width - len(t.tokens)) for t in texts])
    lengths = torch.tensor([len(t.tokens) for t in texts])
    prompt_lengths = torch.tensor([t.prompt_length for t in texts])
    tokens = tokens.to(device)
    output = target.model(tokens, output_hidden_states=True, use_cache=False)
    captured = captured_layers(target.config.num_hidden_layers)
    return Batch(
        tokens=tokens,
        prompt_lengths=prompt_lengths.to(device),
        lengths=lengths.to(device),
        features=torch.cat([output.hidden_states[layer] for layer in captured], dim=-1),
        final=output.last_hidden_state,
        best=target.lm_head(output.last_hidden_state).argmax(-1),
    )


def shuffled_batches(texts: Sequence[Text], size: int, seed: int) -> Iterator[list[Text]]:
    """Batches of texts of similar length, epoch after epoch, so that little padding is computed."""
    rng = random.Random(seed)
    order = list(texts)
    while True:
        rng.shuffle(order)
        batches = []
        for start in range(0, len(order), 32 * size):
            alike = sorted(order[start : start + 32 * size], key=lambda text: len(text.tokens))
            batches += [alike[i : i + size] for i in range(0, len(alike), size)]
        rng.shuffle(batches)
        yield from batches


def chain_loss(
    config: TrainConfig,
    draft: Draft,
    embed: nn.Module,
    head: Tensor,
    target_to_draft: Tensor,
    batch: Batch,
) -> tuple[Tensor, Tensor]:
    """Loss of the unrolled chains, and per step the share of drafts the target would accept.

    Half of the loss asks for the target's greedy token, which is what a greedy verify accepts,
    half for its distribution, which says more. A target token outside the draft's vocabulary
    cannot be learnt, but it ends the chain like any other mistake.
    """
    index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    starts = index >= batch.prompt_lengths[:, None] - 1
    scored = index < batch.lengths[:, None] - 1
    best = target_to_draft[batch.best]
    alive = starts
    hidden, cache = batch.features, []
    loss = torch.zeros((), device=index.device)
    accepted = []
    for step in range(config.chain_steps):
        hidden = draft(embed(shifted(batch.tokens, step + 1)), hidden, step, cache)
        wanted = shifted(best, step + 1)
        counted = starts & shifted(scored, step + 1)
        known = counted & (wanted >= 0)
        logits = draft.logits(hidden[known])
        labels = wanted[known]
        with torch.no_grad():
            ahead = functional.pad(batch.final[:, step + 1 :], (0, 0, 0, step + 1))
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


@torch.no_grad()
def measure(
    draft: Draft, embed: nn.Module, draft_to_target: Tensor, batch: Batch, steps: int
) -> Acceptance:
    """Accept length of greedy decoding, from chains at every position of greedy texts."""
    device = batch.tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        matches = chain_matches(
            draft, embed, draft_to_target, batch.tokens, batch.features, steps
        ).tolist()
    sizes = zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
    rounds = [
        correct
        for row, (prompt_length, length) in zip(matches, sizes, strict=True)
        for correct in walk_rounds(row, prompt_length, length)
    ]
    histogram = [rounds.count(correct) for correct in range(steps + 1)]
    committed = int((batch.lengths - batch.prompt_lengths - 1).sum())
    return Acceptance(steps, len(matches), len(rounds), committed / len(rounds), histogram)


def learning_rate(config: TrainConfig, progress: float) -> float:
    """Warm up over the first 3 % of the time, then fall linearly: the end is always annealed."""
    return config.learning_rate * min(progress / 0.03, (1 - progress) / 0.97)


def train(
    config: TrainConfig,
    draft: Draft,
    target: nn.Module,
    texts: Sequence[Text],
    unseen: Batch,
    draft_to_target: Tensor,
    seconds: float,
) -> int:
    """Update the draft until the time is up; return the number of updates."""
    device = draft_to_target.device
    embed = target.model.embed_tokens
    head = target.lm_head.weight.detach()[draft_to_target]
    target_to_draft = torch.full((target.config.vocab_size,), -1, device=device)
    target_to_draft[draft_to_target] = torch.arange(draft_to_target.numel(), device=device)
    optimizer = torch.optim.AdamW(
        draft.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    begun = saved = time.perf_counter()
    for update, chosen in enumerate(shuffled_batches(texts, config.batch, config.seed)):
        now = time.perf_counter()
        progress = (now - begun) / seconds
        if progress >= 1:
            return update
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, progress)
        batch = read(target, chosen)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, accepted = chain_loss(config, draft, embed, head, target_to_draft, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if now - saved >= config.save_seconds or update == 0:
            saved = now
            export(draft, draft_to_target, config.out)
            result = measure(draft, embed, draft_to_target, unseen, config.heldout_steps)
            rates = " ".join(f"{rate:.3f}" for rate in accepted.tolist())
            epoch = update * config.batch / len(texts)
            say(
                f"update {update} epoch {epoch:.1f} loss {loss.item():.3f} accepted {rates}"
                f" held-out accept length {result.accept_length:.3f}"
            )
    raise AssertionError("batches never end")


def run(config: TrainConfig) -> None:
    torch.manual_seed(config.seed)
    # Masks and shapes change with every batch, which costs cuDNN's attention a plan each time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype).to(device)
    target.eval().requires_grad_(False)
    heldout = read_prompts(config.heldout)
    say(f"target on {device} in {dtype}, budget {config.minutes:g} min")

    source = PromptSource(config, target, tokenizer, heldout)
    texts = write_texts(config, source)
    draft_to_target = frequent_tokens(texts, target.config.vocab_size, config.draft_vocab_size)
    draft_to_target = draft_to_target.to(device)
    prompts = [source.encode(Prompt(text, chat=True)) for text in heldout]
    answers = answer(target, prompts, config.heldout_tokens)
    unseen = read(target, [Text(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)])

    settings = json.loads((config.target / "config.json").read_text(encoding="utf-8"))
    draft = Draft(DraftConfig.of_target(settings, config.draft_vocab_size)).to(device)
    draft.start_from_target(target, draft_to_target)
    left = 60 * config.minutes - (time.perf_counter() - START)
    updates = train(config, draft, target, texts, unseen, draft_to_target, max(left - 5, 5))
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
