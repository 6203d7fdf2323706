"""Keep the `intel_amx` attention backend on a CPU without AMX: it is the one that knows EAGLE."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Claim AMX; on 0.5.17 also mend two faults of the backend which later releases fixed."""
    try:
        from sglang.srt.runtime_context import override_platform
    except ImportError:
        from sglang.srt import server_args
        from sglang.srt.arg_groups import overrides

        for module in (overrides, server_args):
            if hasattr(module, "cpu_has_amx_support"):
                module.cpu_has_amx_support = lambda: True
        _honour_planned_lengths()
    else:
        override_platform(has_amx=True).install()


def _honour_planned_lengths() -> None:
    """0.5.17 plans the lengths of verify and of each draft step, then uses the batch's instead.

    Without the first mend verify reads too few keys; without the second the draft does, tokens
    stay right and only the acceptance falls.
    """
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend as Backend

    def planned(method: Callable[..., Any], lengths: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(
            self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
        ) -> Any:
            seq_lens = forward_batch.seq_lens
            forward_batch.seq_lens = lengths(self) if lengths(self) is not None else seq_lens
            try:
                return method(self, q, k, v, layer, forward_batch, *args, **kw)
            finally:
                forward_batch.seq_lens = seq_lens

        return wrapper

    Backend.forward_extend = planned(Backend.forward_extend, lambda self: self.extend_metadata[0])
    Backend.forward_decode = planned(
        Backend.forward_decode,
        lambda self: self.draft_decode_metadata[1] if self.draft_decode_metadata else None,
    )
