"""What is read of servers' logs; nothing in a file breaks the reading, and little of it is kept."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.cli.explain import explain
from sglang_verify_graphs.compat.serverlog import ServerLog, read_server_log
from sglang_verify_graphs.gate import Phase

FIXTURES = Path(__file__).parents[1] / "fixtures" / "logs"
LOGS = sorted(FIXTURES.glob("*.log"))
AT = b"[2026-11-30 09:00:00 TP0] "
DECODE = AT + b"Decode batch, #running-req: 4, #token: 9, accept len: 2.50, cuda graph: True, x\n"


def read(*files: bytes) -> ServerLog:
    log = ServerLog()
    for number, data in enumerate(files):
        read_server_log(log, io.BytesIO(data), f"{number}.log")
    return log


def fixture(name: str) -> bytes:
    return (FIXTURES / f"{name}.log").read_bytes()


def captured(log: ServerLog) -> dict[Phase, set[tuple[str, int]]]:
    found: dict[Phase, set[tuple[str, int]]] = {}
    for (rank, phase, width), capture in log.captures.items():
        if capture.end:
            found.setdefault(phase, set()).add((rank, width))
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "width", "ladder"),
    [
        ("0.5.9-tp8-fa3", [f"TP{n}" for n in range(8)], 0, {1, 2, 4, 8, 12, 16, 24}),
        ("0.5.13.post1-attention-dp", ["DP0 TP0", "DP1 TP1"], 0, {1, 2, 4, 8, 12, 16, 24, 32}),
        ("0.5.14-no-padding", [""], 4, {1, 2, 4}),
        ("0.5.17-stock-fine", ["TP0", "TP1"], 3, {1, 2, 3, 4, 5, 6}),
        ("0.5.23-stock-draft-extend", ["TP0", "TP1"], 3, {1, 2, 3, 4, 5, 6}),
    ],
)
def test_captures_of_every_format(
    name: str, ranks: list[str], width: int, ladder: set[int]
) -> None:
    log = read(fixture(name))
    assert captured(log)[Phase.VERIFY] == {(rank, width) for rank in ranks}
    assert log.ladder == ladder
    assert log.arguments["speculative_algorithm"].startswith("EAGLE")
    assert log.unreadable == 0


def test_rounds_are_counted_by_batch() -> None:
    log = read(fixture("0.5.9-tp8-fa3"))
    found = {size: (one.replayed, one.eager) for size, one in log.decodes.items()}
    assert found == {1: (1, 0), 8: (1, 0), 20: (1, 0), 24: (1, 0), 31: (0, 1), 32: (0, 1)}
    assert log.decodes[8].accepted == pytest.approx(2.58)


def test_the_last_start_in_a_file_counts() -> None:
    """Also of NCCL: processes of an earlier start are no ranks of this one."""
    first, last = fixture("0.5.17-nccl-one-rank"), fixture("0.5.17-stock-tiny-ladder")
    both, alone = read(first + last), read(last)
    assert both.lines == alone.lines + first.count(b"\n")
    assert (both.ladder, both.nccl) == (alone.ladder, {})
    assert [sum(d.eager for d in log.decodes.values()) for log in (both, alone)] == [2, 2]
    other = fixture("0.5.17-node1")
    assert set(read(other, first + last).ranks) == {*alone.ranks, "TP2", "TP3"}


def test_what_users_wrote_is_no_fact() -> None:
    said = b"Receive: obj=GenerateReqInput(text='" + DECODE[:-1] + AT + b"[verify-graphs] off')\n"
    log = read(AT + said, b"text='[verify-graphs] off: no'\n", b"Error: graph failed: no\n")
    assert (log.recognised, log.proofs, log.decodes) == (0, {}, {})


@pytest.mark.parametrize(
    "damaged",
    [
        DECODE[:60] + b"\n",
        DECODE[:60],
        DECODE.replace(b"#token", b"\xff\xfe"),
        DECODE.replace(b"#token", b"\0"),
        DECODE[:50] + b"x" * (1 << 20) + b"\n",
        DECODE[:50] + DECODE,
        b'{"internal_states": [{"verify_graphs": {"phases": {"verify": [' + b"[" * 9999 + b"\n",
    ],
    ids=["torn", "unfinished", "bytes", "nul", "long", "interleaved", "json"],
)
def test_damage_is_counted_and_nothing_is_made_of_it(damaged: bytes) -> None:
    log = read(DECODE + damaged)
    assert log.unreadable == 1
    assert log.decodes[4].replayed == (2 if damaged.count(AT) == 2 else 1)


class _Generated(io.RawIOBase):
    """A stream that is never whole in memory."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines, self._rest = lines, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._lines, b"")
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def _distinct(count: int) -> Iterator[bytes]:
    """Lines of every kind, no two alike, each naming as much as it can."""
    wide = ", ".join(str(n) for n in range(9000000, 9000999)).encode()
    yield AT + b"server_args=x(attention_backend=%s)\n" % (b"9" * 900_000)
    said = AT + b"[verify-graphs] "
    for n in range(count):
        yield b"[2026-11-30 09:00:00 DP%d] hello\n" % n
        yield AT + b"Decode batch, #running-req: %d, cuda graph: False, %s\n" % (n, b"y" * 900)
        begin = b"[2026-11-30 09:00:00 TP%d] Capture target verify CUDA graph begin. " % (n % 9)
        yield begin + b"num_tokens_per_req=%d, bs=[%s, %d]\n" % (n, wide, n)
        yield begin.replace(b"begin", b"end") + b"bs=[%d]\n" % n
        yield AT + b"Built adaptive runtime state steps=%d:\n" % (n % 1000)
        yield AT + b"Scheduler hit an exception: %d\nX%dError: %s\n" % (n, n, b"z" * 900)
        yield said + b"a verify ran eager: %s\n" % bytes(65 + int(d) for d in str(n))
        yield said + b"%d 1 %d %s 1 1 1\n" % (n % 1000, n, b"g" * 190)
        yield said + b"off: %d %s\n" % (n, b"o" * 900)
        yield b"h:%d:1 [0] NCCL INFO NCCL_X%d set by environment to %d\n" % (n % 99, n, n)
        answer = {"phases": {"verify": {"reasons": {f"R{n}": 1}}}, "other": "x" * 900}
        yield json.dumps({"internal_states": [{"verify_graphs": answer}]}).encode() + b"\n"


def test_what_is_kept_does_not_grow_with_the_file() -> None:
    sizes = []
    for count in (3000, 6000):
        log = ServerLog()
        read_server_log(log, io.BufferedReader(_Generated(_distinct(count))), "big.log")
        assert log.lines == 12 * count + 1
        assert log.unreadable > count - 2048
        nccl, log.nccl = log.nccl, {}  # bounded by read_log, which has its own test
        assert len(nccl) == 99
        sizes.append(len(pickle.dumps(log)))
    assert sizes[1] < sizes[0] + 2000 < 2_400_000


_PIECES = st.sampled_from(
    [AT, DECODE, b"\n", b"\r", b"\0", b"\xff", b"server_args=(", b"speculative_num_steps=x1, ",
     b"disable_cuda_graph_padding=True", b"Capture cuda graph bs [1", b"Capture draft extend ",
     b"cuda graph end bs=[9999999, 2]", b"[verify-graphs] ", b"MEMORY_BUDGET; ", b"9" * 5000,
     b"a verify ran eager: X", b'{"internal_states": [{"verify_graphs": ', b"{}}]}", b'"\n',
     b"h:1:2 [0] NCCL INFO NCCL_ALGO set by environment to ", b"Scheduler hit an exception: "]
)  # fmt: skip


@given(st.lists(_PIECES | st.binary(max_size=20), max_size=40).map(b"".join))
def test_any_bytes_can_be_explained(data: bytes) -> None:
    log = read(data, data)
    assert log.unreadable <= 2 * data.count(AT) + log.lines
    assert all(finding.answer for finding in explain(log))


_CUTS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=9)


@given(st.sampled_from(LOGS), st.sampled_from(LOGS), _CUTS)
def test_fixtures_cut_and_mixed_can_be_explained(
    first: Path, second: Path, cuts: list[tuple[int, int]]
) -> None:
    mixed, one, other = b"", first.read_bytes(), second.read_bytes()
    for of_one, of_other in cuts:
        mixed += one[:of_one] + other[:of_other]
        one, other = one[of_one:], other[of_other + 9 :]
    data = mixed + one + other
    log = read(data)
    assert log.lines == data.count(b"\n") + (not data.endswith(b"\n"))
    for finding in explain(log):
        assert finding.wrong is not True or finding.proof
        assert all(1 <= line.number <= log.lines for line in finding.proof)
