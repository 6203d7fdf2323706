"""Start-up: ranks that differ do not serve, and what cannot be had is refused with its reason."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_verify_graphs.buckets import CapturePlan, plan_capture
from sglang_verify_graphs.compat.preflight import Row, State
from sglang_verify_graphs.control import MODE, STEPS
from sglang_verify_graphs.costs import CostRow, CostTable
from sglang_verify_graphs.errors import AttestationError
from sglang_verify_graphs.settings import Settings
from sglang_verify_graphs.startup import (
    MEETING_SECONDS,
    Report,
    _attest,
    _capture,
    _costs,
    _meet,
)
from sglang_verify_graphs.support import ServerFacts
from tests.unit.test_controller import KEY, Engine, Served

FACTS = ServerFacts("EAGLE3", 1, 3, 4, 8, tp_size=2)


class Ranks:
    """An engine on rank 0 whose other rank answers ``other``."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self._other(mine)]

    def meet(self, note: str, seconds: float) -> list[str | None]:
        assert seconds == MEETING_SECONDS
        return [note, self._other(note)]

    def tp_rank(self) -> int:
        return 0


def attest(other: Any, *, reserved: int = 4, in_place: bool = True) -> Report:
    plan: CapturePlan = plan_capture([3, 1], 8)
    controller: Any = SimpleNamespace(
        plan=plan, least_kv_reserved=lambda: reserved, in_place=lambda: in_place
    )
    report = Report(
        sglang="1", preflight=(Row("patch", "a:A.f"), Row("call", "b:g", State.NOT_NEEDED, "why"))
    )
    engine: Any = Ranks(other)
    _attest(engine, controller, FACTS, report)
    return report


def test_equal_ranks_pass() -> None:
    assert attest(lambda mine: mine).ranks == 2


def test_a_rank_with_another_plan_is_named() -> None:
    with pytest.raises(AttestationError, match="rank 1 captured") as caught:
        attest(lambda mine: ("", mine[1][:1], mine[2]))
    assert "same flags and free memory" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (lambda mine: ("SGLang 2", *mine[1:]), "rank 1 has SGLang 2, rank 0 SGLang 1"),
        (lambda mine: mine[:-1], "rank 1 has None, rank 0 b:g not needed: why"),
        (lambda mine: (*mine, "c:h applied"), "rank 1 has c:h applied, rank 0 None"),
    ],
)
def test_a_rank_that_is_patched_otherwise_is_named(table: Any, found: str) -> None:
    with pytest.raises(AttestationError, match=found) as caught:
        attest(lambda mine: (*mine[:2], table(mine[2])))
    assert "on every node" in str(caught.value)


def test_trouble_on_another_rank_stops_this_one() -> None:
    with pytest.raises(AttestationError, match="rank 1: the verify runner is not in place"):
        attest(lambda mine: ("the verify runner is not in place", *mine[1:]))


def test_a_runner_that_is_not_ours() -> None:
    with pytest.raises(AttestationError, match="rank 0: the verify runner is not in place"):
        attest(lambda mine: mine, in_place=False)


def test_kv_reserved_for_less_than_the_widest() -> None:
    with pytest.raises(AttestationError, match="reserved for 3 tokens a round but 4"):
        attest(lambda mine: mine, reserved=3)


def meet(other: Settings | None) -> None:
    """Rank 0 has a secret of its own in its shell, and ``SETTINGS``."""
    notes: list[str] = []
    if other is not None:
        _meet(Ranks(lambda note: notes.append(note) or note), other)  # type: ignore[arg-type,func-returns-value]
    engine: Any = Ranks(lambda note: notes[0] if notes else None)
    _meet(engine, replace(SETTINGS, nccl_shell=("NCCL_MY_TOKEN=s3cr3t",)))


SETTINGS = Settings(steps=(1, 3), nccl_env=("NCCL_ALGO=Ring", "NCCL_MY_TOKEN=s3cr3t"))


def test_ranks_that_were_started_alike_meet() -> None:
    meet(SETTINGS)
    meet(replace(SETTINGS, nccl_shell=("NCCL_SOCKET_IFNAME=eth1",)))  # nodes may differ in that


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(AttestationError, match="rank 1 did not come within 300 s"):
        meet(None)


def test_a_rank_that_was_started_otherwise_is_named_without_secrets() -> None:
    with pytest.raises(AttestationError) as caught:
        meet(replace(SETTINGS, max_batch=8, nccl_env=("NCCL_ALGO=Tree", "NCCL_MY_TOKEN=0th3r")))
    said = str(caught.value)
    assert "rank 1 on " in said
    for part in ("'max_batch': 8", "NCCL_ALGO=Tree", "'max_batch': None", "NCCL_ALGO=Ring"):
        assert part in said
    assert "steps" not in said  # alike
    assert "s3cr3t" not in said
    assert "0th3r" not in said


def started(settings: Settings, **facts: Any) -> Report:
    """What a start-up on the counting engine came to."""
    engine: Any = Engine(**facts)
    report = Report(sglang="1")

    def stock_capture() -> None:
        if hasattr(engine, "seated"):
            engine.seated.register(None)
            engine.seated.init_states()

    _capture(engine, settings, report, stock_capture)
    return report


class TestReport:
    def test_what_the_policy_and_control_add(self) -> None:
        report = started(Settings())
        shown = report.as_dict()
        assert json.loads(json.dumps(shown)) == shown
        assert (shown["state"], shown["control"], shown["draft_steps"]) == ("active", "policy", 3)
        assert shown["policy"]["chosen"] == dict.fromkeys(("1", "2", "4", "6", "8"), 3)
        assert shown["cost_key"] == asdict(KEY)
        assert shown["accept_length_after_zero"] is None
        assert report.change({STEPS: 1})
        assert (report.as_dict()["control"], report.as_dict()["draft_steps"]) == ("pinned", 3)
        assert report.controller is not None
        report.controller.activate_step_by_batch(1)
        assert report.as_dict()["draft_steps"] == 1

    @pytest.mark.parametrize("settings", [Settings(steps=(3,)), Settings(script=(3, 1))])
    def test_where_nothing_is_chosen(self, settings: Settings) -> None:
        shown = started(settings).as_dict()
        assert (shown["policy"], shown["cost_key"]) == (None, None)
        assert shown["control"] == "policy"


class TestChange:
    @pytest.mark.parametrize("state", ["off", "observe", "active"])
    def test_refused_where_nothing_is_active(
        self, state: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        report = Report(state=state)
        if state != "active":
            report.controller = Served(Engine()).controller
        assert not report.change({MODE: 0})
        assert caplog.messages[-1] == (
            "[verify-graphs] live control refused: verify_graphs: nothing to control, the state is "
            f"{state!r}; see its reasons in /server_info"
        )
        assert report.controller is None or report.controller.control.name == "policy"

    def test_a_bad_value_is_refused_in_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        report = started(Settings())
        assert not report.change({MODE: 0, STEPS: 9})
        assert "live control refused: verify_graph_steps 9: it must be" in caplog.messages[-1]
        assert report.as_dict()["control"] == "policy"

    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_rank_says_what_was_changed(
        self, rank: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        report = Report(state="active", controller=Served(Engine(rank=rank)).controller)
        with caplog.at_level(logging.INFO):
            assert report.change({STEPS: 1})
        said = "[verify-graphs] live control: {'verify_graph_steps': 1}"
        assert (said in caplog.messages) == (rank == 0)


class TestCosts:
    ROW = CostRow(4, 1, 10.0, 9.0, 11.0, 32)

    def file(self, folder: Path, **elsewhere: Any) -> Settings:
        path = folder / "costs.json"
        path.write_text(CostTable(replace(KEY, **elsewhere), (self.ROW,)).to_json())
        return Settings(costs=str(path))

    def test_measured_here(self, tmp_path: Path) -> None:
        engine: Any = Engine()
        report = Report()
        (row,) = _costs(engine, self.file(tmp_path), report).rows()
        assert (row.batch, row.draft_steps, row.ms) == (4, 1, 10.0)
        assert report.reasons == []
        assert report.cost_key == KEY

    def test_measured_elsewhere(self, tmp_path: Path) -> None:
        settings = self.file(tmp_path, gpu="another")
        report = started(settings)
        assert report.state == "active"
        (reason,) = report.reasons
        assert reason.startswith(
            f"round costs are learned while serving: --verify-graph-costs {settings.costs}: "
            "round costs were measured elsewhere: gpu 'another', here 'a GPU'"
        )
        assert report.as_dict()["policy"]["costs"] == []
        with pytest.raises(SystemExit, match=r"not started \(--verify-graph-strict\): .*another"):
            started(replace(settings, strict=True))

    def test_no_such_file(self, tmp_path: Path) -> None:
        (reason,) = started(Settings(costs=str(tmp_path / "none.json"))).reasons
        assert "cannot read" in reason

    def test_another_rank_reads_none_and_names_rank_0s_trouble(self, tmp_path: Path) -> None:
        """Its node need not have the file, and under strict every rank must end."""
        engine: Any = Engine(rank=1)
        engine.gather = lambda mine: ["trouble", mine]
        report, settings = Report(), self.file(tmp_path)
        assert _costs(engine, settings, report).rows() == ()
        assert report.reasons == ["round costs are learned while serving: trouble"]
        with pytest.raises(SystemExit, match="trouble"):
            _costs(engine, replace(settings, strict=True), report)


class TestColdZero:
    def test_from_the_first_round_on(self) -> None:
        report = started(Settings(cold_zero=True))
        assert report.controller is not None
        assert report.controller.control.cold_zero

    @pytest.mark.parametrize(
        ("settings", "facts"),
        [(Settings(memory_gb=1e-6), {}), (Settings(), {"deterministic": True})],
    )
    def test_where_0_steps_were_dropped_the_server_starts(
        self, settings: Settings, facts: dict[str, bool]
    ) -> None:
        report = started(replace(settings, cold_zero=True), **facts)
        assert report.state == "active"
        assert report.controller is not None
        assert not report.controller.control.cold_zero

    def test_where_0_steps_were_left_out(self) -> None:
        settings = Settings(steps=(1, 3), cold_zero=True)
        report = started(settings)
        assert report.state == "off"
        assert "--verify-graph-cold-zero: 0 draft steps are not captured" in report.reasons[0]
        with pytest.raises(SystemExit, match="cold-zero"):
            started(replace(settings, strict=True))
