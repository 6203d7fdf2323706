"""A name that can be imported and not called."""

from __future__ import annotations


class MissingOp:
    """SGLang imports many kernels at module level and calls few of them on this engine."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"the sgl_kernel stand-in has no {self._name}")
