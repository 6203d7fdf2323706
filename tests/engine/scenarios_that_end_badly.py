"""What `run_scenario` must survive; nothing imported that takes time."""

from __future__ import annotations

import subprocess
import time


def fail(message: str) -> None:
    """A scenario that does not get far."""
    raise RuntimeError(message)


def hang() -> None:
    """A scenario that never ends and has a child."""
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    time.sleep(600)
