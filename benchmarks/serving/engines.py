"""One SGLang engine in a process group of its own, started early and let onto the GPU when told.

The parent half (:class:`EngineProcess`) runs nothing of SGLang; the child half is this module as a
program. They talk in lines of JSON: commands on the child's standard input, answers on a pipe,
SGLang's output in a log file. A child that dies, hangs or fails is an :class:`EngineFailed` with
the end of that log.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from serving.probe import COMMAND, FOLDER, GO, Starts

HERE = Path(__file__).resolve().parent
TAIL = 4000
RELEASE = 0.5
"""Seconds in which the driver takes back the memory of a killed process."""
OLDER_NAMES = {
    "cuda_graph_bs_decode": "cuda_graph_bs",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "cuda_graph_bs_prefill": "piecewise_cuda_graph_tokens",
    "disable_prefill_cuda_graph": "disable_piecewise_cuda_graph",
}
"""Arguments of SGLang before its runner package."""


class EngineFailed(RuntimeError):
    """An engine did not start, answer or survive; carries the end of its log."""

    def __init__(self, role: str, what: str, log_tail: str = "") -> None:
        super().__init__(f"{role}: {what}")
        self.role = role
        self.log_tail = log_tail


class RequestFailed(RuntimeError):
    """The engine could not do one thing that it was told; it serves on."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start: ``args`` are the Engine's; ``settings`` None leaves SGLang untouched."""

    role: str
    engine: str
    args: dict[str, Any]
    settings: dict[str, Any] | None = None
    env: dict[str, str] | None = None


@dataclass(frozen=True)
class Sample:
    """One batch served from start to end."""

    tokens: list[list[int]]
    rounds: list[int]
    """Verify rounds of each request."""
    accepted: list[list[int]]
    """Per request: rounds by the number of drafts that were accepted."""
    seconds: float
    decode_seconds: float
    """From the last request's first token to the last token of all."""
    first_spread: float
    """Seconds between the requests' first tokens: 0 where one prefill batch held them all."""
    typical_round_ms: float = 0.0
    """Median of the times between the starts of two forwards of the scheduler: no stall counts."""

    @property
    def tok_s(self) -> float:
        """Tokens after the first of each request, over the decode time."""
        return sum(len(tokens) - 1 for tokens in self.tokens) / self.decode_seconds

    @property
    def round_ms(self) -> float:
        return 1e3 * self.decode_seconds / max(max(self.rounds), 1)

    @property
    def histogram(self) -> list[int]:
        width = max((len(row) for row in self.accepted), default=0)
        rows = [row + [0] * (width - len(row)) for row in self.accepted]
        return [sum(column) for column in zip(*rows, strict=True)]

    @property
    def accept_length(self) -> float:
        """Tokens per verify, the bonus token included."""
        histogram = self.histogram
        rounds = sum(histogram)
        return sum(n * count for n, count in enumerate(histogram, 1)) / rounds if rounds else 0.0


def write_site(folder: Path, hook: str) -> Path:
    """A ``sitecustomize`` to put on ``PYTHONPATH``: ``hook`` (``module:function``) is called with
    SGLang's scheduler module, on releases without plugins too.

    In a bare checkout the package comes as by its ``.pth`` where it is installed.
    """
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    road = (HERE.parents[1] / "sglang_verify_graphs.pth").read_text()
    (site / "sitecustomize.py").write_text(
        f"{road}\nfrom wrapt import register_post_import_hook\n"
        f"register_post_import_hook({hook!r}, 'sglang.srt.managers.scheduler')\n"
    )
    return site


def joined(turns: Sequence[Sample]) -> Sample:
    """The same batch served several times: the last one's tokens, and times that are means."""
    return replace(
        turns[-1],
        seconds=mean(turn.seconds for turn in turns),
        decode_seconds=mean(turn.decode_seconds for turn in turns),
        first_spread=max(turn.first_spread for turn in turns),
        typical_round_ms=median(turn.typical_round_ms for turn in turns),
    )


class EngineProcess:
    """The parent's handle. ``start`` imports, ``boot`` loads and captures, ``stop`` ends it all."""

    def __init__(self, spec: EngineSpec, folder: Path, port: int, cores: list[int]) -> None:
        self.spec = spec
        self._cores = cores
        self.folder = folder
        self.booted_in = 0.0
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._buffer = b""

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (GO, COMMAND):
            (self.folder / name).unlink(missing_ok=True)
        args = self.spec.args | {"port": self._port, "nccl_port": self._port + 500}
        spec = {"args": args, "settings": self.spec.settings, "cores": self._cores}
        (self.folder / "spec.json").write_text(json.dumps(spec))
        self._answers, child = os.pipe()
        with (self.folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serving.engines", str(self.folder), str(child)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(child,),
                env=self._environment(),
                start_new_session=True,
            )
        os.close(child)

    def _environment(self) -> dict[str, str]:
        site = write_site(self.folder, "serving.probe:load")
        env = dict(os.environ) | (self.spec.env or {})
        for name in ("SGLANG_VERIFY_GRAPHS", "SGLANG_PLUGINS"):
            env.pop(name, None)
        paths = [str(path) for path in (site, *HERE.parents[:2])]
        if before := env.get("PYTHONPATH"):
            paths.append(before)
        env["PYTHONPATH"] = os.pathsep.join(paths)
        return env | {FOLDER: str(self.folder), "PYTHONUNBUFFERED": "1"}

    def boot(self, timeout: float) -> dict[str, Any]:
        """Let it load and capture; returns its state once it can serve."""
        started = time.monotonic()
        (self.folder / GO).touch()
        try:
            self._receive(timeout)
        except RequestFailed as error:
            raise self._failed(str(error)) from None
        self.booted_in = time.monotonic() - started
        return self.state()

    def call(self, op: str, timeout: float = 120, **arguments: Any) -> Any:
        process = self._process
        assert process is not None, "start the engine first"
        assert process.stdin is not None, "the engine was given a pipe"
        try:
            process.stdin.write(json.dumps({"op": op} | arguments).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise self._failed(f"took no command ({error})") from None
        return self._receive(timeout)

    def state(self) -> dict[str, Any]:
        """What ``/server_info`` holds of the engine, of the plugin and of the probe."""
        return dict(self.call("state"))

    def command(self, do: str, **arguments: Any) -> Any:
        """Have the probe do something in the idle scheduler process."""
        path = self.folder / COMMAND
        path.with_suffix(".part").write_text(json.dumps({"do": do} | arguments))
        path.with_suffix(".part").rename(path)
        answer = self.state()["probe"]["answer"]
        if isinstance(answer, dict) and "error" in answer:
            raise RequestFailed(f"{self.spec.role}: {do}: {answer['error']}")
        return answer

    def warm(self, prompts: Path, rows: Sequence[int]) -> None:
        """Bring the prompts into the prefix cache, one at a time: the same KV in every engine."""
        self.call("warm", prompts=str(prompts), rows=list(rows), timeout=300)

    def generate(
        self, prompts: Path, rows: Sequence[int], max_new_tokens: int, timeout: float = 120
    ) -> Sample:
        """Serve these prompts as one batch."""
        wanted = {"prompts": str(prompts), "rows": list(rows), "max_new_tokens": max_new_tokens}
        starts = Starts(self.folder)
        before = starts.count
        served = self.call("generate", timeout, **wanted)
        rounds = [later - earlier for earlier, later in pairwise(starts.since(before))]
        return Sample(**served, typical_round_ms=median(rounds or [0]) / 1e6)

    def first_tokens(self, input_ids: list[list[int]]) -> list[int]:
        """The next token of each of these prompts."""
        return [int(t) for t in self.call("first_tokens", input_ids=input_ids)]

    def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)
        self._process = None
        time.sleep(RELEASE)

    def log_tail(self, size: int = TAIL) -> str:
        path = self.folder / "log.txt"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._answers], [], [], min(left, 1.0))[0]
            if ready:
                read = os.read(self._answers, 1 << 20)
                if not read:
                    raise self._failed("died")
                self._buffer += read
            elif left <= 0:
                raise self._failed(f"did not answer in {timeout:.0f} s")
            elif self._process is not None and self._process.poll() is not None:
                raise self._failed(f"exited with {self._process.returncode}")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RequestFailed(answer["error"])
        return answer["result"]

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(self.spec.role, what, self.log_tail())


# -- child -----------------------------------------------------------------------------------------


class Child:
    """The process that owns the ``sglang.Engine``."""

    def __init__(self, folder: Path) -> None:
        spec = json.loads((folder / "spec.json").read_text())
        os.sched_setaffinity(0, spec["cores"])
        if spec["settings"] is not None:
            import sglang_verify_graphs

            sglang_verify_graphs.enable(**spec["settings"])
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs

        self._engine = Engine(**_by_its_names(ServerArgs, spec["args"]))
        self._prompts: dict[str, list[list[int]]] = {}

    def state(self) -> dict[str, Any]:
        time.sleep(0.05)  # the scheduler may still be in the round after the last request's end
        info = self._engine.get_server_info()
        inner = info["internal_states"][0]
        return {
            "probe": inner["serve_probe"],
            "verify_graphs": inner.get("verify_graphs"),
            "memory": inner.get("memory_usage"),
            "startup": inner.get("startup_time"),
            "version": info["version"],
        }

    def warm(self, prompts: str, rows: list[int]) -> None:
        self._engine.flush_cache()
        for prompt in self._pick(prompts, rows):
            self.first_tokens([prompt])

    def first_tokens(self, input_ids: list[list[int]]) -> list[int]:
        outputs = self._engine.generate(input_ids=input_ids, sampling_params=_greedy(1))
        return [output["output_ids"][0] for output in outputs]

    def generate(self, prompts: str, rows: list[int], max_new_tokens: int) -> dict[str, Any]:
        batch = self._pick(prompts, rows)
        first, last = [0.0] * len(batch), [0.0] * len(batch)
        final: list[dict[str, Any]] = [{}] * len(batch)
        chunks = self._engine.generate(
            input_ids=batch, sampling_params=_greedy(max_new_tokens), stream=True
        )
        started = time.perf_counter()
        for chunk in chunks:
            now, at = time.perf_counter(), chunk.get("index", 0)
            first[at] = first[at] or now
            if chunk["meta_info"]["finish_reason"] is not None:
                last[at], final[at] = now, chunk
        ended = max(last)
        metas = [chunk["meta_info"] for chunk in final]
        return {
            "tokens": [list(chunk["output_ids"])[:max_new_tokens] for chunk in final],
            "rounds": [meta.get("spec_verify_ct", 0) for meta in metas],
            "accepted": [_accepted(meta) for meta in metas],
            "seconds": ended - started,
            "decode_seconds": max(ended - max(first), 1e-6),
            "first_spread": max(first) - min(first),
        }

    def _pick(self, prompts: str, rows: list[int]) -> list[list[int]]:
        if prompts not in self._prompts:
            self._prompts[prompts] = json.loads(Path(prompts).read_text())
        return [self._prompts[prompts][row] for row in rows]


def _by_its_names(server_args: Any, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments as this release calls them."""
    return {
        name if hasattr(server_args, name) else OLDER_NAMES.get(name, name): value
        for name, value in args.items()
    }


def _accepted(meta: dict[str, Any]) -> list[int]:
    """Rounds by accepted drafts; 0.5.9 and 0.5.10 have the second name alone."""
    return meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or []


def _greedy(max_new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def _die_with(parent: int) -> None:
    """An engine that outlives the benchmark, perhaps deep in its boot, would hold the GPU."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _serve(folder: Path, answers: int) -> None:
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    pipe = os.fdopen(answers, "wb")

    def say(**message: Any) -> None:
        pipe.write(json.dumps(message).encode() + b"\n")
        pipe.flush()

    try:
        child = Child(folder)
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}")
        os._exit(1)
    say(result=None)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            say(result=getattr(child, command.pop("op"))(**command))
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}")
    os._exit(0)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
