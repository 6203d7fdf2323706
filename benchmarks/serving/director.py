"""Inside a benchmarked engine: leads one batch through a script of segments, round by round.

A segment fixes the draft steps (or leaves them to whoever chooses) and the acceptance. All of it is
set between two rounds of a batch that decodes on, so segments share the requests, the clocks and
the heat. While steps are fixed the policy is told nothing: it knows what it saw of its own rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from forced import Forced

from serving import probe


def load(module: Any) -> None:
    """Called when SGLang has imported ``managers.scheduler``."""
    probe.Probe = Director  # type: ignore[misc]
    probe.load(module)


class Clock:
    """Host time within calls, while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.ns = self.calls = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter_ns()
            result = call(*args)
            if self.on:
                self.ns += time.perf_counter_ns() - started
                self.calls += 1
            return result

        return timed


class Extends:
    """GPU time of the draft extends of some rounds, by events that are read after the script."""

    def __init__(self, draft_worker: Any, device: str) -> None:
        self.on = False
        self._gpu = device == "cuda"
        self._pairs: list[tuple[Any, Any]] = []
        self._extend = draft_worker._draft_extend_for_decode
        draft_worker._draft_extend_for_decode = self._timed

    def _mark(self) -> Any:
        if not self._gpu:
            return 1e3 * time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, *args: Any) -> Any:
        if not self.on:
            return self._extend(*args)
        before = self._mark()
        result = self._extend(*args)
        self._pairs.append((before, self._mark()))
        return result

    def take(self) -> float | None:
        """Median in milliseconds of what was timed since the last call."""
        probe._synchronize()
        pairs, self._pairs = self._pairs, []
        times = [a.elapsed_time(b) if self._gpu else b - a for a, b in pairs]
        return statistics.median(times) if times else None


class Director(probe.Probe):
    """The probe with a script."""

    def __init__(self, scheduler: Any, folder: Any) -> None:
        super().__init__(scheduler, folder)
        self._forced = Forced()
        self._forced.install()
        self._ours: Any = None
        self._worker: Any = None
        self._clocks: dict[str, Clock] = {}
        self._extends: Extends | None = None
        self._segments: list[dict[str, Any]] = []
        self._log: list[tuple[int, int, int, int]] = []
        self._at = self._batch = self._rounds = self._verified = 0
        take_up = scheduler.process_batch_result
        scheduler.process_batch_result = lambda batch, result: self._take_up(take_up, batch, result)

    def dated(self, run_batch: Callable[..., Any]) -> Callable[..., Any]:
        run_batch = super().dated(run_batch)

        def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
            leads = batch.forward_mode.is_decode() and len(batch.reqs) == self._batch
            if leads and self._running:
                self._advance()
            result = run_batch(batch, *args, **kwargs)
            if leads and self._running:
                result.segment = self._at
            return result

        return run

    @property
    def _running(self) -> bool:
        return self._at < len(self._segments)

    def _advance(self) -> None:
        """Before a round: the next segment once this one has had its rounds."""
        segment = self._segments[self._at]
        due = self._rounds >= segment["rounds"]
        if due and (self._verified >= segment["verified"] or self._rounds >= segment["cap"]):
            self._at += 1
            self._begin()
        self._rounds += 1

    def _begin(self) -> None:
        self._rounds = self._verified = 0
        if not self._running:
            return
        segment = self._segments[self._at]
        if self._worker is None:
            return
        self._forced.use(tuple(segment["profile"]))
        if self._extends is not None:
            self._extends.on = segment["extend"]
        if self._ours is not None:
            self._steer(segment["steps"], segment["cold"])

    def _steer(self, steps: int | list[int] | None, cold: bool) -> None:
        from sglang_verify_graphs.policy import ScriptedSteps

        ours, chooses = self._ours, steps is None
        pinned = steps if isinstance(steps, int) else -1
        ours.change({"verify_graph_steps": pinned, "verify_graph_cold_zero": int(cold)})
        if isinstance(steps, list):
            ours._obey()  # else at the head of the next round
            ours.policy = ScriptedSteps(steps)
        ours.feedback._policy = ours.measured if chooses else None
        ours.timer.on_sample = self._sampled if chooses else None
        for clock in self._clocks.values():
            clock.on = chooses

    def _take_up(self, take_up: Callable[..., Any], batch: Any, result: Any) -> None:
        if self._segments and not self._running and batch.forward_mode.is_decode():
            for request in batch.reqs:
                request.sampling_params.max_new_tokens = len(request.output_ids) + 1
        take_up(batch, result)
        if (segment := getattr(result, "segment", None)) is None:
            return
        width, batch_size = result.speculative_num_draft_tokens, len(batch.reqs)
        lengths = None if width is None else result.num_correct_drafts
        tokens = batch_size + (lengths or 0)
        self._log.append((segment, time.perf_counter_ns(), (width or 1) - 1, tokens))
        if segment == self._at and (width or 1) > 1:
            self._verified += batch_size

    # -- commands --------------------------------------------------------------------------------

    def _do_script(self, segments: list[dict[str, Any]], batch: int) -> None:
        """For the next batch that decodes with so many requests; the engine is idle."""
        self._attach()
        if self._worker is not None:
            pool = self._scheduler.req_to_token_pool.req_to_token
            for segment in segments:
                self._forced.prepare(tuple(segment["profile"]), pool)
        self._segments, self._batch, self._at, self._log = segments, batch, 0, []
        for clock in self._clocks.values():
            clock.ns = clock.calls = 0
        self._begin()

    def _do_led(self) -> dict[str, Any]:
        """The rounds: segment, time of commit in ns, draft steps, tokens of all requests."""
        done, self._segments = not self._running, []
        rounds = self._clocks["head"].calls if self._clocks else 0
        return {
            "done": done,
            "rounds": self._log,
            "extend_ms": self._extends and self._extends.take(),
            "policy_rounds": rounds,
            "host_us": {n: c.ns / 1e3 / max(rounds, 1) for n, c in self._clocks.items()},
        }

    def _attach(self) -> None:
        """Once: everything exists by the first command."""
        worker = self._scheduler.draft_worker
        if self._worker is not None or worker is None:
            return
        self._worker = worker
        self._extends = Extends(worker.draft_worker, worker.device)
        if type(worker.adaptive_controller).__name__ != "DraftStepsController":
            return
        ours = self._ours = self._controller()
        names = ("head", "agree", "choose", "verified", "sample")
        clocks = self._clocks = {name: Clock() for name in names}
        ours.activate_step_by_batch = clocks["head"].around(ours.activate_step_by_batch)
        ours._agree = clocks["agree"].around(ours._agree)
        ours.measured.draft_steps = clocks["choose"].around(ours.measured.draft_steps)
        ours.measured.verified = clocks["verified"].around(ours.measured.verified)
        self._sampled = clocks["sample"].around(ours.measured.timed)
