"""Stand-in: SGLang imports torchvision at module level and PyPI's build needs CUDA's torch.

Every attribute and submodule exists; none can be called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

__version__ = "0.0.0"


class _Anything:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("torchvision is a stand-in here")

    def __getattr__(self, name: str) -> _Anything:
        return _attribute(name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


def _attribute(name: str) -> _Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> _Anything:
        return _attribute(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _Module:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
__getattr__ = _attribute
