"""CUDA graphs for EAGLE / EAGLE-3 target verify in stock SGLang.

Serving: ``python -m sglang.launch_server ... --enable-verify-graphs``. For ``sglang.Engine``, which
rejects unknown keywords, call :func:`enable` before it.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_verify_graphs._version import __version__
from sglang_verify_graphs.errors import VerifyGraphsError
from sglang_verify_graphs.settings import ENV, Settings, settings_from_env

__all__ = ["Settings", "VerifyGraphsError", "__version__", "disable", "enable", "status"]


def enable(**settings: Any) -> Settings:
    """Ask for verify graphs in every SGLang engine started from this process on.

    Takes the fields of :class:`Settings`, e.g. ``enable(steps=[0, 1, 3], strict=True)``.
    Raises ``SettingsError`` for a bad value; nothing is changed then.
    """
    chosen = Settings(**settings)
    from sglang_verify_graphs.install import install
    from sglang_verify_graphs.nccl.reach import in_launcher

    chosen = in_launcher(chosen)
    install()
    return chosen


def disable() -> list[str]:
    """Undo :func:`enable` in this process; returns the targets another library has wrapped since.

    An engine that already runs keeps what it captured.
    """
    os.environ.pop(ENV, None)
    from sglang_verify_graphs.install import uninstall
    from sglang_verify_graphs.nccl.reach import undo

    undo()
    return uninstall()


def status() -> dict[str, Any]:
    """What this process runs: state, reasons, plan, counts; for a server see ``/server_info``."""
    from sglang_verify_graphs.install import installed, report

    return {
        "settings": None if (found := settings_from_env(os.environ)) is None else found.to_json(),
        "patched": installed(),
        **report.as_dict(),
    }
