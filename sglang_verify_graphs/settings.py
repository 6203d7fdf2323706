"""Command line flags, one frozen ``Settings``, and the environment variable that carries it.

The environment variable is the only carrier that every release's worker processes see: ServerArgs
is sealed in the newer ones, and spawned children inherit the launcher's environment.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.nccl import profiles

ENV = "SGLANG_VERIFY_GRAPHS"
FLAG = "--enable-verify-graphs"
_PREFIX = "--verify-graph-"
COSTS_FLAG = f"{_PREFIX}costs"
_SWITCHES = (
    "observe", "strict", "allow_untested", "cold_zero", "nccl_reapply", "nccl_force_ll128",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the user asked for; ``None`` means "derive it from the server arguments"."""

    steps: tuple[int, ...] | None = None
    """Draft step counts to capture; default 0..speculative_num_steps."""
    max_batch: int | None = None
    """Largest batch to capture, in requests; default max_running_requests."""
    memory_gb: float | None = None
    """GPU memory in GiB that graphs beyond SGLang's own (other widths, larger batches) may take
    on each rank."""
    observe: bool = False
    """Count, time and explain stock behaviour; change nothing."""
    strict: bool = False
    """Turn every refusal into a start-up error."""
    allow_untested: bool = False
    """Run on an SGLang release outside the tested list."""
    costs: str | None = None
    """File of measured round costs to start from (``calibrate`` writes it)."""
    cold_zero: bool = False
    """Rounds of 0 draft steps skip the draft extend, and their requests accept nothing after."""
    nccl_env: tuple[str, ...] = ()
    """``NAME=VALUE`` for NCCL on every rank; over the shell and over a profile."""
    nccl_profile: str | None = None
    """Named values for NCCL, where the shell says nothing."""
    nccl_reapply: bool = False
    """Set again in every worker what SGLang overwrites."""
    nccl_force_ll128: bool = False
    """Allow a NCCL_PROTO that turns LL128 on where NCCL would not; data may be corrupted."""
    nccl_shell: tuple[str, ...] | None = None
    """What the launcher's environment held before SGLang wrote there; None in the launcher."""
    nccl_driver: tuple[str, ...] | None = None
    """In a Ray actor, which inherits nothing: what the driver's environment held."""
    script: tuple[int, ...] = ()
    """Step counts to cycle through, one a decode round (tests and benchmarks; no flag)."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", _step_list("steps", self.steps))
        object.__setattr__(self, "script", _step_list("script", self.script, ordered=True))
        if self.max_batch is not None and (not _is_int(self.max_batch) or self.max_batch < 1):
            raise _bad("max_batch", self.max_batch, "it must be a whole number of requests >= 1")
        if self.memory_gb is not None and not (
            isinstance(self.memory_gb, (int, float))
            and not isinstance(self.memory_gb, bool)
            and 0 < self.memory_gb < float("inf")
        ):
            raise _bad("memory_gb", self.memory_gb, "it must be a number of GiB above 0")
        if self.costs is not None and not (isinstance(self.costs, str) and self.costs):
            raise _bad("costs", self.costs, "it must be a file that calibrate wrote")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "it must be true or false")
        for name in ("nccl_env", "nccl_shell", "nccl_driver"):
            pairs = getattr(self, name)
            if pairs is None and name != "nccl_env":
                continue
            if not isinstance(pairs, (tuple, list)) or not all(isinstance(p, str) for p in pairs):
                raise _bad(name, pairs, "it must be a list of NAME=VALUE")
            object.__setattr__(self, name, tuple(pairs))
        if self.nccl_profile is not None and not isinstance(self.nccl_profile, str):
            raise _bad("nccl_profile", self.nccl_profile, "it must be the name of a profile")
        if not self.nccl_force_ll128:
            profiles.refuse_ll128(self.nccl_requests())

    def nccl_requests(self) -> dict[str, profiles.Request]:
        """NCCL variables that are asked for, and by whom."""
        return profiles.requests(self.nccl_env, self.nccl_profile, self.nccl_shell or ())

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Parse the environment variable; unknown names and wrong types are errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(
                f"{ENV}={text[:80]!r} is not JSON ({error}); unset it and pass {FLAG} instead"
            ) from None
        if not isinstance(data, dict):
            raise SettingsError(f"{ENV}={text[:80]!r} is not a JSON object; unset it")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise SettingsError(
                f"{ENV} holds unknown names {unknown}; known are {sorted(known)} "
                "(two versions of sglang-verify-graphs on one machine?)"
            )
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return cls(**values)

    def steps_for(self, configured: int) -> tuple[int, ...]:
        """Step counts to capture, widest first; the configured one is always among them."""
        wanted = range(configured + 1) if self.steps is None else self.steps
        if above := [k for k in (*wanted, *self.script) if k > configured]:
            raise SettingsError(
                f"{_PREFIX}steps asks for {max(above)} draft steps but the server is configured "
                f"for {configured}, and KV is reserved for that; start with "
                f"--speculative-num-steps {max(above)} "
                f"--speculative-num-draft-tokens {max(above) + 1}"
            )
        return tuple(sorted({*wanted, *self.script, configured}, reverse=True))


def settings_from_env(environ: Mapping[str, str]) -> Settings | None:
    """Settings carried by ``environ``, or None where the feature was not asked for."""
    text = environ.get(ENV)
    return Settings.from_json(text) if text else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's parser; values stay text: a bad one gets one line, not a usage."""
    group = parser.add_argument_group(
        "verify graphs", "sglang-verify-graphs: CUDA graphs for every (batch, draft_steps) verify"
    )

    def add(flag: str, text: str, **kwargs: Any) -> None:
        group.add_argument(flag, dest=_dest(flag), help=text, **kwargs)

    def switch(flag: str, text: str) -> None:
        add(flag, text, action="store_true")

    switch(FLAG, "Capture a graph for each (batch, draft_steps) of EAGLE/EAGLE3 target verify.")
    add(
        f"{_PREFIX}steps",
        "Draft step counts to capture, e.g. 0,1,3 (default: 0 to the configured).",
    )
    add(f"{_PREFIX}max-batch", "Largest batch to capture (default: max running requests).")
    add(f"{_PREFIX}memory-gb", "GPU memory (GiB, each rank) for graphs beyond SGLang's own.")
    add(COSTS_FLAG, "File of measured round costs to start from (see calibrate).")
    switch(
        f"{_PREFIX}cold-zero",
        "Skip the draft extend in rounds of 0 draft steps; their requests accept nothing after.",
    )
    switch(f"{_PREFIX}observe", "Stock behaviour; count, time and explain it only.")
    switch(f"{_PREFIX}strict", "Refuse to start where the feature would otherwise be switched off.")
    switch(f"{_PREFIX}allow-untested", "Run on an SGLang release outside the tested list.")
    add(
        profiles.ENV_FLAG,
        "Set for NCCL on every rank, over the shell; may be given again.",
        action="extend",
        nargs="+",
        metavar="NAME=VALUE",
    )
    add(profiles.PROFILE_FLAG, f"Named NCCL values: {', '.join(profiles.PROFILES)}.")
    switch(profiles.REAPPLY_FLAG, "Set again in the workers what SGLang overwrites for NCCL.")
    switch(profiles.FORCE_FLAG, "Allow LL128 where NCCL would not use it; data may be corrupted.")


def settings_from_args(args: argparse.Namespace) -> Settings | None:
    """Settings from parsed flags, or None without ``--enable-verify-graphs``."""
    ours = ("verify_graph_", *map(_dest, profiles.FLAGS))
    given = {name: value for name, value in vars(args).items() if name.startswith(ours)}
    if not getattr(args, _dest(FLAG), False):
        if used := [f"--{n.replace('_', '-')}" for n, v in given.items() if v not in (None, False)]:
            raise SettingsError(f"{used[0]} does nothing without {FLAG}; add {FLAG}")
        return None
    get = {name.removeprefix("verify_graph_"): value for name, value in given.items()}
    return Settings(
        steps=None if get["steps"] is None else _parse_steps(get["steps"]),
        max_batch=_parse("max_batch", get["max_batch"], int, "a whole number of requests >= 1"),
        memory_gb=_parse("memory_gb", get["memory_gb"], float, "a number of GiB above 0"),
        costs=get["costs"],
        cold_zero=get["cold_zero"],
        observe=get["observe"],
        strict=get["strict"],
        allow_untested=get["allow_untested"],
        nccl_env=get["nccl_env"] or (),
        nccl_profile=get["nccl_profile"],
        nccl_reapply=get["nccl_reapply"],
        nccl_force_ll128=get["nccl_force_ll128"],
    )


def mentions_flags(argv: list[str]) -> bool:
    """Whether a command line needs our flags in its parser (``--config`` may hold them too)."""
    names = (FLAG, _PREFIX, *profiles.FLAGS, "--config", "--help")
    return any(word == "-h" or word.startswith(names) for word in argv)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad(name: str, value: object, need: str) -> SettingsError:
    prefix = "--" if name.startswith("nccl_") else _PREFIX
    return SettingsError(f"{prefix}{name.replace('_', '-')} {value!r}: {need}")


def _step_list(name: str, steps: Any, *, ordered: bool = False) -> tuple[int, ...]:
    listed = isinstance(steps, (tuple, list, range))
    values = tuple(steps) if listed else ()
    if not (listed and (values or ordered)) or not all(_is_int(k) and k >= 0 for k in values):
        raise _bad(name, steps, "it must be a list of draft step counts >= 0, for example 0,1,3")
    return values if ordered else tuple(sorted(set(values)))


def _parse_steps(text: str) -> tuple[int, ...]:
    words = str(text).replace(",", " ").split()
    if not words or not all(word.isdecimal() and len(word) < 10 for word in words):
        raise _bad("steps", text, "it must be a list of draft step counts >= 0, for example 0,1,3")
    return tuple(int(word) for word in words)


def _parse(name: str, text: str | None, kind: type, need: str) -> Any:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise _bad(name, text, f"it must be {need}") from None
