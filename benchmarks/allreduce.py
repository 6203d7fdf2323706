"""Time all-reduces of decode and verify sizes under several NCCL settings, on the GPUs of one host.

NCCL reads its environment once a communicator, so each setting is a process group of its own. All
groups are resident together and measured in turn, through SGLang's own ``GroupCoordinator``: with
custom all-reduce off (NCCL carries everything), and with it on, which says what NCCL carries at
all. ``README.md`` says what the figures mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from sglang_verify_graphs.nccl.profiles import PROFILES  # noqa: E402

DEFAULT, AGAIN = "default", "default again"
"""The second is another group of the same setting: differences up to its are noise."""
SERVER_ENV = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}
"""What SGLang gives every server by default (0.5.17 entrypoints/engine.py:1583-1600)."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""NVLink multicast stays off: a process that dies with it can take a shared host's GPUs along."""
WIDESPREAD = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}
"""Advice often given for slow verifies on PCIe machines."""
CAPTURED_WITH, CHANGED_TO = {"NCCL_PROTO": "Simple"}, {"NCCL_PROTO": "LL"}
LARGEST_ASKED = 256 << 20
"""Bytes up to which custom all-reduce is asked whether it takes a message."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a run: a host with GPUs, or the smoke test of the code path."""

    device: str
    world: int
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    calls: int
    """All-reduces in a graph, each on its own tensor, as the layers of a model make them."""
    repeats: int
    rounds: int
    """Samples of each setting, taken in turn."""
    start_timeout: float

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(hidden, tokens) for hidden in self.hidden for tokens in self.tokens]


def scale(smoke: bool, world: int) -> Scale:
    if smoke:
        return Scale("cpu", world, (64,), (1, 4), 4, 2, 3, 500)
    return Scale("cuda", world, (4096, 7168), (1, 2, 4, 8, 16, 32), 32, 10, 9, 160)


# -- a rank ----------------------------------------------------------------------------------------


class Rank:
    """One rank of one setting, in a process of its own."""

    def __init__(self, rank: int, sizes: Scale, port: int, custom: bool) -> None:
        import torch
        from sglang.srt.distributed import parallel_state

        self._torch, self._sizes, self._rank = torch, sizes, rank
        if sizes.device == "cuda":
            from sglang.srt.utils import monkey_patch_p2p_access_check

            torch.cuda.set_device(rank)
            monkey_patch_p2p_access_check()  # as every server does, unless --enable-p2p-check
        parallel_state.set_custom_all_reduce(custom)
        parallel_state.init_distributed_environment(
            world_size=sizes.world,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="nccl" if sizes.device == "cuda" else "gloo",
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=sizes.world)
        self._group = parallel_state.get_tp_group()
        self._runs: dict[str, Callable[[], Any]] = {}
        self._kept: list[Any] = []
        largest = max(hidden * tokens for hidden, tokens in sizes.sizes)
        self._inputs = [
            torch.randn(largest, generator=torch.Generator().manual_seed(one))
            .to(torch.bfloat16)
            .to(self._group.device)
            for one in range(sizes.world)
        ]
        self._warm_up()
        gc.freeze()  # every capture collects garbage; what is imported stays anyway

    def facts(self) -> dict[str, Any]:
        group, kind = self._group, None
        if group.ca_comm is not None and not group.ca_comm.disabled:
            kind = type(group.ca_comm).__name__
        nccl = getattr(group.pynccl_comm, "nccl", None)
        return {"custom": kind, "nccl_version": nccl and nccl.ncclGetVersion()}

    def prepare(self, key: str, elements: int, graph: bool, custom: bool) -> dict[str, Any]:
        """Make ``key`` runnable, run it once and check the sums; says who carries the message."""
        with self._custom_all_reduce(custom):
            if graph and self._sizes.device == "cuda":
                run, outputs, facts = self._capture(elements)
                run()
            else:
                tensors, facts = self._tensors(elements), self._carrier(elements, graph=False)
                run = lambda: self._all_reduce_all(tensors)  # noqa: E731
                outputs = run()
        self._check(outputs, elements)
        self._runs[key] = run
        return facts

    def sample(self, key: str, custom: bool) -> float:
        """Microseconds of one all-reduce, the mean of many."""
        torch, run, repeats = self._torch, self._runs[key], self._sizes.repeats
        torch.distributed.barrier(group=self._group.cpu_group)
        with self._custom_all_reduce(custom):
            run()  # also a barrier of the GPUs
            if self._sizes.device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(repeats):
                    run()
                end.record()
                end.synchronize()
                seconds = start.elapsed_time(end) / 1e3
            else:
                started = time.perf_counter()
                for _ in range(repeats):
                    run()
                seconds = time.perf_counter() - started
        return float(1e6 * seconds / (repeats * self._sizes.calls))

    def captured_graph(self, elements: int, change: dict[str, str]) -> dict[str, Any]:
        """Capture, change the environment, replay; then the same on a new communicator."""
        from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

        wanted = f"AllReduce: {2 * elements} Bytes"
        log = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
        seen = 0

        def choices() -> list[str]:
            nonlocal seen
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            new, seen = lines[seen:], len(lines)
            return sorted({line.partition("NCCL INFO ")[2] for line in new if wanted in line})

        def samples(*keys: str) -> list[float]:
            taken = [[self.sample(key, False) for key in keys] for _ in range(self._sizes.rounds)]
            return [round(statistics.median(column), 3) for column in zip(*taken, strict=True)]

        def capture(key: str) -> list[str]:
            choices()
            self.prepare(key, elements, True, False)
            return choices()

        found: dict[str, Any] = {"at_capture": capture("old")}
        found["us_before_change"] = samples("old")[0]
        found["at_replay"] = choices()
        os.environ.update(change)
        found["us_after_change"] = samples("old")[0]
        found["at_replay_after_change"] = choices()
        found["new_graph_same_communicator"] = capture("same communicator")
        self._kept.append(self._group.pynccl_comm)
        self._group.pynccl_comm = PyNcclCommunicator(self._group.cpu_group, self._group.device)
        found["new_graph_new_communicator"] = capture("new communicator")
        old, new = samples("old", "new communicator")
        return found | {"us_old_graph_in_turn": old, "us_new_communicator_in_turn": new}

    def _capture(self, elements: int) -> tuple[Callable[[], Any], list[Any], dict[str, Any]]:
        torch, tensors = self._torch, self._tensors(elements)
        graph = torch.cuda.CUDAGraph()
        with self._group.graph_capture() as context:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=context.stream):
                facts = self._carrier(elements, graph=True)
                outputs = self._all_reduce_all(tensors)
        torch.cuda.synchronize()
        self._kept.append(tensors)  # the graph reads and writes them
        return graph.replay, outputs, facts

    def _tensors(self, elements: int) -> list[Any]:
        own = self._inputs[self._rank][:elements]
        return [own.clone() for _ in range(self._sizes.calls)]

    def _all_reduce_all(self, tensors: list[Any]) -> list[Any]:
        # NCCL sums in place, so values grow from call to call; its time does not depend on them.
        return [self._group.all_reduce(tensor) for tensor in tensors]

    def _warm_up(self) -> None:
        """First use of each eager path: what it loads stays out of captures and samples."""
        for custom in (True, False):
            with self._custom_all_reduce(custom):
                self._check(self._all_reduce_all(self._tensors(16)), 16)

    def _check(self, outputs: list[Any], elements: int) -> None:
        torch = self._torch
        wanted = sum(tensor[:elements].float() for tensor in self._inputs)
        for output in outputs:
            error = torch.linalg.norm(output.float() - wanted) / torch.linalg.norm(wanted)
            if not error < 1e-2:
                raise RuntimeError(f"an all-reduce of {elements} elements is off by {error:.1e}")

    def _carrier(self, elements: int, *, graph: bool) -> dict[str, Any]:
        """Who carries a message of this size, and up to which size custom all-reduce does."""
        torch, group, custom = self._torch, self._group, self._group.ca_comm
        own = self._inputs[self._rank][:elements]
        method = group._resolve_outplace_all_reduce_method(own)
        fallback = "pynccl" if graph else "torch.distributed"
        facts: dict[str, Any] = {"carrier": type(custom).__name__ if method == "ca" else fallback}
        if method == "ca":
            low, high = 2 * elements, LARGEST_ASKED
            while high - low > 16:
                middle = (low + high) // 32 * 16
                asked = torch.empty(middle // 2, dtype=torch.bfloat16, device="meta")
                low, high = (middle, high) if custom.should_custom_ar(asked) else (low, middle)
            facts["up_to_bytes"] = low
        return facts

    @contextmanager
    def _custom_all_reduce(self, on: bool) -> Iterator[None]:
        custom = self._group.ca_comm
        if custom is None or custom.disabled:
            yield
            return
        custom.disabled = not on
        try:
            yield
        finally:
            custom.disabled = False


def _serve(pipe: Connection, log: str, rank: int, sizes: Scale, port: int, custom: bool) -> None:
    """A process: builds its rank, then answers until the pipe closes."""
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    one = None
    try:
        one = Rank(rank, sizes, port, custom)
        pipe.send(("up", one.facts()))
        while True:
            op, arguments = pipe.recv()
            pipe.send((op, getattr(one, op)(**arguments)))
    except EOFError:
        pass
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    os._exit(0)  # NCCL's teardown waits for peers that may be gone


# -- the groups ------------------------------------------------------------------------------------


class Group:
    """All ranks of one setting."""

    def __init__(
        self, name: str, env: Mapping[str, str], sizes: Scale, folder: Path, *, custom: bool = False
    ) -> None:
        self.name, self._sizes = name, sizes
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        slug = name.replace(" ", "-")
        self._logs = [folder / f"{slug}-{rank}.txt" for rank in range(sizes.world)]
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        kept = dict(os.environ)
        os.environ.update(SERVER_ENV | dict(env) | NO_MULTICAST)
        # Nothing is broadcast here, and a killed process would leave its shared memory behind.
        os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
        try:
            for rank, log in enumerate(self._logs):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, str(log), rank, sizes, port, custom), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(kept)

    def wait(self) -> dict[str, Any]:
        """Facts of rank 0 once all are up."""
        return dict(self._receive(self._sizes.start_timeout)[0])

    def ask(self, op: str, **arguments: Any) -> list[Any]:
        """Each rank's answer."""
        for pipe in self._pipes:
            pipe.send((op, arguments))
        return self._receive(60)

    def sample(self, key: str, *, custom: bool = False) -> float:
        """Microseconds; an all-reduce ends when the slowest rank has it."""
        return float(max(self.ask("sample", key=key, custom=custom)))

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self, timeout: float) -> list[Any]:
        deadline, answers = time.monotonic() + timeout, []
        for pipe, log in zip(self._pipes, self._logs, strict=True):
            try:
                arrived = pipe.poll(max(deadline - time.monotonic(), 0))
                op, answer = pipe.recv() if arrived else ("error", f"no answer in {timeout:.0f} s")
            except EOFError:
                op, answer = "error", "died"
            if op == "error":
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name}, {log.stem}: {answer}\n{tail}")
            answers.append(answer)
        return answers


# -- measurements ----------------------------------------------------------------------------------


def settings(wanted: Sequence[str], *, smoke: bool) -> dict[str, dict[str, str]]:
    """Settings by name: the default twice, the package's profiles, and ``NAME: KEY=VALUE ...``."""
    found: dict[str, dict[str, str]] = {DEFAULT: {}, AGAIN: {}}
    if not smoke:
        found["widespread"] = WIDESPREAD
        found |= {name: dict(profile.values) for name, profile in PROFILES.items()}
    for text in wanted:
        name, _, values = text.partition(":")
        found[name] = dict(pair.split("=", 1) for pair in values.split())
    return found


def measure(sizes: Scale, chosen: Mapping[str, Mapping[str, str]], folder: Path) -> dict[str, Any]:
    """Every size under every setting, in a graph and eager, the settings in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        groups = []
        for name, env in chosen.items():
            groups.append(Group(name, env, sizes, folder, custom=name == DEFAULT))
            stack.callback(groups[-1].stop)
        facts, *_ = [group.wait() for group in groups]
        found: dict[str, Any] = {
            "nccl": facts["nccl_version"],
            "settings": {name: dict(env) for name, env in chosen.items()},
            "multicast": False,
            "custom_all_reduce": {"kind": facts["custom"]},
            "allreduce": [],
            "dispatch": [],
        }
        for graph in (True, False):
            for hidden, tokens in sizes.sizes:
                _measure_size(found, groups, sizes, hidden, tokens, graph)
    return found


def _measure_size(
    found: dict[str, Any], groups: list[Group], sizes: Scale, hidden: int, tokens: int, graph: bool
) -> None:
    elements = hidden * tokens
    row = {"bytes": 2 * elements, "hidden": hidden, "tokens": tokens, "graph": graph}
    first, key, own = groups[0], f"{elements}/{graph}", f"{elements}/{graph}/dispatch"
    carriers = [
        group.ask("prepare", key=key, elements=elements, graph=graph, custom=False)[0]["carrier"]
        for group in groups
    ]
    dispatch = first.ask("prepare", key=own, elements=elements, graph=graph, custom=True)[0]
    samples: dict[str, list[float]] = {group.name: [] for group in groups}
    dispatched: list[float] = []
    for turn in range(sizes.rounds):
        for group in groups[:: 1 if turn % 2 == 0 else -1]:
            samples[group.name].append(group.sample(key))
        dispatched.append(first.sample(own, custom=True))
    for group, carrier in zip(groups, carriers, strict=True):
        times = {"us": _median(samples[group.name]), "us_samples": _rounded(samples[group.name])}
        found["allreduce"].append(row | {"profile": group.name, "carrier": carrier} | times)
    if (limit := dispatch.pop("up_to_bytes", None)) is not None:
        found["custom_all_reduce"]["graph_bytes" if graph else "eager_bytes"] = limit
    times = {"us": _median(dispatched), "us_samples": _rounded(dispatched)}
    found["dispatch"].append(row | dispatch | times)


def captured_graph(sizes: Scale, folder: Path) -> dict[str, Any]:
    """Whether a captured graph keeps the algorithm of capture time, and what NCCL logged."""
    folder.mkdir(parents=True, exist_ok=True)
    debug = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "ENV,TUNING",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%p.log"),
    }
    elements = sizes.hidden[0] * sizes.tokens[-1]
    group = Group("captured graph", CAPTURED_WITH | debug, sizes, folder)
    try:
        facts = group.wait()
        evidence = group.ask("captured_graph", elements=elements, change=CHANGED_TO)[0]
    finally:
        group.stop()
    replayed = evidence["at_replay"] + evidence["at_replay_after_change"]
    return {
        "nccl": facts["nccl_version"],
        "bytes": 2 * elements,
        "captured_with": CAPTURED_WITH,
        "changed_to": CHANGED_TO,
        # NCCL logs its choice where it makes one: a replay that logs none makes none.
        "keeps_algorithm": not replayed if evidence["at_capture"] else "unknown",
        "new_communicator_differs": (
            evidence["at_capture"] != evidence["new_graph_new_communicator"]
            if evidence["at_capture"]
            else "unknown"
        ),
        **evidence,
    }


def _median(samples: list[float]) -> float:
    return round(statistics.median(samples), 3)


def _rounded(samples: list[float]) -> list[float]:
    return [round(sample, 3) for sample in samples]


def table(found: Mapping[str, Any]) -> str:
    """Microseconds for the terminal: a row a size, a column a setting, SGLang's dispatch last."""
    names = list(found["settings"])
    custom = found["custom_all_reduce"]
    lines = [
        f"NCCL {found['nccl']}, microseconds; custom all-reduce {custom['kind']}: up to "
        f"{custom.get('graph_bytes')} bytes in a graph, {custom.get('eager_bytes')} eager",
        f"{'bytes':>8} {'':<6}" + "".join(f"{name:>15}" for name in [*names, "dispatch", "by"]),
    ]
    of = {(row["bytes"], row["graph"], row["profile"]): row["us"] for row in found["allreduce"]}
    for row in found["dispatch"]:
        size, graph = row["bytes"], row["graph"]
        times = [*(of[size, graph, name] for name in names), row["us"]]
        lines.append(
            f"{size:>8} {'graph' if graph else 'eager':<6}"
            + "".join(f"{us:>15.2f}" for us in times)
            + f"  {row['carrier']}"
        )
    return "\n".join(lines)


def captured_line(found: Mapping[str, Any]) -> str:
    return (
        f"captured graph keeps its algorithm: {found['keeps_algorithm']}; at capture "
        f"{found['at_capture']}, at replay {found['at_replay_after_change']}, new communicator "
        f"{found['new_graph_new_communicator']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2, help="GPUs, from the first visible one")
    parser.add_argument("--state", type=Path, default=Path("allreduce"), help="folder of this run")
    parser.add_argument("--setting", action="append", default=[], help="'NAME: KEY=VALUE ...'")
    parser.add_argument("--smoke", action="store_true", help="the code path, on a CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        from tests.engine.worker import STANDINS, engine_env

        os.environ.update(engine_env())
        sys.path.insert(0, str(STANDINS))  # processes that are spawned get this list
    sizes = scale(arguments.smoke, arguments.world)
    state = arguments.state.resolve()
    found = measure(sizes, settings(arguments.setting, smoke=arguments.smoke), state)
    found["captured_graph"] = captured_graph(sizes, state)
    (state / "allreduce.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(captured_line(found["captured_graph"]))


if __name__ == "__main__":
    main()
