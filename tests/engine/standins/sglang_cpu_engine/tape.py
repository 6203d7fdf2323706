"""A CUDA graph for CPU tensors: record the operators of a call once, run them again later.

As strict as the real thing where a CPU can be:
- Python does not run again, so whatever it decided at capture is baked in;
- memory that existed before the capture is kept by ADDRESS. Replacing a static buffer leaves the
  graph on the old one, and replaying after that memory was freed is refused (a GPU would read it);
- outputs live in the graph's own memory and are overwritten by the next replay;
- reading a value on the host, or an output whose shape depends on values, is refused at capture.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_HOST_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_ALLOCATORS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CaptureError(RuntimeError):
    """The call cannot be a graph."""


class StaleGraphError(RuntimeError):
    """The graph would touch memory that is gone, or was never captured."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of tuples, lists and dicts."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


@functools.cache
def _effects(func: torch._ops.OpOverload) -> tuple[bool, bool]:
    """Whether the operator only makes a view, and whether it only allocates."""
    schema = func._schema
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    is_view = not writes and bool(schema.returns) and not any(_fresh_returns(func))
    return is_view, schema.name.split("::")[1] in _ALLOCATORS


@functools.cache
def _fresh_returns(func: torch._ops.OpOverload) -> tuple[bool, ...]:
    return tuple(value.alias_info is None for value in func._schema.returns)


def _fresh_outputs(func: torch._ops.OpOverload, out: Any) -> list[torch.Tensor]:
    """The tensors of `out` which are new memory, not the operator's own arguments."""
    fresh = _fresh_returns(func)
    if len(fresh) < 2:
        return list(tensors_of(out)) if fresh == (True,) else []
    values = zip(fresh, out, strict=True)
    return [tensor for new, value in values if new for tensor in tensors_of(value)]


def _refuse_host_reads(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    if not _VALUE_TAGS.intersection(func.tags):
        return
    if func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        return
    raise CaptureError(f"{func} needs a value on the host; a CUDA graph cannot capture it")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        """Storages born in the capture, by identity: the graph's private pool."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_host_reads(func, args)
        out = func(*args, **kwargs)
        is_view, allocates = _effects(func)
        if is_view:
            if func is torch.ops.aten.lift_fresh.default:  # a constant made by torch.tensor()
                self._keep(out)
            return out
        outputs = _fresh_outputs(func, out)
        for tensor in outputs:
            self._keep(tensor)
        if not allocates:
            self.calls.append((func, args, kwargs, outputs))
        return out

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.own[storage._cdata] = storage


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HOST_READS:
            raise CaptureError(
                f"{func.__name__}() reads on the host; a CUDA graph cannot capture it"
            )
        return func(*args, **(kwargs or {}))


class Tape:
    """The recorded operators of one call of `forward`."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        recorder = _Recorder()
        with torch.no_grad(), _NoHostReads(), recorder:
            self.output = forward()
        self._own = list(recorder.own.values())
        self._borrowed: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}

        def by_address(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return self._borrow(value, recorder.own)

        self._calls = [
            (func, tree_map(by_address, args), tree_map(by_address, kwargs), outputs)
            for func, args, kwargs, outputs in recorder.calls
        ]

    def _borrow(self, tensor: torch.Tensor, own: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The same memory without owning it; the graph's own memory stays as it is."""
        storage = tensor.untyped_storage()
        if storage._cdata in own or storage.nbytes() == 0:
            return tensor
        if storage._cdata not in self._borrowed:
            raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            alias = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
            self._borrowed[storage._cdata] = (StorageWeakRef(storage), alias)
        alias = self._borrowed[storage._cdata][1]
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())

    def __len__(self) -> int:
        return len(self._calls)

    @torch.no_grad()
    def replay(self) -> Any:
        """Run the operators again on the same memory and return the same output objects."""
        for weak, alias in self._borrowed.values():
            if weak.expired():
                raise StaleGraphError(
                    f"{alias.nbytes()} bytes which this graph was captured on were freed since"
                )
        for func, args, kwargs, outputs in self._calls:
            result = func(*args, **kwargs)
            if func.namespace == "c10d":
                for work in tree_leaves(result):
                    if hasattr(work, "wait"):
                        work.wait()
            if outputs:
                for kept, fresh in zip(outputs, _fresh_outputs(func, result), strict=True):
                    kept.copy_(fresh)
        return self.output
