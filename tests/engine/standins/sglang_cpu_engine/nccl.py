"""SGLang's NCCL communicator on a CPU, with the recorder of `standins/nccl_recorder.c` as NCCL.

`CPU_ENGINE_NCCL` is JSON: ranks that write variables before (`early`) or after (`late`) their
communicator, and those that run without our plugin (`absent`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import types
from typing import Any


def activate() -> None:
    """Entry point of the group `sglang.srt.plugins`: a stand-in for the device, and the plan."""
    plan = os.environ.get("CPU_ENGINE_NCCL")
    if not plan:
        return
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl

    pynccl.torch = _Torch(torch)
    pynccl.PyNcclCommunicator._resolve_stream = lambda self: _stream()
    asked = json.loads(plan)
    group, communicator = parallel_state.GroupCoordinator, pynccl.PyNcclCommunicator
    group.__init__ = _around(group.__init__, before=functools.partial(_begin, asked))
    communicator.__init__ = _around(
        communicator.__init__, after=lambda: os.environ.update(_of_rank(asked, "late"))
    )


def _begin(asked: dict[str, Any]) -> None:
    os.environ.update(_of_rank(asked, "early"))
    if _of_rank(asked, "absent"):
        import sglang_verify_graphs

        sglang_verify_graphs.disable()
    elif "absent" in asked:
        from sglang_verify_graphs import startup

        startup.MEETING_SECONDS = 3.0


def _of_rank(asked: dict[str, Any], when: str) -> dict[str, str]:
    import torch

    return asked.get(when, {}).get(str(torch.distributed.get_rank()), {})


def _around(function: Any, before: Any = lambda: None, after: Any = lambda: None) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        before()
        function(*args, **kwargs)
        after()

    return wrapper


def _stream() -> Any:
    return types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None)


class _Torch:
    """torch for the communicator's module alone: devices and streams of CUDA are nothing there."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = types.SimpleNamespace(
            device=contextlib.nullcontext, Stream=_stream, stream=contextlib.nullcontext
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)
