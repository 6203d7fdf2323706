"""Serve an EAGLE-3 pair with and without ``--enable-verify-graphs`` and compare what they did.

Called by ``ci/demo.sh``; ends with 0 only if every answer has the same tokens in both runs and
every verify of the first replayed a graph.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
LOG_LINES = 40
START_SECONDS = 900

PROMPTS = [
    ("What is the capital of France, and what is it known for?", 28),
    ("Write a short story about a clockmaker who finds a hidden door.", 32),
    ("Explain to a child why the sky is blue.", 24),
    ("Give me a simple recipe for lentil soup.", 40),
    ("Write a Python function that returns the larger of two numbers.", 28),
    ("List three things to check before renting a bicycle.", 20),
]
WAVES = ([0], [1, 2], [0, 1, 2, 3, 4, 5])
"""Prompts that are sent together; they end one by one, so that batches of every size occur."""


@dataclass
class Answer:
    prompt: str
    tokens: list[int]
    text: str


@dataclass
class Served:
    """One server's run."""

    answers: list[Answer]
    info: dict[str, Any]
    boot_seconds: float
    seconds: float

    @property
    def state(self) -> dict[str, Any]:
        return self.info["internal_states"][0]


class DemoError(Exception):
    """Something that ends the demo; the text is what the user sees."""


@contextlib.contextmanager
def server(flags: list[str], env: dict[str, str], log: Path) -> Iterator[str]:
    """A server in a session of its own, which does not outlive the block; yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", *flags, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=env, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url)
        yield url
    except Exception as error:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise DemoError("\n".join([*tail, f"-- the lines above end {log}", str(error)])) from None
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole session: gently, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        return bytes(response.read())


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the server ended with {process.returncode} before it was ready")
        with contextlib.suppress(OSError):
            get(f"{url}/health")
            return
        time.sleep(0.5)
    raise DemoError(f"the server was not ready after {START_SECONDS} s")


def ask(client: Any, prompt: str, max_tokens: int) -> Answer:
    """One chat answer; SGLang adds the token ids, under a name that changed between releases."""
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    extra = choice.model_extra or {}
    tokens = extra.get("token_ids") or extra.get("response_token_ids")
    if not tokens:
        raise DemoError(f"the answer carries no token ids, only {sorted(extra)}")
    return Answer(prompt, list(tokens)[:max_tokens], choice.message.content or "")


def serve(flags: list[str], env: dict[str, str], log: Path) -> Served:
    from openai import OpenAI

    began = time.monotonic()
    with server(flags, env, log) as url:
        ready = time.monotonic()
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
        answers = []
        for wave in WAVES:
            with ThreadPoolExecutor(len(wave)) as pool:
                answers += pool.map(lambda index: ask(client, *PROMPTS[index]), wave)
        done = time.monotonic()
        info = json.loads(get(f"{url}/server_info"))
    return Served(answers, info, ready - began, done - ready)


def where() -> tuple[str, list[str], dict[str, str]]:
    """The device in words, its server flags, its environment."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return (
            name,
            ["--attention-backend", "triton", "--mem-fraction-static", "0.5"],
            {**os.environ},
        )
    sys.path.insert(0, str(ROOT))
    from tests.engine.worker import STANDINS, engine_env

    env = engine_env(graphs=True) | {
        "PYTHONPATH": str(STANDINS),  # the package itself is the installed one
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    flags = [
        "--device", "cpu", "--attention-backend", "intel_amx", "--disable-overlap-schedule",
        "--mem-fraction-static", "0.3", "--skip-server-warmup",
    ]  # fmt: skip
    return "CPU, graphs replayed by the stand-ins of tests/engine", flags, env


def report(device: str, plugin: Served, stock: Served) -> list[str]:
    """Print the comparison; returns what is wrong."""
    ours = plugin.state.get("verify_graphs")
    if not ours:
        return ["/server_info has no verify_graphs: the plugin did not load"]
    problems = []
    if ours["state"] != "active":
        problems.append(f"verify graphs are {ours['state']}: {'; '.join(ours['reasons'])}")
    if "verify_graphs" in stock.state:
        problems.append("the run without the flag carries the plugin")

    print(f"\nSGLang {plugin.info['version']} on {device}")
    print(f"verify graphs: {ours['state']}\n")
    print("bucket (batch x draft_steps)  replays")
    for bucket, count in sorted(ours.get("buckets", {}).items(), key=lambda item: order(item[0])):
        print(f"{bucket:>28}  {count:>7}")
    captured = sum(len(batches) for batches in ours.get("plan", {}).values())
    print(f"{'captured in all':>28}  {captured:>7}\n")

    print("phase         replayed  eager  why")
    for phase, counts in ours.get("phases", {}).items():
        why = ", ".join(f"{reason} {n}" for reason, n in counts["reasons"].items()) or "-"
        print(f"{phase:<12}  {counts['replayed']:>8}  {counts['eager']:>5}  {why}")
    verify = ours.get("phases", {}).get("verify", {"replayed": 0, "eager": 0})
    if verify["eager"] or not verify["replayed"]:
        problems.append(f"{verify['eager']} verifies ran eager, {verify['replayed']} replayed")

    pairs = list(zip(plugin.answers, stock.answers, strict=True))
    equal = sum(a.tokens == b.tokens for a, b in pairs)
    total = sum(len(answer.tokens) for answer in plugin.answers)
    for ours_, theirs in pairs:
        if ours_.tokens != theirs.tokens:
            problems.append(f"other tokens for {ours_.prompt!r}: {first_difference(ours_, theirs)}")

    print(f"\n{'':<22}{'with':>10}{'without':>10}")
    lengths = [number(served.state.get("avg_spec_accept_length")) for served in (plugin, stock)]
    rows = [
        ("accept length", *lengths),
        ("seconds to start", number(plugin.boot_seconds), number(stock.boot_seconds)),
        ("seconds to answer", number(plugin.seconds), number(stock.seconds)),
    ]
    for name, first, second in rows:
        print(f"{name:<22}{first:>10}{second:>10}")
    print(f"\nsame tokens: {equal} of {len(pairs)} answers, {total} tokens")
    sample = plugin.answers[0]
    print(f"for example: {sample.prompt}\n             {' '.join(sample.text.split())}\n")
    return problems


def order(bucket: str) -> tuple[int, int]:
    batch, steps = bucket.split("x")
    return int(steps), int(batch)


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def first_difference(ours: Answer, theirs: Answer) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b),
        min(len(ours.tokens), len(theirs.tokens)),
    )
    return f"token {at} is {ours.tokens[at : at + 1]} with, {theirs.tokens[at : at + 1]} without"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for logs")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    device, device_flags, env = where()
    flags = [
        "--model-path", str(arguments.target.resolve()),
        "--served-model-name", "default",
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(arguments.draft.resolve()),
        "--speculative-num-steps", str(STEPS),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(STEPS + 1),
        "--dtype", "float32",  # rounding must not decide between two tokens
        "--max-running-requests", str(max(map(len, WAVES))),
        "--max-total-tokens", "4096",
        "--context-length", "1024",
        "--random-seed", "1",
        *device_flags,
    ]  # fmt: skip
    runs = {}
    try:
        for name, extra in (("with", ["--enable-verify-graphs"]), ("without", [])):
            log = (arguments.work / f"server-{name}.log").resolve()
            print(f"[demo] serving {name} verify graphs, SGLang {version('sglang')}", flush=True)
            runs[name] = serve([*flags, *extra], env, log)
        problems = report(device, runs["with"], runs["without"])
    except DemoError as error:
        print(error, file=sys.stderr)
        problems = ["a server did not get through"]
    for problem in problems:
        print(f"[demo] FAILED: {problem}", file=sys.stderr)
    if not problems:
        print("[demo] passed: same tokens, every verify replayed")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
