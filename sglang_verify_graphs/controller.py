"""Builds the states of every draft step count before traffic, and switches between them after.

SGLang asks an ``adaptive_controller`` at the head of each decode round for the step count. This
class takes that seat on a stock ``EAGLEWorkerV2``: upstream builds the states, we apply them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_verify_graphs.buckets import CapturePlan, WidthPlan
from sglang_verify_graphs.compat.engine import SGLangEngine, StepState
from sglang_verify_graphs.compat.facts import keep_uncached
from sglang_verify_graphs.control import Control, Mode
from sglang_verify_graphs.costs import PLAIN_DECODE, RoundCosts
from sglang_verify_graphs.errors import CaptureError, first_line
from sglang_verify_graphs.feedback import Feedback
from sglang_verify_graphs.gate import Decision, Phase, RejectReason, VerifyGate
from sglang_verify_graphs.metrics import Counters
from sglang_verify_graphs.policy import FixedSteps, MeasuredSteps, Policy
from sglang_verify_graphs.rounds import RoundTimer
from sglang_verify_graphs.runner import VerifyGraphRunner

logger = logging.getLogger("sglang_verify_graphs")

MEMORY_MARGIN_GB = 1.0
"""Device memory left free for activations of eager and prefill forwards."""
FIRST_GRAPH_GB = 0.05
"""Taken for a graph where none was measured, or only noise: three times the 0.014 GiB that each of
the configured width took on an 8B shape (benchmarks/results, serve-h200)."""


@dataclass(frozen=True)
class Captured:
    """What one width cost: all its graphs (verify, draft, draft extend) and attention backends."""

    draft_steps: int
    batches: tuple[int, ...]
    seconds: float
    gb: float


class DraftStepsController:
    """One per rank. Every rank sees the same rounds, so every rank switches alike."""

    def __init__(
        self, engine: SGLangEngine, plan: CapturePlan, policy: Policy, *,
        memory_gb: float | None = None, observe: bool = False,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.plan = plan
        self.policy = policy
        self.measured: MeasuredSteps | None = None
        """Chooses by what it is told of every round, also while another policy is followed."""
        self.observe = observe
        self.captured: list[Captured] = []
        self.states: dict[int, StepState] = {}
        self.replaced = False
        self._memory_gb = memory_gb
        self._configured: int = engine.worker.speculative_num_steps
        self._current: int = self._configured
        self._routers: list[VerifyGraphRunner] = []
        self._in_charge: Any = None
        """Whom SGLang asks for a verify graph while nobody else has put a runner there."""
        self._control = self._wanted = Control(Mode.OBSERVE if observe else Mode.ON)
        self._own_policy = policy
        self._stock: StepState | None = None
        self._eager_phases: dict[int, tuple[tuple[Phase, Decision], ...]] = {}
        self._apply: Callable[[StepState], None] = _not_installed
        self.timer = RoundTimer(engine.model_runner.device)
        self.counters = Counters((), log=False)
        self.feedback = Feedback(self.counters, keep_uncached, None)

    def fit_configured_width(self) -> tuple[int, ...]:
        """Batches to capture for the configured width: stock's reach always, more where it fits.

        No other width goes further: SGLang sizes the buffers that all graphs share by this one.
        """
        width = self.plan.widths[0]
        stock_top = max(self.engine.stock_ladder())
        above = replace(width, batches=tuple(b for b in width.batches if b > stock_top))
        fitted = above.fit(self._free_bytes(0.0), FIRST_GRAPH_GB * 2**30)
        kept = width.batches[: len(width.batches) - len(fitted.dropped)]
        self.plan = self.plan.replace_width(replace(fitted, batches=kept))
        for narrower in self.plan.widths[1:]:
            self.plan = self.plan.replace_width(narrower.up_to(max(kept)))
        return kept

    # -- start-up: called by EAGLEWorkerV2.init_cuda_graphs ----------------------------------------

    def register(self, state: Any, steps: int | None = None) -> None:
        """Take over the state that SGLang built at start-up: the configured step count."""
        start = self.engine.start_up_state()
        self.states[start.draft_steps] = start

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        """Build the narrower states, widest first, each within the memory all ranks have left."""
        if self.observe:
            return
        gb, seconds = self.engine.graph_usage()
        first = self.plan.widths[0]
        self._record(first, seconds, self.engine.largest(gb))
        used = 0.0
        for width in self.plan.widths[1:]:
            fitted = self._fit(width, used)
            self.plan = self.plan.replace_width(fitted)
            if not fitted.batches:
                continue
            before, started = self.engine.free_gb(), time.perf_counter()
            self.states[width.draft_steps] = self._build(fitted)
            taken = before - self.engine.free_gb()
            self._record(fitted, time.perf_counter() - started, taken)
            used += max(taken, 0.0)
        self._log_dropped(self.captured[0].gb / len(first.batches))

    def _fit(self, width: WidthPlan, used_gb: float) -> WidthPlan:
        last = self.captured[-1]
        per_graph = last.gb / len(last.batches) if last.gb > 0 else FIRST_GRAPH_GB
        return width.fit(self._free_bytes(used_gb), per_graph * 2**30)

    def _free_bytes(self, used_gb: float) -> int:
        """What graphs may still take on every rank."""
        free = self.engine.free_gb() - MEMORY_MARGIN_GB
        if self._memory_gb is not None:
            free = min(free, self._memory_gb - used_gb)
        return int(free * 2**30)

    def _log_dropped(self, gb_per_graph: float) -> None:
        dropped = {w.draft_steps: list(w.dropped) for w in self.plan.widths if w.dropped}
        if dropped and self.engine.tp_rank() == 0:
            logger.warning(
                "[verify-graphs] %s: no memory for draft_steps: batches %s (%.3f GiB a graph, "
                "%s); %s",
                RejectReason.MEMORY_BUDGET.value, dropped, gb_per_graph,
                f"budget {self._memory_gb} GiB" if self._memory_gb else
                f"{self.engine.free_gb():.1f} GiB free",
                RejectReason.MEMORY_BUDGET.advice,
            )  # fmt: skip

    def _build(self, width: WidthPlan) -> StepState:
        try:
            state = self.engine.build_state(width.draft_steps, width.batches)
        except Exception as error:
            raise CaptureError(
                f"capturing draft_steps {width.draft_steps} (batches {list(width.batches)}) "
                f"failed: {first_line(error)}; lower --mem-fraction-static, or leave "
                f"{width.draft_steps} out of --verify-graph-steps"
            ) from error
        extend = state.draft_extend_graphs
        captured = width.draft_steps + 1 if extend is None else self.engine.captured_width(extend)
        if captured != width.draft_steps + 1:
            raise CaptureError(
                f"draft extend of draft_steps {width.draft_steps} was captured for width "
                f"{captured}; this SGLang release needs an adapter, report it"
            )
        return state

    def _record(self, width: WidthPlan, seconds: float, gb: float) -> None:
        self.captured.append(Captured(width.draft_steps, width.batches, seconds, gb))

    # -- start-up: called once every graph exists --------------------------------------------------

    def install(self, costs: RoundCosts | None = None) -> None:
        """Put the routers where SGLang keeps its runners and make the configured state current.

        With ``costs``, draft steps are chosen from here on; without, the policy given stays.
        """
        log = self.engine.tp_rank() == 0
        if costs is not None:
            self.policy = self._own_policy = self._measure(costs)
        gate = VerifyGate(self.plan)
        self.counters = Counters(self.plan, log=log)
        self.feedback = Feedback(self.counters, keep_uncached, self.measured if log else None)
        self._stock = self.states[self._configured]
        if not self.observe:
            self.engine.find_by_size(list(self.states.values()))
        router = None
        targets = {
            k: s.target_graphs for k, s in self.states.items() if s.target_graphs is not None
        }
        if targets:
            router = self._route(Phase.VERIFY, targets, gate)
        for steps, state in self.states.items():
            self._eager_phases[steps] = _phases_without_graphs(state)
            self.states[steps] = replace(
                state,
                target_graphs=router,
                draft_graphs=self._wrap(Phase.DRAFT, steps, state.draft_graphs, gate),
                draft_extend_graphs=self._wrap(
                    Phase.DRAFT_EXTEND, steps, state.draft_extend_graphs, gate
                ),
            )
        self._apply = self.engine.switch()
        self._put(self.states[self._current])

    def _measure(self, costs: RoundCosts) -> MeasuredSteps:
        captured = tuple(width for width in self.plan.widths if width.batches)
        self.measured = MeasuredSteps(replace(self.plan, widths=captured), self._configured, costs)
        if self.engine.tp_rank() == 0:
            self.timer.on_sample = self.measured.timed
        return self.measured

    def _put(self, state: StepState) -> None:
        self._apply(state)
        self._in_charge = state.target_graphs

    def _wrap(self, phase: Phase, steps: int, runner: Any, gate: VerifyGate) -> Any:
        return None if runner is None else self._route(phase, {steps: runner}, gate)

    def _route(self, phase: Phase, runners: dict[int, Any], gate: VerifyGate) -> VerifyGraphRunner:
        steps_of_width = {width.width: width.draft_steps for width in self.plan.widths}
        read_facts = self.engine.facts_reader(phase, runners[max(runners)], steps_of_width)
        router = VerifyGraphRunner(
            phase, runners, gate=gate, counters=self.counters, read_facts=read_facts,
            observe=self.observe,
        )  # fmt: skip
        self._routers.append(router)
        return router

    # -- serving: called by EAGLEWorkerV2 ----------------------------------------------------------

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Head of the decode branch, forward stream, before draft: the one place to switch."""
        if self._wanted is not self._control:
            self._obey()
        if self._control.mode is Mode.OFF:
            return
        if self.policy.due:
            self._agree()
        steps = self.policy.draft_steps(batch_size)
        if steps not in self.states:
            steps = self._configured  # its buckets were dropped at start-up
        if steps != self._current:
            if not self.in_place():
                steps = self._give_up()
            if steps != self._current:
                self._apply(self.states[steps])
                self._current = steps
        self.counters.rounds += 1
        for phase, decision in self._eager_phases[steps]:
            self.counters.refuse(phase, decision)
        timed = PLAIN_DECODE if self._control.cold_zero and steps == 0 else steps
        self.timer.start(batch_size, timed, self.engine.model_runner.forward_pass_id)

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """One round late and on another stream: counts, and changes nothing."""
        if self._control.mode is not Mode.OFF:
            self.feedback.verified(num_correct_drafts_per_req)

    def _agree(self) -> None:
        """Every rank looks the next rounds up in rank 0's table: only rank 0 is told of rounds."""
        measured = self.measured
        assert measured is not None
        table = measured.decide() if self.engine.tp_rank() == 0 else measured.table
        measured.install(self.engine.from_rank_0(table.pack()))

    # -- live control ------------------------------------------------------------------------------

    @property
    def control(self) -> Control:
        return self._wanted

    def change(self, asked: Mapping[str, float]) -> None:
        """What is asked for holds from the head of the next decode round on."""
        self._wanted = self._wanted.change(asked, self.states)

    def _obey(self) -> None:
        before, now = self._control, self._wanted
        self._control = now
        if now.cold_zero != before.cold_zero:
            self.engine.skip_extend_at_zero(now.cold_zero)
            self.feedback.skips_extend = now.cold_zero
            if self.measured is not None:
                self.measured.skip_extend_at_zero(now.cold_zero)
        for router in self._routers:
            router.observe = now.mode is Mode.OBSERVE
        if now.mode is not Mode.ON:
            self.policy = FixedSteps(self._configured)
        elif now.pinned is not None:
            self.policy = FixedSteps(now.pinned)
        else:
            self.policy = self._own_policy
        if (now.mode is Mode.OFF) != (before.mode is Mode.OFF) and self.in_place():
            stock = now.mode is Mode.OFF and self._stock
            self._put(stock or self.states[self._configured])
            self._current = self._configured

    def _give_up(self) -> int:
        """SGLang captured anew while serving (a role switch): only its own width is left."""
        if not self.replaced:
            self.replaced = True
            logger.error(
                "[verify-graphs] SGLang replaced its graph runner while serving; draft_steps stay "
                "at %d; restart the server to capture every width again", self._current,
            )  # fmt: skip
        return self._current

    def in_place(self) -> bool:
        """Whether SGLang still asks our router."""
        return self.engine.verify_runner() is self._in_charge

    def least_kv_reserved(self) -> int:
        """KV slots a round may allocate in the state that reserves least."""
        reserved = []
        for state in self.states.values():
            self._apply(state)
            reserved.append(self.engine.kv_reserved_per_decode())
        self._apply(self.states[self._current])
        return min(reserved)

    @property
    def current_steps(self) -> int:
        return self._current


def _not_installed(state: StepState) -> None:
    raise CaptureError("a switch before every graph was captured; report it")


def _phases_without_graphs(state: StepState) -> tuple[tuple[Phase, Decision], ...]:
    """Phases of a state that run a forward but were given no graph by SGLang."""
    without_any = state.target_graphs is None
    reason = RejectReason.NO_RUNNER if without_any else RejectReason.BACKEND_NOT_GRAPHED
    runs_draft = state.draft_steps > 1  # k steps run k - 1 draft forwards
    return tuple(
        (phase, Decision(None, reason))
        for phase, runs, graphs in (
            (Phase.VERIFY, True, state.target_graphs),
            (Phase.DRAFT, runs_draft, state.draft_graphs),
            (Phase.DRAFT_EXTEND, True, state.draft_extend_graphs),
        )
        if runs and graphs is None
    )
