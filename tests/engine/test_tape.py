"""The graph stand-in is as strict as a graph: each of these would be a fault on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from tests.engine.worker import STANDINS

sys.path.insert(0, str(STANDINS))

from sglang_cpu_engine.tape import CaptureError, StaleGraphError, Tape

pytestmark = pytest.mark.engine


def test_replay_reads_the_static_input_and_overwrites_its_output() -> None:
    static = torch.tensor([1.0, 2.0])
    tape = Tape(lambda: (static * 2).relu() + 1)
    first = tape.replay()
    assert first.tolist() == [3.0, 5.0]
    static.copy_(torch.tensor([10.0, -4.0]))
    assert tape.replay() is first
    assert first.tolist() == [21.0, 1.0]


def test_writes_through_views_are_replayed() -> None:
    cache = torch.zeros(4, 2)
    slot, value = torch.tensor([1]), torch.ones(1, 2)

    def write() -> torch.Tensor:
        cache[slot] = value
        cache[2:].view(-1)[:1].add_(5)
        return cache.sum(1)

    tape = Tape(write)
    cache.zero_()
    slot.fill_(3)
    assert tape.replay().tolist() == [0.0, 0.0, 5.0, 2.0]


def test_python_is_baked_in() -> None:
    steps = [1, 2]
    static = torch.zeros(1)
    tape = Tape(lambda: static + sum(steps))
    steps.append(100)
    assert tape.replay().item() == 3


def test_a_replaced_buffer_is_not_seen() -> None:
    holder = {"buffer": torch.ones(2)}
    kept = holder["buffer"]
    tape = Tape(lambda: holder["buffer"] + 1)
    holder["buffer"] = torch.full((2,), 9.0)
    assert tape.replay().tolist() == [2.0, 2.0]
    assert kept.tolist() == [1.0, 1.0]


def test_a_freed_buffer_is_refused() -> None:
    holder = {"buffer": torch.ones(2)}
    tape = Tape(lambda: holder["buffer"] + 1)
    tape.replay()
    holder["buffer"] = torch.ones(2)
    with pytest.raises(StaleGraphError, match="freed"):
        tape.replay()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: bool(x[0] > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
    ],
)
def test_reading_values_on_the_host_is_refused(read: Callable[[torch.Tensor], object]) -> None:
    static = torch.ones(3)
    with pytest.raises(CaptureError):
        Tape(lambda: read(static))


def test_an_operator_with_nothing_to_return_is_replayed() -> None:
    import sgl_kernel

    assert sgl_kernel.verify_tree_greedy_cpu  # registers torch.ops.cpu_engine
    q = torch.ones(1, 2, 4)
    keys, values, out = torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), torch.zeros(1, 2, 4)
    new_value = torch.ones(1, 2, 4)
    table, row, length = torch.tensor([[1, 2]]), torch.tensor([0]), torch.tensor([1])

    def decode() -> None:
        torch.ops.cpu_engine.decode_attention(
            q, keys, values, out, q, new_value, table[0, :1], table, row, length, 1.0
        )

    tape = Tape(decode)
    new_value.fill_(7)
    tape.replay()
    assert values[1].eq(7).all()
    assert out.eq(7).all()
