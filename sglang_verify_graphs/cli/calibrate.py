"""``calibrate``: measures what every bucket of the user's own server costs, into ``costs.json``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_verify_graphs.cli.launch import LaunchedServer
from sglang_verify_graphs.cli.measure import Calibration, Unreachable
from sglang_verify_graphs.costs import PLAIN_DECODE, CostTable, read_costs
from sglang_verify_graphs.errors import CostsError
from sglang_verify_graphs.settings import FLAG


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the round costs of your server, for --verify-graph-costs",
        description="Starts the server once, measures each bucket and writes a table of costs. "
        "Goes on where an earlier run of the same server stopped. Exit 0 where the file holds "
        "costs, 1 on an error, 130 when interrupted.",
    )
    parser.add_argument("--out", type=Path, default=Path("costs.json"), metavar="FILE")
    parser.add_argument(
        "--minutes", type=_positive(float), metavar="M",
        help="stop after so long, start-up included, with what was measured (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens", type=_positive(int), default=512, metavar="N",
        help="length of the random prompts (default 512); costs grow with the context",
    )  # fmt: skip
    parser.add_argument(
        "server", nargs=argparse.REMAINDER, metavar="-- SERVER ARGUMENTS",
        help=f"of sglang.launch_server; {FLAG} is added",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    words = arguments.server[arguments.server[:1] == ["--"] :]
    deadline = time.monotonic() + 60 * (arguments.minutes or float("inf"))
    try:
        with _interrupts() as ignore:
            table = _calibrate(words, arguments.out, arguments.prompt_tokens, deadline, ignore)
    except CostsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what was measured", file=sys.stderr)
        return 130
    print(f"{len(table.rows)} round costs in {arguments.out}", file=sys.stderr)
    return 0 if table.rows else 1


def _calibrate(
    words: list[str], out: Path, prompt: int, deadline: float, ignore_interrupts: Any
) -> CostTable:
    before = _read_earlier(out)
    server = None
    try:
        server = LaunchedServer([*words, FLAG], out.with_suffix(".server.log"))
        server.wait_until_ready(deadline)
        return _measure_all(Calibration(server, prompt, deadline), out, before)
    finally:
        ignore_interrupts()
        if server is not None:
            server.stop()


def _read_earlier(out: Path) -> CostTable | None:
    try:
        return read_costs(out) if out.exists() else None
    except CostsError as error:
        raise CostsError(f"{error}; {out} is left as it is, give another --out") from None


def _measure_all(calibration: Calibration, out: Path, before: CostTable | None) -> CostTable:
    from tqdm import tqdm  # SGLang brings it

    if before is not None:
        try:
            before.check(calibration.key)
        except CostsError as error:
            raise CostsError(f"{out} is left as it is, give another --out: {error}") from None
    table = before or CostTable(calibration.key, ())
    known = {(row.batch, row.draft_steps) for row in table.rows}
    buckets = [(batch, k) for batch, steps in calibration.buckets.items() for k in steps]
    left_out: dict[int, str] = {}
    with tqdm(total=len(buckets), initial=len(known & {*buckets}), unit="bucket") as bar:
        for batch, steps in buckets:
            if (batch, steps) in known or batch in left_out:
                continue
            name = "plain decode" if steps == PLAIN_DECODE else f"{steps} steps"
            bar.set_description(f"batch {batch}, {name}")
            try:
                row = calibration.measure(batch, steps)
            except Unreachable as why:
                left_out[batch] = str(why)
                bar.write(f"batch {batch} is left out: {why}", file=sys.stderr)
                continue
            if row is None:
                bar.write("out of time; the same command goes on from here", file=sys.stderr)
                break
            rows = sorted((*table.rows, row), key=lambda row: (row.batch, row.draft_steps))
            table = CostTable(calibration.key, tuple(rows))
            write_whole(out, table.to_json())
            bar.update()
    return table


def write_whole(path: Path, text: str) -> None:
    """All of the text, or the file as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise CostsError(
            f"cannot write {path} ({error}); it is as it was, make room and run again"
        ) from None


@contextmanager
def _interrupts() -> Iterator[Any]:
    """SIGTERM and a closed terminal end the command as Ctrl-C does; gives a way to ignore more."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: old for n in numbers if (old := signal.getsignal(n)) != signal.SIG_IGN}

    def handle(handler: Any) -> None:
        for number in before:
            signal.signal(number, handler)

    handle(signal.default_int_handler)
    try:
        yield lambda: handle(signal.SIG_IGN)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse
