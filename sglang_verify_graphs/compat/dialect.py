"""Graph runners of the releases before SGLang's runner package, under its names.

The router calls runners by the newer names and answers to both; this is the other half.
"""

from __future__ import annotations

from typing import Any

from sglang_verify_graphs.compat.releases import Release


class RenamedRunner:
    """One stock runner; whatever has kept its name is read through."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_runner"], name)

    def can_run_graph(self, forward_batch: Any) -> Any:
        return self._runner.can_run(forward_batch)

    def load_batch(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._runner.replay_prepare(forward_batch, *args, **kwargs)

    def execute(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._runner.replay(forward_batch, *args, **kwargs)


def renamed(release: Release, runner: Any) -> Any:
    """The runner as the router calls it."""
    return runner if runner is None or release.runner_package else RenamedRunner(runner)
