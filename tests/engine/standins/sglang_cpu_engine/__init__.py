"""Test-only SGLang plugin: the real engine, and its real graph runners, on a CPU.

Put the folder above on PYTHONPATH; SGLang finds the entry point in the dist-info beside it.
`CPU_ENGINE_GRAPHS=1` turns the graph runners on, `CPU_ENGINE_DRAFT_EXTEND_GRAPH=0` takes the
attention backend off the list of those whose draft extend stock graphs.
`CPU_ENGINE_ATTENTION=triton` is for releases whose own CPU backend knows no EAGLE: see
`tests/engine/legacy/standins.py`.
"""

from __future__ import annotations

import os

from sglang_cpu_engine.log import GraphLog

GRAPHS = GraphLog()
"""What was captured and replayed in this process."""


def activate() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    graphs = os.environ.get("CPU_ENGINE_GRAPHS") == "1"
    if os.environ.get("CPU_ENGINE_ATTENTION") == "triton":
        from tests.engine.legacy import standins

        standins.install(graphs=graphs)
        return
    from sglang_cpu_engine import platform

    platform.install()
    if graphs:
        from sglang_cpu_engine import attention, runners

        attention.install()
        runners.install(draft_extend=os.environ.get("CPU_ENGINE_DRAFT_EXTEND_GRAPH", "1") == "1")
