"""Forced acceptance: seeded draws for each request and position, in place of comparing tokens.

``SGLANG_SIMULATE_ACC_LEN`` draws once for a whole batch, which no traffic does. Here the draft of a
request at a position of its sequence is accepted by one draw of its own, the same one whatever the
draft steps are, on every rank. What is accepted are the real drafts, what follows is the target's
own token, so tokens, KV and the next drafts fit together as they do in an ordinary verify.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

SEED = 4


def runs(probabilities: tuple[float, ...], slots: int, length: int, device: str) -> torch.Tensor:
    """Accepted drafts, were there as many as probabilities, at each slot and sequence length."""
    places = slots * length
    generator = torch.Generator().manual_seed(SEED)
    draws = torch.rand(places + len(probabilities), generator=generator)
    alive, found = torch.ones(places, dtype=torch.bool), torch.zeros(places, dtype=torch.int32)
    for position, probability in enumerate(probabilities):
        alive &= draws[position : position + places] < probability
        found += alive
    return found.to(device)


def accept(
    drafted: torch.Tensor, target: torch.Tensor, run: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a greedy verify of chains returns, ``run`` drafts of each request being right.

    ``drafted`` and ``target`` are (batch, width), the last committed token first; ``numbers`` is
    0, 1, 2, ... on the device. Eight small kernels, no synchronisation.
    """
    batch, width = drafted.shape
    correct = run.clamp(max=width - 1)
    rejected = numbers[:width] > correct[:, None]
    nodes = numbers[: batch * width].view(batch, width).masked_fill(rejected, -1)
    predicted = target.to(torch.int32, copy=True)
    predicted[:, :-1] = torch.where(rejected[:, 1:], target[:, :-1], drafted[:, 1:])
    return predicted.flatten(), nodes, correct


class Forced:
    """SGLang's greedy verify in this process, once ``install`` and ``use`` were called."""

    def __init__(self) -> None:
        self._tables: dict[tuple[float, ...], torch.Tensor] = {}
        self._table: torch.Tensor | None = None
        self._numbers: torch.Tensor | None = None
        self._length = 0
        self._places: Any = None

    def install(self) -> None:
        common = importlib.import_module("sglang.srt.speculative.eagle_worker_common")
        utils = importlib.import_module("sglang.srt.speculative.eagle_utils")
        sample, verify = common.eagle_sample, utils.verify_tree_greedy_func

        def sample_there(verify_input: Any, batch: Any, *others: Any, **named: Any) -> Any:
            self._places = batch.req_pool_indices, batch.seq_lens
            return sample(verify_input, batch, *others, **named)

        def verify_by_draw(**arguments: Any) -> Any:
            drafted, table = arguments["candidates"], self._table
            if table is None or drafted.shape[1] == 1:
                return verify(**arguments)
            assert arguments["topk"] == 1, "forced acceptance knows chains alone"
            slots, lengths = self._places
            run = table.take(torch.add(lengths, slots, alpha=self._length))
            return accept(drafted, arguments["target_predict"], run, self._numbers)

        common.eagle_sample, utils.verify_tree_greedy_func = sample_there, verify_by_draw

    def prepare(self, probabilities: tuple[float, ...], pool: torch.Tensor) -> None:
        """Draw for every place of ``pool`` (SGLang's ``req_to_token``) while the engine is idle."""
        slots, self._length = pool.shape
        if probabilities not in self._tables:
            device = str(pool.device)
            self._tables[probabilities] = runs(probabilities, slots, self._length, device)
            self._numbers = torch.arange(64 * slots, dtype=torch.int32, device=device)

    def use(self, probabilities: tuple[float, ...]) -> None:
        """From the next verify on; needs no copy, since the verify that reads it is eager."""
        self._table = self._tables[probabilities]
