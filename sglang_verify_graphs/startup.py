"""Around SGLang's graph capture, on every rank: plan, capture, install, attest, report."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sglang_verify_graphs.buckets import CapturePlan, format_ranges, plan_capture
from sglang_verify_graphs.compat.engine import SGLangEngine
from sglang_verify_graphs.compat.legacy import engine_of
from sglang_verify_graphs.compat.preflight import Row
from sglang_verify_graphs.compat.releases import Release
from sglang_verify_graphs.compat.twophase import build_workers
from sglang_verify_graphs.control import COLD_ZERO
from sglang_verify_graphs.controller import DraftStepsController
from sglang_verify_graphs.costs import CostKey, RoundCosts, read_costs
from sglang_verify_graphs.errors import (
    AttestationError,
    CostsError,
    SettingsError,
    UnsupportedError,
)
from sglang_verify_graphs.nccl.evidence import shown
from sglang_verify_graphs.nccl.proof import prove
from sglang_verify_graphs.policy import FixedSteps, Policy, ScriptedSteps
from sglang_verify_graphs.prometheus import Publisher, publisher
from sglang_verify_graphs.settings import COSTS_FLAG, FLAG, Settings
from sglang_verify_graphs.support import EAGLE_WORKERS, ServerFacts, limits_of

logger = logging.getLogger("sglang_verify_graphs")

MEETING_SECONDS = 300.0
"""Ranks meet after the model is loaded, where SGLang itself waits for all of them."""


@dataclass
class Report:
    """What this process runs; ``status()`` and ``/server_info`` show it."""

    state: str = "off"
    """``active``, ``observe`` or ``off``."""
    reasons: list[str] = field(default_factory=list)
    sglang: str | None = None
    tested: bool = False
    ranks: int = 1
    preflight: tuple[Row, ...] = ()
    """What is patched and called in this process, and whether it is as expected."""
    controller: DraftStepsController | None = None
    cost_key: CostKey | None = None
    """What the costs measured here hold for."""
    metrics: Publisher | None = None
    """Where SGLang publishes metrics of this process."""
    nccl: dict[str, Any] | None = None
    """What every rank's NCCL variables came to; None before they are collected."""

    def switch_off(self, why: str, *, strict: bool, log: bool = True) -> None:
        """One error line and stock behaviour, or no server under ``--verify-graph-strict``."""
        if strict:
            raise SystemExit(f"[verify-graphs] not started (--verify-graph-strict): {why}")
        self.state = "off"
        if why not in self.reasons:
            self.reasons.append(why)
        if log:
            logger.error("[verify-graphs] %s", why)

    def change(self, asked: Mapping[str, float]) -> bool:
        """Live control; one line says what came of it, and a bad request changes nothing."""
        try:
            if self.controller is None or self.state != "active":
                raise SettingsError(
                    f"{', '.join(asked)}: nothing to control, the state is "
                    f"{self.state!r}; see its reasons in /server_info"
                )
            self.controller.change(asked)
        except SettingsError as error:
            logger.warning("[verify-graphs] live control refused: %s", error)
            return False
        if self.controller.engine.tp_rank() == 0:
            logger.info("[verify-graphs] live control: %s", dict(asked))
        return True

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "state": self.state,
            "reasons": list(self.reasons),
            "sglang": self.sglang,
            "tested": self.tested,
            "ranks": self.ranks,
            "preflight": {row.name: str(row) for row in self.preflight},
            "nccl": self.nccl,
        }
        if (run := self.controller) is not None:
            data |= {
                "control": run.control.name,
                "pinned": run.control.pinned,
                "cold_zero": run.control.cold_zero,
                "draft_steps": run.current_steps,
                "policy": run.measured and run.measured.snapshot(),
                "cost_key": self.cost_key and asdict(self.cost_key),
                "plan": {str(w.draft_steps): list(w.batches) for w in run.plan.widths},
                "dropped": {
                    str(w.draft_steps): list(w.dropped) for w in run.plan.widths if w.dropped
                },
                "capture": [
                    {
                        "draft_steps": c.draft_steps,
                        "batches": list(c.batches),
                        "seconds": round(c.seconds, 3),
                        "gb": round(c.gb, 4),
                    }
                    for c in run.captured
                ],
                "round_ms": run.timer.snapshot(),
                **run.counters.snapshot(),
            }
        return data


def capture_verify_graphs(
    scheduler: Any, settings: Settings, release: Release, report: Report,
    stock_capture: Callable[[], None],
) -> None:  # fmt: skip
    """Run ``Scheduler.init_all_cuda_graphs`` over the planned buckets, not the stock ladder.

    What the NCCL variables came to is collected afterwards, whatever became of the graphs.
    """
    report.sglang, report.tested = release.version, release.tested
    stock_capture = build_workers(release, scheduler, stock_capture)
    engine = engine_of(release, scheduler)
    _meet(engine, settings)
    _capture(engine, settings, report, stock_capture)
    if report.controller is not None:
        report.metrics = publisher(report.controller, engine.metrics_labels())
    if report.metrics is not None:
        engine.when_publishing(report.metrics.publish)
    report.nccl = prove(engine, strict=settings.strict)


def _capture(
    engine: SGLangEngine, settings: Settings, report: Report, stock_capture: Callable[[], None]
) -> None:
    try:
        if engine.worker is None:
            raise UnsupportedError(_no_speculation())
        facts = engine.server_facts()
        steps = steps_to_capture(facts, settings, report)
    except (UnsupportedError, SettingsError) as error:
        report.switch_off(str(error), strict=settings.strict, log=engine.tp_rank() == 0)
        stock_capture()
        if engine.worker is not None:
            _observe(engine, report)
        return
    if report.reasons and engine.tp_rank() == 0:
        logger.warning("[verify-graphs] %s", report.reasons[0])
    if settings.observe:
        report.state = "observe"
        stock_capture()
        _observe(engine, report)
        return
    plan = plan_capture(
        steps,
        facts.max_running_requests,
        draft_tokens=0 if facts.topk == 1 else facts.draft_tokens,
        cap=settings.max_batch,
        padding=facts.padding,
        alignment=facts.alignment,
    )
    policy: Policy = FixedSteps(facts.draft_steps)
    if settings.script:
        policy = ScriptedSteps(settings.script)
    controller = DraftStepsController(engine, plan, policy, memory_gb=settings.memory_gb)
    engine.seat(controller)
    with engine.capturing(controller.fit_configured_width()):
        stock_capture()
    chooses = len(controller.states) > 1 and not settings.script
    controller.install(_costs(engine, settings, report) if chooses else None)
    if settings.cold_zero and 0 in controller.states:  # the reason why not is told already
        controller.change({COLD_ZERO: 1})
    report.state, report.controller = "active", controller
    _attest(engine, controller, facts, report)
    if engine.tp_rank() == 0:
        _log_table(controller, report)


def _costs(engine: SGLangEngine, settings: Settings, report: Report) -> RoundCosts:
    """Measured costs to start from; rank 0 reads them and decides for all."""
    report.cost_key = engine.cost_key()
    table, problem = None, ""
    if settings.costs and engine.tp_rank() == 0:
        try:
            table = read_costs(Path(settings.costs))
            table.check(report.cost_key)
        except CostsError as error:
            table, problem = None, f"{COSTS_FLAG} {settings.costs}: {error}"
    if problem := engine.gather(problem)[0]:
        if settings.strict:
            raise SystemExit(f"[verify-graphs] not started (--verify-graph-strict): {problem}")
        report.reasons.append(f"round costs are learned while serving: {problem}")
        if engine.tp_rank() == 0:
            logger.error("[verify-graphs] %s", report.reasons[-1])
    return RoundCosts(table)


def steps_to_capture(facts: ServerFacts, settings: Settings, report: Report) -> tuple[int, ...]:
    """Step counts wanted and supported; ``report`` gets a reason for each that is not.

    Raises ``UnsupportedError`` where nothing is, ``SettingsError`` where flags exclude each other.
    """
    limits = limits_of(facts)
    report.reasons = [limit.message for limit in limits]
    if limits and not limits[0].fixed_width:
        raise UnsupportedError(limits[0].message)
    if not limits:
        steps = _without_zero(settings.steps_for(facts.draft_steps), facts, settings, report)
        if settings.cold_zero and 0 not in steps:
            raise SettingsError(
                "--verify-graph-cold-zero: 0 draft steps are not captured; put 0 among "
                "--verify-graph-steps, or leave the flag out"
            )
        return steps
    wanted = set(settings.steps or ()) | set(settings.script)
    if settings.strict and wanted - {facts.draft_steps}:
        raise UnsupportedError(limits[0].message)
    return (facts.draft_steps,)


def _without_zero(
    steps: tuple[int, ...], facts: ServerFacts, settings: Settings, report: Report
) -> tuple[int, ...]:
    if facts.zero_steps or 0 not in steps:
        return steps
    message = (
        "0 draft steps are not captured: this SGLang release cannot verify a round without "
        "drafts; install a newer one, or leave 0 out of --verify-graph-steps"
    )
    if settings.strict and 0 in {*(settings.steps or ()), *settings.script}:
        raise UnsupportedError(message)
    report.reasons.append(message)
    return tuple(k for k in steps if k)


def _no_speculation() -> str:
    return limits_of(ServerFacts(None, 1, 0, 0, 1))[0].message


def _observe(engine: SGLangEngine, report: Report) -> None:
    """Count and explain what stock does, on the runners stock built."""
    controller = observing_controller(engine)
    if controller is None:
        return
    report.controller = controller
    if engine.tp_rank() == 0:
        width = controller.plan.widths[0]
        uncovered = controller.plan.uncovered(width.draft_steps)
        logger.info(
            "[verify-graphs] observing stock: draft_steps %d, %d batches up to %d, uncovered %s",
            width.draft_steps, len(width.batches), max(width.batches, default=0),
            format_ranges(uncovered) or "none",
        )  # fmt: skip


def observing_controller(engine: SGLangEngine) -> DraftStepsController | None:
    """A controller that watches the start-up state; None for a worker that has no such seat."""
    worker, runner = engine.worker, engine.verify_runner()
    adaptive = getattr(worker, "adaptive_controller", None)
    if type(worker).__name__ not in EAGLE_WORKERS or adaptive is not None:
        return None  # stock swaps its own states; watching one of them would explain a part only
    plan = plan_capture(
        [worker.speculative_num_steps],
        int(engine.model_runner.req_to_token_pool.size),
        draft_tokens=worker.speculative_num_draft_tokens,
        ladder=getattr(runner, "capture_bs", None) or (),
        padding=not getattr(runner, "disable_padding", False),
    )
    policy = FixedSteps(worker.speculative_num_steps)
    controller = DraftStepsController(engine, plan, policy, observe=True)
    controller.register(None)
    engine.seat(controller)
    controller.install()
    return controller


def _meet(engine: SGLangEngine, settings: Settings) -> None:
    """No rank goes on before all are known to be here, started alike: the others would hang."""
    own = json.loads(replace(settings, nccl_shell=None, nccl_driver=None).to_json())
    notes = engine.meet(json.dumps([socket.gethostname(), own]), MEETING_SECONDS)
    missing = [str(rank) for rank, note in enumerate(notes) if note is None]
    if missing:
        raise AttestationError(
            f"[verify-graphs] rank {', '.join(missing)} did not come within {MEETING_SECONDS:.0f} "
            f"s: it runs without {FLAG}; start every node with the same flags"
        )
    for rank, note in enumerate(notes):
        node, theirs = json.loads(note or "")
        unlike = [name for name in own if theirs.get(name) != own[name]]
        if unlike:
            raise AttestationError(
                f"[verify-graphs] rank {rank} on {node} was started with "
                f"{_without_secrets(theirs, unlike)}, rank {engine.tp_rank()} with "
                f"{_without_secrets(own, unlike)}; start every node with the same flags"
            )


def _without_secrets(settings: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """These settings, fit for a log."""
    pairs = [pair.partition("=") for pair in settings.get("nccl_env", ())]
    fit = settings | {"nccl_env": [f"{name}={shown(name, value)}" for name, _, value in pairs]}
    return {name: fit.get(name) for name in names}


def _attest(
    engine: SGLangEngine, controller: DraftStepsController, facts: ServerFacts, report: Report
) -> None:
    """Every rank must be patched alike, hold the same plan and reserve KV for the widest; or no
    rank serves."""
    reserved, needed = controller.least_kv_reserved(), facts.draft_tokens
    problem = (
        f"KV is reserved for {reserved} tokens a round but {needed} can be written"
        if reserved < needed
        else ""
    )
    if not controller.in_place():
        problem = "the verify runner is not in place"
    plan = tuple((w.draft_steps, w.batches) for w in controller.plan.widths)
    table = (f"SGLang {report.sglang}", *(f"{row.name} {row}" for row in report.preflight))
    ranks = engine.gather((problem, plan, table))
    report.ranks = len(ranks)
    for rank, (trouble, captured, theirs) in enumerate(ranks):
        if trouble:
            raise AttestationError(f"[verify-graphs] rank {rank}: {trouble}; report it")
        for one, first in zip_longest(theirs, ranks[0][2]):
            if one != first:
                raise AttestationError(
                    f"[verify-graphs] rank {rank} has {one}, rank 0 {first}; install the same "
                    "SGLang and the same sglang-verify-graphs on every node"
                )
        if captured != ranks[0][1]:
            raise AttestationError(
                f"[verify-graphs] rank {rank} captured {captured}, rank 0 {ranks[0][1]}; start "
                "every rank with the same flags and free memory"
            )


def _log_table(controller: DraftStepsController, report: Report) -> None:
    plan: CapturePlan = controller.plan
    rows = [
        f"[verify-graphs] active on {report.ranks} rank(s), SGLang {report.sglang}: "
        f"{sum(1 for _ in plan)} buckets, batches to {plan.max_batch}",
        "[verify-graphs] draft_steps  graphs  largest  uncovered  padded rows  seconds     GiB",
    ]
    for width in plan.widths:
        cost = next((c for c in controller.captured if c.draft_steps == width.draft_steps), None)
        rows.append(
            "[verify-graphs] {:>11}  {:>6}  {:>7}  {:>9}  {:>11.1f}  {:>7.1f}  {:>6.2f}".format(
                width.draft_steps,
                len(width.batches),
                max(width.batches, default=0),
                format_ranges(plan.uncovered(width.draft_steps)) or "none",
                width.mean_padded_rows(plan.max_batch),
                cost.seconds if cost else 0.0,
                cost.gb if cost else 0.0,
            )
        )
    for row in rows:
        logger.info(row)
