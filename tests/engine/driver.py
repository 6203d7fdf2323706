"""The real SGLang scheduler, workers and graph runners in this process, stepped by hand.

One engine a process: SGLang keeps its configuration, groups and buffers in globals. Tests reach it
through `worker.run_scenario`.
"""

from __future__ import annotations

import gc
import inspect
import os
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class EngineConfig:
    """`draft=None` serves without speculation. `server_args` goes to `ServerArgs` as it is."""

    target: str
    draft: str | None = None
    steps: int = 3
    topk: int = 1
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    max_total_tokens: int = 2048
    server_args: dict[str, Any] = field(default_factory=dict)

    def as_server_args(self) -> dict[str, Any]:
        """Keyword arguments of `ServerArgs`."""
        decode_graphs: dict[str, Any] = {"bs": list(self.batch_sizes)}
        if os.environ.get("CPU_ENGINE_GRAPHS") != "1":
            decode_graphs["backend"] = "disabled"
        args: dict[str, Any] = {
            "model_path": self.target,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": os.environ.get("CPU_ENGINE_ATTENTION", "intel_amx"),
            "mem_fraction_static": 0.3,
            "max_total_tokens": self.max_total_tokens,
            "max_running_requests": 16,
            "cuda_graph_config": {"decode": decode_graphs},
            "disable_overlap_schedule": True,
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "random_seed": 1,
            "log_level": "warning",
        }
        if self.draft is not None:
            args |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": self.draft,
                "speculative_num_steps": self.steps,
                "speculative_eagle_topk": self.topk,
                "speculative_num_draft_tokens": self.steps + 1,
            }
        return args | self.server_args


@dataclass(frozen=True)
class Served:
    """What one request got. `accepted[n]` counts the verifies which accepted n drafts."""

    tokens: list[int]
    verifies: int
    accepted: list[int]
    retractions: int


@dataclass(frozen=True)
class Run:
    """The outcome of `Engine.run`."""

    requests: list[Served]
    iterations: int

    @property
    def tokens(self) -> list[list[int]]:
        return [request.tokens for request in self.requests]

    @property
    def accept_length(self) -> float:
        """Tokens per verify, the bonus token included."""
        histogram = self.histogram
        return sum(n * count for n, count in enumerate(histogram, 1)) / sum(histogram)

    @property
    def histogram(self) -> list[int]:
        """`Served.accepted` of all requests together."""
        width = max(len(request.accepted) for request in self.requests)
        rows = [
            request.accepted + [0] * (width - len(request.accepted)) for request in self.requests
        ]
        return [sum(column) for column in zip(*rows, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """What a scenario can hand back."""
        speculated = any(request.verifies for request in self.requests)
        return {
            "tokens": self.tokens,
            "verifies": [request.verifies for request in self.requests],
            "retractions": sum(request.retractions for request in self.requests),
            "histogram": self.histogram if speculated else [],
            "accept_length": self.accept_length if speculated else 1.0,
            "iterations": self.iterations,
            "requests": [asdict(request) for request in self.requests],
        }


class Engine:
    """`scheduler` is SGLang's own; reach through it for anything else."""

    def __init__(self, config: EngineConfig) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        gc.freeze()  # SGLang collects in full at start-up; what is imported stays anyway
        self.config = config
        args = config.as_server_args()
        if not hasattr(ServerArgs, "cuda_graph_config"):
            graphs = args.pop("cuda_graph_config")["decode"]
            args |= {"cuda_graph_bs": graphs["bs"], "disable_cuda_graph": "backend" in graphs}
        server_args = ServerArgs(**args)
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        server_args.check_server_args()
        port_args = PortArgs.init_new(server_args)
        _publish(server_args)
        placement = {
            "gpu_id": 0,
            "tp_rank": 0,
            "moe_ep_rank": 0,
            "pp_rank": 0,
            "attn_cp_rank": 0,
            "moe_dp_rank": 0,
            "dp_rank": None,
        }
        self.scheduler = Scheduler(
            server_args, port_args, **_accepted_by(Scheduler.__init__, placement)
        )
        self.requests: list[Any] = []

    @property
    def target_runner(self) -> Any:
        """The target's `ModelRunner`."""
        return self.scheduler.tp_worker.model_runner

    @property
    def spec_worker(self) -> Any:
        """The `EAGLEWorkerV2`, or None."""
        return self.scheduler.draft_worker if self.config.draft else None

    @property
    def draft_runner(self) -> Any:
        """The draft's `ModelRunner`."""
        return self.spec_worker.draft_worker.draft_runner

    @staticmethod
    def token_ids(prompt: Sequence[int]) -> Any:
        """A prompt as SGLang holds one."""
        return array("q", prompt)

    def refuse_graphs(self) -> None:
        """From now on everything runs eager."""
        runners = [self.target_runner.decode_cuda_graph_runner]
        if self.spec_worker is not None:
            draft = self.spec_worker.draft_worker
            runners += [draft.cuda_graph_runner, draft.cuda_graph_runner_for_draft_extend]
        for runner in filter(None, runners):
            runner.can_run_graph = lambda forward_batch: False

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> Any:
        """Queue a greedy request; gives SGLang's `Req`. The pairs never say the end token.

        `ignore_eos` would do the same, but 0.5.23 then admits so carefully that nothing retracts.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        sampling.normalize(None)
        fields = {
            "rid": f"r{len(self.requests)}",
            "input_text": None,
            "input_ids": self.token_ids(prompt),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": sampling,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
        }
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(**_accepted_by(TokenizedGenerateReqInput, fields))
        )
        request = self.scheduler.waiting_queue[-1]
        self.requests.append(request)
        return request

    @torch.no_grad()
    def step(self) -> Any:
        """One iteration of the scheduler's loop; gives the batch that ran, or None."""
        scheduler = self.scheduler
        before = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
        ask = scheduler.get_next_batch_to_run
        batch = ask(**_accepted_by(ask, before))
        if hasattr(batch, "batch_to_run"):  # a plan; before 0.5.16 the batch itself
            scheduler.running_batch, batch = batch.running_batch, batch.batch_to_run
        scheduler.cur_batch = batch
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return batch

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 32,
        *,
        stagger: int = 0,
        max_iterations: int = 3000,
    ) -> Run:
        """Serve all prompts, a new one every `stagger` iterations (0: all at once)."""
        limits = (
            [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        )
        waiting = list(zip(prompts, limits, strict=True))
        mine: list[Any] = []
        iterations = 0
        while waiting or not all(request.finished() for request in mine):
            assert iterations < max_iterations, "the engine makes no progress"
            while waiting and (not stagger or iterations >= stagger * len(mine)):
                mine.append(self.add(*waiting.pop(0)))
            self.step()
            iterations += 1
        self.step()  # lets the scheduler drop the finished batch
        return Run([_served(r, n) for r, n in zip(mine, limits, strict=True)], iterations)

    def leaked_tokens(self) -> int:
        """KV slots that nobody accounts for once every request has finished."""
        scheduler = self.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size()
        cached = scheduler.tree_cache.evictable_size()
        return scheduler.max_total_num_tokens - free - cached


def _served(request: Any, max_new_tokens: int) -> Served:
    # The last verify may accept past the limit; SGLang's output processor cuts there.
    return Served(
        tokens=list(request.output_ids)[:max_new_tokens],
        verifies=request.spec_verify_ct,
        accepted=list(request.spec_correct_drafts_histogram),
        retractions=request.retraction_count,
    )


def _publish(server_args: Any) -> None:
    """The configuration of this process, as `run_scheduler_process` sets it up."""
    try:
        from sglang.srt import runtime_context
    except ImportError:
        return  # no such thing before 0.5.14

    if not hasattr(runtime_context, "publish"):
        return  # the scheduler does it
    ranks = {}
    if hasattr(runtime_context, "SpawnRanks"):
        ranks["ranks"] = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    runtime_context.publish(server_args, role="scheduler", **ranks)


def _accepted_by(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
