"""NCCL on the GPUs of one host: all-reduces under each setting, and a server with and without us.

Writes one JSON file after each part. ``README.md`` says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from allreduce import (  # noqa: E402
    NO_MULTICAST,
    Scale,
    captured_graph,
    captured_line,
    measure,
    scale,
    settings,
    table,
)
from serve import run_header  # noqa: E402
from serving.engines import write_site  # noqa: E402
from serving.models import Model, dummy_pair, write_prompts  # noqa: E402
from serving.ranks import FOLDER, NAME  # noqa: E402

STOCK, OURS = "stock", "verify-graphs"
PARTS = {"allreduce": 110.0, "captured_graph": 40.0, "serve": 150.0}
"""Seconds that each may need; a part that would not fit is not started."""
STEPS, BATCHES, PROMPT = 3, (1, 2, 4, 8), 64
ROUNDS, NEW_TOKENS = 5, 64
VARIABLE = ("requested", "effective", "source", "read_by_nccl", "in_use", "status", "evidence")


class Server:
    """``sglang.launch_server`` in a process group of its own."""

    def __init__(self, role: str, arguments: list[str], folder: Path, port: int) -> None:
        self.folder = folder / role
        self.folder.mkdir(parents=True, exist_ok=True)
        self.url, self._role, self._log = f"http://127.0.0.1:{port}", role, self.folder / "log.txt"
        ports = ["--port", str(port), "--nccl-port", str(port + 500)]
        command = [sys.executable, "-m", "sglang.launch_server", *ports, *arguments]
        self._started = time.monotonic()
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=_environment(self.folder),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> float:
        """Seconds from its start until it served, or was first asked."""
        while time.monotonic() - self._started < seconds:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._role} ended\n{self.log()[-3000:]}")
            with contextlib.suppress(OSError):
                self.ask("/health_generate")
                return round(time.monotonic() - self._started, 1)
            time.sleep(0.5)
        raise RuntimeError(f"{self._role} is not up after {seconds:.0f} s\n{self.log()[-3000:]}")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answers = self.ask("/generate", {"input_ids": prompts, "sampling_params": sampling})
        return [list(answer["output_ids"]) for answer in answers]

    def statuses(self, world: int) -> list[dict[str, Any]]:
        """The package's status on each rank, as that rank wrote it when asked now."""
        paths = [self.folder / NAME.format(rank) for rank in range(world)]
        for path in paths:
            path.unlink(missing_ok=True)
        self.ask("/server_info")
        deadline = time.monotonic() + 10
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._role}: not every rank wrote its status")
            time.sleep(0.05)
        return [json.loads(path.read_text()) for path in paths]

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _environment(folder: Path) -> dict[str, str]:
    site = write_site(folder, "serving.ranks:load")
    paths = [str(site), str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]
    return dict(os.environ) | NO_MULTICAST | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # two servers load at the same time
        FOLDER: str(folder),
    }  # fmt: skip


def serve(sizes: Scale, nccl: list[str], attention: str, state: Path, port: int) -> dict[str, Any]:
    """Both servers at once, the same requests in turn; what each rank says afterwards."""
    smoke = sizes.device == "cpu"
    model = _model(smoke, state)
    common = _arguments(model, smoke, sizes.world, attention)
    ours = [*common, "--enable-verify-graphs"]
    # One width: another would choose other kernels, and equal tokens would be luck.
    ours += ["--verify-graph-steps", str(STEPS), *nccl]
    servers: dict[str, Server] = {}
    try:
        servers[STOCK] = Server(STOCK, common, state / "servers", port)
        servers[OURS] = Server(OURS, ours, state / "servers", port + 10)
        timeout = 500.0 if smoke else 200.0
        boots = {role: server.wait(timeout) for role, server in servers.items()}
        path = write_prompts(model, state, PROMPT, max(BATCHES), [])
        prompts = json.loads(path.read_text())
        rows = _requests(servers, prompts, 8 if smoke else NEW_TOKENS)
        statuses = servers[OURS].statuses(sizes.world)
        info = servers[OURS].ask("/server_info")["internal_states"][0]["verify_graphs"]
        shown = subprocess.run(
            [sys.executable, "-c", CLI, "ranks", servers[OURS].url],
            env=_environment(servers[OURS].folder), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        for server in servers.values():
            server.stop()
    verify = [status["phases"]["verify"] for status in statuses]
    return {
        "ranks": [_rank(entry) for entry in info["nccl"]["ranks"]],
        "serve": {
            "model": model.name,
            "tp": sizes.world,
            "attention": attention,
            "arguments": nccl,
            "boot_seconds": boots,
            "state": [status["state"] for status in statuses],
            "verify_replayed": sum(one["replayed"] for one in verify),
            "verify_eager": sum(one["eager"] for one in verify),
            "verify_by_rank": verify,
            "tokens_equal": all(row["identical"] == row["requests"] for row in rows),
            "batches": rows,
            "problems": info["nccl"].get("problems", []),
            "start_up_lines": [
                line.partition("[verify-graphs]")[2].strip()
                for line in servers[OURS].log().splitlines()
                if "[verify-graphs] NCCL" in line
            ],
            "ranks_exit": shown.returncode,
            "ranks_output": (shown.stdout + shown.stderr).splitlines(),
        },
    }


CLI = "import sys; from sglang_verify_graphs.cli import main; sys.exit(main())"


def _model(smoke: bool, state: Path) -> Model:
    if smoke:
        return dummy_pair(
            "tiny-dummy", state / "models", layers=8, hidden=64, heads=4, kv_heads=4, inner=64,
            vocab=512, context=2048,
        )  # fmt: skip
    return dummy_pair(
        "llama-8b", state / "models", layers=32, hidden=4096, heads=32, kv_heads=8,
        inner=14336, vocab=32000, context=16384,
    )  # fmt: skip


def _arguments(model: Model, smoke: bool, world: int, attention: str) -> list[str]:
    flags = {
        "--tp": str(world),
        "--model-path": str(model.target),
        "--load-format": "dummy",
        "--dtype": "float32" if smoke else "bfloat16",
        "--attention-backend": "intel_amx" if smoke else attention,
        "--mem-fraction-static": "0.2" if smoke else "0.5",
        "--max-total-tokens": "2048" if smoke else "20000",
        "--max-running-requests": str(max(BATCHES)),
        "--grammar-backend": "none",
        "--sampling-backend": "pytorch",
        "--random-seed": "1",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(model.draft),
        "--speculative-draft-load-format": "dummy",
        "--speculative-num-steps": str(STEPS),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(STEPS + 1),
        "--cuda-graph-bs-decode": " ".join(map(str, BATCHES)),
    } | ({"--device": "cpu"} if smoke else {})
    words = [word for flag in flags.items() for text in flag for word in text.split()]
    return [*words, "--skip-tokenizer-init", "--disable-prefill-cuda-graph", "--sleep-on-idle"]


def _requests(
    servers: Mapping[str, Server], prompts: list[list[int]], new_tokens: int
) -> list[dict[str, Any]]:
    """Each prompt alone, then batches, the servers in turn: tokens and seconds."""
    alone = {
        role: [server.generate([prompt], new_tokens)[0] for prompt in prompts]
        for role, server in servers.items()
    }
    rows = [_row(1, len(prompts), alone, {})]
    for batch in BATCHES:
        tokens: dict[str, list[list[int]]] = {}
        seconds: dict[str, list[float]] = {role: [] for role in servers}
        for turn in range(ROUNDS):
            for role in list(servers)[:: 1 if turn % 2 == 0 else -1]:
                started = time.perf_counter()
                tokens[role] = servers[role].generate(prompts[:batch], new_tokens)
                seconds[role].append(time.perf_counter() - started)
        rows.append(_row(batch, batch, tokens, seconds))
    return rows


def _row(
    batch: int, requests: int, tokens: Mapping[str, list[list[int]]], seconds: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "batch": batch,
        "requests": requests,
        "identical": sum(a == b for a, b in zip(tokens[STOCK], tokens[OURS], strict=True)),
        "distinct_tokens": len({token for row in tokens[OURS] for token in row}),
        "seconds": {role: round(statistics.median(taken), 4) for role, taken in seconds.items()},
    }


def _rank(entry: Mapping[str, Any]) -> dict[str, Any]:
    variables = {
        name: {field: one[field] for field in VARIABLE} for name, one in entry["variables"].items()
    }
    kept = {name: entry[name] for name in ("rank", "node", "nccl_version", "library")}
    return kept | {"packaged_version": entry["packaged_version"], "variables": variables}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    """Without the names of this host and of its folders."""
    host = rf"\b{re.escape(socket.gethostname())}\b"
    text = re.sub(host, "host", json.dumps(data, indent=1))
    text = re.sub(r"(?:/[\w.+-]+)+/(?=(?:site|dist)-packages/)", "", text)
    path.with_suffix(".part").write_text(text + "\n")
    path.with_suffix(".part").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path("nccl"), help="folder of this run")
    parser.add_argument("--world", type=int, default=2, help="GPUs, from the first visible one")
    parser.add_argument("--budget", type=float, default=300, help="seconds this call may take")
    parser.add_argument("--resume", action="store_true", help="keep what --state already holds")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--setting", action="append", default=[], help="'NAME: KEY=VALUE ...'")
    parser.add_argument(
        "--nccl", default="--nccl-env NCCL_PROTO=LL NCCL_ALGO=Ring NCCL_P2P_LEVEL=SYS",
        help="flags of the server with the package, as --nccl='--nccl-profile NAME'",
    )  # fmt: skip
    parser.add_argument("--attention", default="triton", help="attention backend of the servers")
    parser.add_argument("--port", type=int, default=32000, help="of the first server")
    parser.add_argument("--smoke", action="store_true", help="the code path, on a CPU")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("the budget is spent; --resume goes on"))
    signal.alarm(max(int(arguments.budget) - 5, 1))
    started = time.monotonic()
    if arguments.smoke:
        from tests.engine.worker import STANDINS, engine_env

        cores = sorted(os.sched_getaffinity(0))
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(arguments.world))
        os.environ.update(engine_env(graphs=True) | {"SGLANG_CPU_OMP_THREADS_BIND": bind})
        sys.path.insert(0, str(STANDINS))
    state: Path = arguments.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    header = run_header(arguments.smoke)
    sizes = scale(arguments.smoke, arguments.world)
    path = state / f"nccl-{header['slug']}x{sizes.world}-{header['sglang']}.json"
    data: dict[str, Any] = header | {"done": [], "failed": {}}
    if arguments.resume and path.exists():
        data = json.loads(path.read_text()) | header | {"failed": {}}
    try:
        _run_parts(data, arguments, sizes, path, started + arguments.budget)
    finally:
        print(_summary(data))
        print(f"results: {path}")


def _run_parts(
    data: dict[str, Any], arguments: argparse.Namespace, sizes: Scale, path: Path, deadline: float
) -> None:
    for part, needs in PARTS.items():
        left = deadline - time.monotonic()
        if part in data["done"] or part not in arguments.only:
            continue
        if not arguments.smoke and needs > left:
            print(f"{part}: may need {needs:.0f} s of {left:.0f} s left; --resume goes on")
            continue
        print(f"{part}: {left:.0f} s left", flush=True)
        try:
            if part == "allreduce":
                chosen = settings(arguments.setting, smoke=arguments.smoke)
                data |= measure(sizes, chosen, path.parent / "allreduce")
            elif part == "captured_graph":
                data[part] = captured_graph(sizes, path.parent / "captured")
            else:
                flags = arguments.nccl.split()
                data |= serve(sizes, flags, arguments.attention, path.parent, arguments.port)
            data["done"].append(part)
        except Exception as error:
            data["failed"][part] = traceback.format_exc()[-4000:]
            print(f"FAILED {part}: {error}", flush=True)
        _write(path, data)


def _summary(data: Mapping[str, Any]) -> str:
    lines = []
    if "allreduce" in data:
        lines.append(table(data))
    if "captured_graph" in data:
        lines.append(captured_line(data["captured_graph"]))
    if (served := data.get("serve")) is not None:
        lines += served["ranks_output"]
        lines.append(
            f"serve: ranks exits {served['ranks_exit']}, verify {served['verify_replayed']} "
            f"replayed, {served['verify_eager']} eager, tokens equal {served['tokens_equal']} "
            f"({[(r['identical'], r['requests']) for r in served['batches']]}), boots "
            f"{served['boot_seconds']}"
        )
        lines += [
            f"batch {row['batch']}: {row['seconds']} s"
            for row in served["batches"]
            if row["seconds"]
        ]
    return "\n".join([*lines, *(f"failed {part}" for part in data["failed"])])


if __name__ == "__main__":
    main()
