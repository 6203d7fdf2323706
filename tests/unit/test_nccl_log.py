"""What is read of NCCL's log, format by format, and that nothing in a file breaks the reading."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_verify_graphs.nccl.evidence import Choice, NcclLog
from sglang_verify_graphs.nccl.log import Process, read_log

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nccl"
INFO = "h:1:2 [0] NCCL INFO "
RING = "AllReduce: 8192 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}"


def read(text: str | bytes) -> dict[Process, NcclLog]:
    return read_log(io.BytesIO(text if isinstance(text, bytes) else text.encode()))


def fixture(name: str) -> dict[Process, NcclLog]:
    with (FIXTURES / name).open("rb") as stream:
        return read_log(stream)


def one(*messages: str) -> NcclLog:
    (log,) = read("".join(f"{INFO}{message}\n" for message in messages)).values()
    return log


def test_nccl_2_27_of_two_ranks_in_one_file() -> None:
    logs = fixture("nccl-2.27.log")
    assert list(logs) == [("alpha", 4101), ("alpha", 4102)]
    first, second = logs.values()
    assert first == NcclLog(
        version="2.27.3",
        read={
            "NCCL_CUMEM_ENABLE": "0",
            "NCCL_MIN_NCHANNELS": "8",
            "NCCL_P2P_LEVEL": "SYS",
            "NCCL_OOB_NET_IFNAME": "eth0",
            "NCCL_PROTO": "LL",
            "NCCL_ALGO": "allreduce:ring",
        },
        refused={
            "NCCL_BUFFSIZE": "Invalid value 99999999999999999999 for NCCL_BUFFSIZE, "
            "using default -2."
        },
        choices=(
            Choice("AllReduce", 8192, "RING", "LL", 2),
            Choice("AllGather", 607744, "RING", "LL", 12),
            Choice("AllReduce", 16384, "Symmetric", "AllReduce_AGxLL_R", 2),
        ),
        channels=12,
        transports=("P2P/IPC/read",),
        communicators=2,
    )
    assert second.read == {
        "NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_PROTO": "Simple"
    }  # fmt: skip
    assert list(second.refused) == [
        "NCCL_NTHREADS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_WORK_FIFO_BYTES"
    ]  # fmt: skip
    assert second.transports == ("SHM/direct/direct", "NET/IB/0/GDRDMA")
    assert (second.choices, second.channels, second.communicators) == ((), None, 1)


def test_nccl_2_30() -> None:
    (log,) = fixture("nccl-2.30.log").values()
    assert (log.version, log.channels, log.communicators) == ("2.30.7", 24, 1)
    assert log.read == {
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_PROTO": "^LL128",
        "NCCL_TUNER_PLUGIN": "none",
        "NCCL_CTA_POLICY": "EFFICIENCY",
        "NCCL_MIN_CTAS": "4",
        "NCCL_GRAPH_MIXING_SUPPORT": "0",
    }
    assert list(log.refused) == [
        "NCCL_OLD_KNOB", "NCCL_NETDEVS_POLICY", "NCCL_PROXY_CPUSET", "NCCL_SOCKET_MAGIC"
    ]  # fmt: skip
    assert log.choices == (
        Choice("AllReduce", 33554432, "NVLS", "SIMPLE", 16),
        Choice("AllReduce", 16384, "Symmetric", "AllReduce_RSxLDMC_AGxSTMC", 8),
        Choice("AllGather", 4096, "Copy Engine", "cudaMemcpy; CE synchronization with NVLS", 0),
        Choice("AlltoAll", 8192, "Copy Engine", "RMA proxy + CE", 0),
    )
    assert log.transports == ("P2P/CUMEM", "SHM/direct")
    assert log.unreadable == 0


def test_a_value_may_look_like_a_variable() -> None:
    log = one("Invalid value NCCL_NTHREADS for NCCL_BUFFSIZE, using default -2.")
    assert list(log.refused) == ["NCCL_BUFFSIZE"]


def test_the_last_word_counts() -> None:
    """A later communicator reads ``NCCL_PROTO`` again; it is not cached."""
    log = one("NCCL_PROTO set by environment to LL", "NCCL_PROTO set by environment to Simple")
    assert log.read == {"NCCL_PROTO": "Simple"}


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\xfe\x00garbage\n",
        b"h:1:2 [0] NCCL INFO NCCL_ALGO set by environment to \x1b[31mRing\n",
        b"h:1:2 [0] NCCL INFO AllReduce: 8192 Bytes -> Algo RI\n",
        b"h:1:2 [0] NCCL INFO NCCL_ALGO set byh:3:4 [1] NCCL INFO AllReduce: 1 Bytes\n",
        b"h:1:2 [0] NCCL INFO NCCL_ALGO set by environment to " + b"x" * 10000 + b"\n",
        b"h:1:2 [0] NCCL INFO NCCL_ALGO set by environment to Rin",
    ],
    ids=["bytes", "control", "cut", "torn", "long", "unfinished"],
)
def test_damage_is_counted_and_nothing_is_made_of_it(damaged: bytes) -> None:
    good = f"{INFO}{RING}\n".encode()
    (log,) = read(good + damaged).values()
    assert (log.unreadable, log.read, len(log.choices)) == (1, {}, 1)


def test_other_output_is_not_damage() -> None:
    log = read(f"loading weights: 50%\n\n{INFO}{RING}\n  AllReduce |  1  0\n")[Process("h", 1)]
    assert log.unreadable == 0


def test_memory_is_bounded() -> None:
    many = "".join(
        f"{INFO}{RING.replace('8192', str(n))}\n{INFO}NCCL_X{n} set by environment to 1\n"
        f"h{n}:1:1 [0] NCCL INFO hello\n"
        for n in range(5000)
    )
    logs = read(many)
    log = logs[Process("h", 1)]
    assert (len(logs), len(log.choices), len(log.read)) == (256, 4096, 512)
    assert log.unreadable == (5000 - 255) + (5000 - 4096) + (5000 - 512)


_PIECES = st.sampled_from(
    [INFO, RING, "\n", "h:1:2 [0] ", "NCCL INFO ", "NCCL WARN ", "NCCL_ALGO",
     " set by environment to ", " Bytes -> ", "[Symmetric]: ", "Invalid value ", "{0..", "-1",
     "9" * 30, "\x00", "é"]
)  # fmt: skip


@given(st.lists(_PIECES | st.text(max_size=9), max_size=60).map("".join) | st.binary(max_size=999))
def test_any_bytes_can_be_read(text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    for log in read(data).values():
        assert len(log.choices) + len(log.read) + log.communicators <= data.count(b"\n")
        assert all(name.startswith("NCCL_") for name in (*log.read, *log.refused))


@given(st.data())
def test_ranks_are_told_apart_however_their_lines_mix(data: st.DataObject) -> None:
    own = {
        pid: [f"h:{pid}:{pid} [0] NCCL INFO {RING.replace('8192', str(pid * 10 + n))}\n"
              for n in range(3)]
        for pid in (1, 2, 3)
    }  # fmt: skip
    mixed = data.draw(st.permutations([line for lines in own.values() for line in lines]))
    alone = {pid: read("".join(line for line in mixed if f"h:{pid}:" in line)) for pid in own}
    logs = read("".join(mixed))
    assert logs == {key: log for found in alone.values() for key, log in found.items()}
