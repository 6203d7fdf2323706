"""What the C side of this process has: its environment, the NCCL libraries it loaded."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

_LIBRARY = re.compile(r"libnccl\.so[.\d]*$")


def c_environment() -> dict[str, str]:
    """The environment as ``getenv`` sees it: also what C code set, and Python does not know."""
    table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, str] = {}
    index = 0
    while table and (entry := table[index]) is not None:
        name, _, value = os.fsdecode(entry).partition("=")
        found.setdefault(name, value)  # getenv gives the first
        index += 1
    return found


def nccl_libraries(environ: Mapping[str, str], maps: str | None = None) -> list[str]:
    """Files of NCCL that are mapped into this process; ``SGLANG_NCCL_SO_PATH`` may name one."""
    own = os.path.realpath(environ.get("SGLANG_NCCL_SO_PATH") or "/")
    text = Path("/proc/self/maps").read_text(encoding="utf-8") if maps is None else maps
    paths = dict.fromkeys(line.split(maxsplit=5)[-1].strip() for line in text.splitlines())
    return [path for path in paths if path == own or _LIBRARY.search(path)]


def library_version(path: str) -> str | None:
    """By ``ncclGetVersion`` of a library that is loaded already."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    scale = 10000 if number.value >= 10000 else 1000  # NCCL_VERSION_CODE: wider since 2.9
    major, rest = divmod(number.value, scale)
    return f"{major}.{rest // 100}.{rest % 100}"


def reopen_log(path: str) -> bool:
    """Have NCCL read its ``NCCL_DEBUG`` variables again; False where it cannot.

    NCCL exports this, deprecated as a part of its API, for this use (``src/debug.cc``).
    """
    try:
        reset = ctypes.CDLL(path).ncclResetDebugInit
    except (OSError, AttributeError):
        return False
    reset.restype = None
    reset()
    return True
