"""Hypothesis: the same examples on every machine, and no deadline on a loaded one."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("project", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("project")
