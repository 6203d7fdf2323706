"""Inside every rank of a server: keeps the package's status of that rank in a file.

SGLang asks all ranks for their state and answers with the first one's alone.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

FOLDER = "RANKS_BENCHMARK_FOLDER"
"""Environment variable: where the files go."""
NAME = "rank-{}.json"


def load(module: Any) -> None:
    """Called when SGLang has imported ``managers.scheduler``."""
    initialise = module.Scheduler.__init__

    @functools.wraps(initialise)
    def initialise_and_watch(self: Any, *args: Any, **kwargs: Any) -> None:
        # An instance attribute: the class holds what the package put there, and keeps it.
        self.get_internal_state = _watched(self.get_internal_state)
        initialise(self, *args, **kwargs)

    module.Scheduler.__init__ = initialise_and_watch


def _watched(state: Any) -> Any:
    def answer(request: Any) -> Any:
        import torch

        from sglang_verify_graphs import status

        result = state(request)
        path = Path(os.environ[FOLDER], NAME.format(torch.distributed.get_rank()))
        path.with_suffix(".part").write_text(json.dumps(status()))
        path.with_suffix(".part").rename(path)
        return result

    return answer
