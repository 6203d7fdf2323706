"""Imported by SGLang at module level, never called on this engine."""

from __future__ import annotations

from sgl_kernel.missing import MissingOp


def __getattr__(name: str) -> MissingOp:
    if name.startswith("__"):
        raise AttributeError(name)
    return MissingOp(name)
