"""What one rank knows of its NCCL: collected in the worker, judged anywhere.

Evidence travels between ranks and over HTTP as JSON, so reading it back trusts nothing.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from sglang_verify_graphs.errors import EvidenceError

FLAG, SHELL, SGLANG = "flag", "shell", "SGLang"
"""Values of ``Variable.source``; a profile is ``profile NAME``. What only the C environment holds
comes from an ``nccl.conf``, which NCCL loads without a word (misc/param.cc, ``setEnvFile``)."""

UNKNOWN = "unknown"
HIDDEN = "(hidden)"
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?:^|_)(?:API)?KEY", re.IGNORECASE)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Choice:
    """How NCCL carries one collective of one size, from a line of its TUNING subsystem."""

    collective: str
    """NCCL's name: AllReduce, AllGather, ReduceScatter, Broadcast, ..."""
    bytes: int
    """Elements times their size, as NCCL counts them for the collective."""
    algorithm: str
    """RING, TREE, NVLS, ...; ``Symmetric`` or ``Copy Engine`` where the tuner was not asked."""
    protocol: str
    """LL, LL128 or SIMPLE; the kernel's name where the algorithm is none."""
    channels: int
    """0 where the line names none."""

    def __str__(self) -> str:
        return (
            f"{self.algorithm} {self.protocol} on {self.channels} channels for {self.collective} "
            f"of {self.bytes} bytes"
        )


@dataclass(frozen=True)
class NcclLog:
    """What NCCL itself reported in the log of one rank (``NCCL_DEBUG=INFO``)."""

    version: str | None = None
    read: Mapping[str, str] = field(default_factory=dict)
    """Variables that NCCL says it read from the environment, and the value it understood."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Variables that NCCL says it does not follow, and its reason."""
    choices: tuple[Choice, ...] = ()
    """Distinct ones, in order. NCCL prints them on rank 0 of a communicator alone."""
    channels: int | None = None
    """Channels for collectives, of the communicator that came up last."""
    transports: tuple[str, ...] = ()
    """Distinct ones between peers, such as ``P2P/CUMEM``, ``SHM/direct/direct``, ``NET/IB/0``."""
    communicators: int = 0
    """How many were reported complete."""
    unreadable: int = 0
    """Lines that are damaged or cut, or that the parser had no room for."""


@dataclass(frozen=True)
class Variable:
    """One environment variable in one rank."""

    name: str
    requested: str | None
    """What the user asked for, by flag, profile or shell."""
    effective: str | None
    """What ``getenv`` of the C library gives, which is what NCCL sees."""
    source: str
    python: str | None
    """What ``os.environ`` says."""
    late: bool = False
    """Set after this process's first communicator."""
    overwritten_by: str | None = None
    """Who replaced the requested value, for example ``SGLang (--enable-nccl-nvls)``."""


@dataclass(frozen=True)
class Bypass:
    """A path that carries small messages past NCCL."""

    path: str
    """``custom all-reduce``, ``fusion``, ``symmetric memory``."""
    below_bytes: int
    """Messages smaller than this take it."""
    collective: str = "AllReduce"

    def __str__(self) -> str:
        return f"{self.path} ({self.collective} below {self.below_bytes} bytes)"


@dataclass(frozen=True)
class RankEvidence:
    """All that one rank knows; ``ranks`` of a server is a list of these, judged."""

    rank: int
    world_size: int
    node: str
    nccl_version: str | None
    """By ``ncclGetVersion``, as ``2.27.3``."""
    library: str | None
    """Path of the mapped ``libnccl``."""
    packaged_version: str | None
    """Of the installed ``nvidia-nccl-*`` distribution, as ``2.27.3``."""
    communicator_up: bool
    variables: tuple[Variable, ...] = ()
    log: NcclLog | None = None
    bypasses: tuple[Bypass, ...] = ()
    problem: str = ""
    """Why the rest is missing."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> RankEvidence:
        """Evidence from parsed JSON; anything that is not of its shape is an error."""
        return decode(cls, data, "evidence")


def shown(name: str, value: str | None) -> str | None:
    """The value, or a mark in its place where the name looks like that of a secret."""
    return HIDDEN if value is not None and _SECRET.search(name) else value


def decode(kind: type[_T], value: object, where: str) -> _T:
    """``value`` of parsed JSON as a ``kind``: a dataclass of this package and what it holds."""
    result: _T = _decode(kind, value, where)
    return result


def _decode(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        members = get_args(kind)
        return value if type(value) in members else _decode(members[0], value, where)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        given = {k: _decode(hints[k], v, f"{where}.{k}") for k, v in value.items() if k in hints}
        needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
        if needed <= set(given) and len(given) == len(value):
            return kind(**given)  # type: ignore[operator]
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_decode(get_args(kind)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    elif get_origin(kind) is Mapping and isinstance(value, dict):
        return {
            _decode(str, k, where): _decode(get_args(kind)[1], v, where) for k, v in value.items()
        }
    elif type(value) is kind:
        return value
    raise EvidenceError(
        f"{where} does not have the shape of {getattr(kind, '__name__', kind)}; "
        "use the same sglang-verify-graphs on every rank and here"
    )
