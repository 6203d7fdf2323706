"""NCCL variables that are asked for: by flag, by named profile, or found in the shell.

Which of them wins, which names are accepted at all, and which values are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.nccl.evidence import FLAG, SHELL

ENV_FLAG, PROFILE_FLAG = "--nccl-env", "--nccl-profile"
FORCE_FLAG, REAPPLY_FLAG = "--nccl-force-ll128", "--nccl-reapply"
FLAGS = (ENV_FLAG, PROFILE_FLAG, FORCE_FLAG, REAPPLY_FLAG)

OTHERS = ("CUDA_DEVICE_MAX_CONNECTIONS", "SGLANG_NCCL_SO_PATH")
"""Variables that act on NCCL without its prefix: SGLang sets the first and reads the second."""

_NAME = re.compile(r"NCCL_(?!VERSION$)[A-Z0-9_]+")  # NVIDIA's CUDA images say theirs so


class Request(NamedTuple):
    """A value that was asked for, and by whom (``Variable.source``)."""

    value: str
    source: str


@dataclass(frozen=True)
class Profile:
    """Values that belong together on some hardware."""

    values: Mapping[str, str]
    hardware: str
    needs: tuple[int, int] = (2, 4)
    """Oldest NCCL whose syntax this is."""


# NCCL user guide, "Environment Variables": NCCL_PROTO and NCCL_ALGO (a list for each function since
# 2.24), NCCL_P2P_LEVEL. LL sends a flag with every word, half the bandwidth at best: prefill pays.
PROFILES: Mapping[str, Profile] = {
    "pcie-ll": Profile(
        {
            "NCCL_PROTO": "allreduce:LL",
            "NCCL_ALGO": "allreduce:ring",
            "NCCL_P2P_LEVEL": "SYS",
        },
        "2 to 8 GPUs of one host without NVLink, decode latency before prefill bandwidth",
        (2, 24),
    ),
    "pcie-p2p": Profile(
        {"NCCL_P2P_LEVEL": "SYS"}, "GPUs of one host without NVLink, on several sockets"
    ),
    "no-ll128": Profile({"NCCL_PROTO": "^LL128"}, "any where LL128 is under suspicion"),
}


def accepted(name: str) -> bool:
    """Whether this is a variable that we set, carry to workers and report."""
    return name in OTHERS or _NAME.fullmatch(name) is not None


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping; a later one wins."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not accepted(name):
            raise SettingsError(
                f"{ENV_FLAG}: {name!r} is no NCCL variable; give a NCCL_ name or one of "
                f"{', '.join(OTHERS)}"
            )
        if not equals or not value.isprintable() or not value.strip():
            raise SettingsError(f"{ENV_FLAG} {name}: it must be NAME=VALUE with a value")
        found[name] = value.strip()
    return found


def as_pairs(values: Mapping[str, str]) -> tuple[str, ...]:
    """The NCCL variables of an environment, as ``parse_pairs`` reads them."""
    return tuple(
        f"{name}={value.strip()}"
        for name, value in sorted(values.items())
        if accepted(name) and value.strip() and value.isprintable()
    )


def requests(flags: Iterable[str], profile: str | None, shell: Iterable[str]) -> dict[str, Request]:
    """What is asked for, by name: a flag over the shell, the shell over a profile."""
    chosen: dict[str, Request] = {}
    if profile is not None:
        if profile not in PROFILES:
            raise SettingsError(
                f"{PROFILE_FLAG} {profile!r} is unknown; known are {', '.join(sorted(PROFILES))}"
            )
        values = PROFILES[profile].values
        chosen = {name: Request(value, f"profile {profile}") for name, value in values.items()}
    for source, pairs in ((SHELL, shell), (FLAG, flags)):
        chosen |= {name: Request(value, source) for name, value in parse_pairs(pairs).items()}
    return chosen


def forces_ll128(protocols: str) -> bool:
    """Whether this ``NCCL_PROTO`` turns LL128 on where NCCL itself would leave it off.

    A list that names it does, and so does one that excludes others: what a ``^`` list does not name
    is on by the user's word, and NCCL then checks no hardware (``parseList`` in NCCL's
    ``src/graph/tuning.cc``).
    """
    for entry in protocols.split(";"):
        names = entry.rpartition(":")[2].strip()
        named = "ll128" in names.removeprefix("^").lower().replace(" ", "").split(",")
        if named is not names.startswith("^"):
            return True
    return False


def refuse_ll128(chosen: Mapping[str, Request]) -> None:
    """LL128 needs stores of 128 bytes that stay whole: elsewhere it corrupts data in silence."""
    asked = chosen.get("NCCL_PROTO")
    if asked is not None and forces_ll128(asked.value):
        raise SettingsError(
            f"NCCL_PROTO={asked.value!r} ({asked.source}) turns LL128 on even where NCCL finds it "
            f"unsafe, and data may be corrupted in silence; unset it, use ^LL128, or add "
            f"{FORCE_FLAG} to accept that"
        )
