"""The old releases' scheduler in this process, stepped by hand; see ``tests/engine/driver.py``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from tests.engine.driver import Engine as NewEngine
from tests.engine.driver import EngineConfig


class Engine(NewEngine):
    """As its base, on ``EAGLEWorker`` (v1); ``graphs`` opens the graph runners to a CPU."""

    def __init__(self, config: EngineConfig, *, graphs: bool = False) -> None:
        from tests.engine.legacy import standins

        standins.install(graphs=graphs)
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        self.config = config
        args = config.as_server_args() | {
            "attention_backend": "triton",
            "disable_cuda_graph": not graphs,
            "cuda_graph_bs": list(config.batch_sizes),
            "disable_piecewise_cuda_graph": True,
        }
        fields = inspect.signature(ServerArgs).parameters
        server_args = ServerArgs(**{k: v for k, v in args.items() if k in fields})
        server_args.check_server_args()
        placement = dict.fromkeys(
            ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0
        )
        self.scheduler = Scheduler(
            server_args, PortArgs.init_new(server_args), dp_rank=None, **placement
        )
        self.requests: list[Any] = []

    @staticmethod
    def token_ids(prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    @torch.no_grad()
    def step(self) -> Any:
        scheduler = self.scheduler
        batch = scheduler.get_next_batch_to_run()
        scheduler.cur_batch = batch
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return batch

    def serve(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, Any]:
        """Tokens of each request, and tokens per verify over all of them."""
        mine = [self.add(prompt, max_new_tokens) for prompt in prompts]
        while not all(request.finished() for request in mine):
            self.step()
        self.step()  # lets the scheduler drop the finished batch
        verifies = sum(request.spec_verify_ct for request in mine)
        decoded = sum(len(request.output_ids) - 1 for request in mine)
        return {
            "tokens": [list(request.output_ids)[:max_new_tokens] for request in mine],
            "accept_length": decoded / verifies if verifies else 1.0,
        }
