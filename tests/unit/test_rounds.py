"""Round times: start to start of two consecutive like rounds, and nothing else."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sglang_verify_graphs import rounds
from sglang_verify_graphs.rounds import RoundTimer

RING = rounds._RING


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


class Server:
    """Starts rounds; every target forward moves the pass counter."""

    def __init__(self, clock: Clock, timer: RoundTimer) -> None:
        self.clock = clock
        self.timer = timer
        self.passes = 0

    def round(self, batch: int, steps: int, ms: float) -> None:
        self.timer.start(batch, steps, self.passes)
        self.passes += 1
        self.clock.now += ms / 1e3

    def prefill(self, ms: float) -> None:
        self.passes += 1
        self.clock.now += ms / 1e3

    def flush(self) -> dict[str, dict[str, float]]:
        """Rounds of a key of their own push the others out of the ring."""
        for _ in range(RING):
            self.round(999, 0, 1.0)
        found = self.timer.snapshot()
        found.pop("999x0", None)
        return found


@pytest.fixture
def server(clock: Clock) -> Server:
    return Server(clock, RoundTimer("cpu"))


def test_like_rounds(server: Server) -> None:
    for ms in (10.0, 20.0, 30.0):
        server.round(4, 3, ms)
    # The last one is followed by a round of another key.
    assert server.flush() == {"4x3": {"rounds": 2, "mean_ms": 15.0, "least_ms": 10.0}}


def test_a_switch_ends_a_run(server: Server) -> None:
    server.round(4, 3, 10.0)
    server.round(4, 1, 10.0)
    server.round(4, 3, 10.0)
    assert server.flush() == {}


def test_another_batch_ends_a_run(server: Server) -> None:
    server.round(4, 3, 10.0)
    server.round(5, 3, 10.0)
    server.round(4, 3, 10.0)
    assert server.flush() == {}


def test_a_prefill_between_is_not_counted(server: Server) -> None:
    server.round(4, 3, 10.0)
    server.prefill(500.0)
    server.round(4, 3, 10.0)
    server.round(4, 3, 10.0)
    assert server.flush() == {"4x3": {"rounds": 1, "mean_ms": 10.0, "least_ms": 10.0}}


def test_many_rounds(server: Server) -> None:
    for number in range(1000):
        server.round(4, 3, 5.0 if number % 2 else 7.0)
    found = server.flush()["4x3"]
    assert found["rounds"] == 999
    assert found["mean_ms"] == pytest.approx(6.0, abs=0.01)
    assert found["least_ms"] == pytest.approx(5.0)


def test_a_round_that_just_ended_is_not_in_yet(server: Server) -> None:
    for _ in range(RING):
        server.round(4, 3, 5.0)
    assert server.timer.snapshot() == {}


class Event:
    """A CUDA event that is ready some rounds after it was recorded."""

    late = False
    clock: Clock
    queries: int = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.time = 0.0

    def record(self) -> None:
        self.time = self.clock.now

    def query(self) -> bool:
        type(self).queries += 1
        return not self.late

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.time - self.time)

    def synchronize(self) -> None:
        raise AssertionError("the hot path must not wait")


@pytest.fixture
def gpu_server(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Server:
    event = type("CudaEvent", (Event,), {"clock": clock})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=event)))
    server = Server(clock, RoundTimer("cuda"))
    server.event = event
    return server


def test_events(gpu_server: Server) -> None:
    for ms in (10.0, 20.0, 30.0):
        gpu_server.round(4, 3, ms)
    assert gpu_server.flush() == {"4x3": {"rounds": 2, "mean_ms": 15.0, "least_ms": 10.0}}


def test_late_events_are_dropped(gpu_server: Server) -> None:
    gpu_server.event.late = True
    for _ in range(3 * RING):
        gpu_server.round(4, 3, 10.0)
    assert gpu_server.timer.snapshot() == {}
    assert gpu_server.event.queries > 0
