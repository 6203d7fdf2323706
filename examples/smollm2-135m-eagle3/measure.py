"""Measure the draft's accept length on the held-out prompts, greedily, in SGLang itself."""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prompts import read_prompts

HERE = Path(__file__).parent


@dataclass(frozen=True)
class PromptCount:
    """What one prompt took; its first token comes from prefill, the others from verify rounds."""

    prompt: str
    completion_tokens: int
    verify_rounds: int
    correct_drafts: list[int]  # rounds by the number of drafts the target agreed with

    @property
    def committed(self) -> int:
        return self.completion_tokens - 1


def count(prompt: str, meta: dict[str, Any], steps: int) -> PromptCount:
    name = "spec_correct_drafts_histogram"
    histogram = meta.get(name) or meta.get("spec_accept_histogram") or []
    padded = list(histogram) + [0] * (steps + 1 - len(histogram))
    return PromptCount(prompt, meta["completion_tokens"], meta["spec_verify_ct"], padded)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="directory by target.py")
    parser.add_argument("--draft", type=Path, default=HERE / "draft", help="directory by train.py")
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout.txt", help="prompts")
    parser.add_argument("--out", type=Path, default=HERE / "accept_length.json", help="report")
    parser.add_argument("--steps", type=int, default=3, help="draft steps")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--batch", type=int, default=8, help="prompts that run together")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft")
    parser.add_argument("--attention-backend", help="SGLang's choice if not given")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    import sglang
    from transformers import AutoTokenizer

    prompts = read_prompts(arguments.heldout)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    engine = sglang.Engine(
        model_path=str(arguments.target),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(arguments.draft),
        speculative_num_steps=arguments.steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=arguments.steps + 1,
        device=arguments.device,
        dtype=arguments.dtype,
        attention_backend=arguments.attention_backend,
        max_running_requests=arguments.batch,
        mem_fraction_static=0.5,
        max_total_tokens=arguments.batch * 1024,
        disable_radix_cache=True,
        grammar_backend="none",
        log_level="error",
    )
    sampling = {"temperature": 0, "max_new_tokens": arguments.max_new_tokens}
    outputs = engine.generate(texts, sampling)
    engine.shutdown()

    counts = [
        count(prompt, output["meta_info"], arguments.steps)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    rounds = sum(c.verify_rounds for c in counts)
    report = {
        "accept_length": round(sum(c.committed for c in counts) / rounds, 4),
        "meaning": "tokens committed per verify round, bonus token included",
        "draft_steps": arguments.steps,
        "topk": 1,
        "temperature": 0,
        "verify_rounds": rounds,
        "completion_tokens": sum(c.completion_tokens for c in counts),
        "correct_drafts": [
            sum(c.correct_drafts[drafts] for c in counts) for drafts in range(arguments.steps + 1)
        ],
        "date": datetime.date.today().isoformat(),
        "sglang": sglang.__version__,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "prompts": [asdict(c) for c in counts],
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"accept length {report['accept_length']} at {arguments.steps} draft steps")
    print(f"{rounds} verify rounds, correct drafts {report['correct_drafts']}")


if __name__ == "__main__":
    main()
