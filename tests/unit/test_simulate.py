"""The simulator: its world, and the bound that it is there to show, on short traces."""

from __future__ import annotations

import pytest

from benchmarks.simulate import Run
from benchmarks.simulation.engines import Measured, Oracle, Static
from benchmarks.simulation.world import HARDWARE, PROFILES, STEPS, Profile, Trace, traces

NAMES = [hardware.name for hardware in HARDWARE]


def short(hardware_name: str, trace: int = 0) -> tuple[float, Trace]:
    hardware = HARDWARE[NAMES.index(hardware_name)]
    total_ms = 6000 * hardware.plain(hardware.max_batch // 4)
    return total_ms, traces(hardware, total_ms, seed=5)[trace]


def test_costs_pass_through_the_measured_points() -> None:
    dense, moe, pcie = HARDWARE
    assert [dense.plain(b) for b in (1, 8, 32)] == [4.78, 5.06, 6.70]
    assert [round(dense.round(b, 3), 6) for b in (1, 8, 32)] == [6.84, 8.53, 16.6]
    assert (pcie.plain(1), pcie.round(1, 2)) == (12.0, 29.0)
    even = [moe.round(b, 3) / moe.plain(b) for b in (1, 8, 32)]
    assert even[1] > even[0]
    assert even[1] > even[2]


@pytest.mark.parametrize("trace", range(3))
def test_batches_stay_in_reach(trace: int) -> None:
    total_ms, made = short("8B on H200", trace)
    batches = [made.batch(total_ms * at / 500) for at in range(500)]
    assert set(batches) <= set(range(1, 49))
    assert len(set(batches)) > 5


def test_the_oracle_is_not_beaten_by_fixed_steps() -> None:
    hardware = HARDWARE[2]
    total_ms, trace = short(hardware.name)
    run = Run(hardware, trace, PROFILES[1], total_ms, seed=1)
    best = run.serve(Oracle(hardware, run.chain)).tok_s
    for steps in STEPS:
        fixed = Run(hardware, trace, PROFILES[1], total_ms, seed=1).serve(Static(steps))
        assert fixed.tok_s <= 1.01 * best


@pytest.mark.parametrize("name", NAMES)
def test_ours_stays_near_the_oracle_start_included(name: str) -> None:
    hardware = HARDWARE[NAMES.index(name)]
    total_ms, trace = short(name)
    profile = Profile("changes", lambda when: 0.8 if when < 0.5 else 0.4)
    run = Run(hardware, trace, profile, total_ms, seed=1)
    best = run.serve(Oracle(hardware, run.chain)).tok_s
    ours = Run(hardware, trace, profile, total_ms, seed=1)
    assert ours.serve(Measured(hardware.max_batch, 3)).tok_s >= 0.95 * best
