"""Brings NCCL variables into the launcher, its workers and Ray actors, before any communicator.

Spawned workers inherit the launcher's environment, so what is set there before SGLang looks is set
everywhere on the host; other nodes have launchers of their own. Ray actors inherit nothing: the
settings travel in their runtime environment.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_verify_graphs.compat.nccl import SGLANG_WRITES, installed_version
from sglang_verify_graphs.errors import SettingsError
from sglang_verify_graphs.nccl.evidence import FLAG, SHELL
from sglang_verify_graphs.nccl.native import c_environment, nccl_libraries, reopen_log
from sglang_verify_graphs.nccl.profiles import (
    PROFILE_FLAG,
    PROFILES,
    REAPPLY_FLAG,
    Request,
    accepted,
    as_pairs,
    parse_pairs,
    refuse_ll128,
)
from sglang_verify_graphs.settings import ENV, Settings, settings_from_env

logger = logging.getLogger("sglang_verify_graphs")

HOST_ONLY = frozenset(
    {
        "NCCL_CONF_FILE",
        "NCCL_GRAPH_FILE",
        "NCCL_HOSTID",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "NCCL_TOPO_FILE",
        "SGLANG_NCCL_SO_PATH",
    }
)
"""Devices and files of one host: another node's actors do not take them over."""

DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,TUNING"}
DEBUG_FILE = "NCCL_DEBUG_FILE"


@dataclass
class Worker:
    """What is known of this process's NCCL variables, from its start on."""

    requested: dict[str, Request] = field(default_factory=dict)
    overwritten: dict[str, str] = field(default_factory=dict)
    """Who had replaced a requested value by the time the worker started."""
    first: dict[str, str] | None = None
    """The C environment when the first communicator was made; None before."""
    log: Path | None = None
    """Where NCCL writes its log, until it is read."""


worker = Worker()
_replaced: dict[str, str | None] = {}
"""What our values took the place of, in the launcher."""


def in_launcher(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> Settings:
    """Set what is asked for before SGLang looks; gives the settings that the workers read.

    Raises ``SettingsError`` for a value that may not be used here, and then changes nothing.
    """
    shell = {**environ, **{name: value or "" for name, value in _replaced.items()}}
    settings = replace(settings, nccl_shell=as_pairs(shell))
    needs, found = (2, 0), installed_version()
    if settings.nccl_profile is not None:
        needs = PROFILES[settings.nccl_profile].needs
    if found is not None and found[: len(needs)] < needs:
        raise SettingsError(
            f"{PROFILE_FLAG} {settings.nccl_profile} needs NCCL {'.'.join(map(str, needs))} or "
            f"newer, {'.'.join(map(str, found))} is installed; update it or drop the profile"
        )
    undo(environ)
    for name, (value, source) in settings.nccl_requests().items():
        if source == SHELL:
            continue
        if name in SGLANG_WRITES:
            logger.warning(
                "[verify-graphs] %s=%s (%s): SGLang sets this one itself under %s",
                name, value, source, SGLANG_WRITES[name],
            )  # fmt: skip
        _replaced[name] = environ.get(name)
        environ[name] = value
    environ[ENV] = settings.to_json()
    return settings


def undo(environ: MutableMapping[str, str] = os.environ) -> None:
    """Put back what ``in_launcher`` replaced."""
    for name, value in _replaced.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    _replaced.clear()


def in_worker(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what did not arrive, and notice what was replaced on the way.

    A Ray actor has the environment of its raylet, which is that node's shell: a flag wins over it.
    """
    global worker
    worker = Worker(settings.nccl_requests())
    own = dict(environ)
    for name, value in parse_pairs(settings.nccl_driver or ()).items():
        asked = worker.requested.get(name)
        if name not in own or (asked is not None and asked.source == FLAG):
            environ[name] = value
    for name, (value, _) in worker.requested.items():
        found = environ.setdefault(name, value)
        if found == value:
            continue
        if settings.nccl_driver is not None and found == own.get(name):
            worker.overwritten[name] = "the environment of this node"
            continue
        worker.overwritten[name] = _who(name)
        if settings.nccl_reapply:
            environ[name] = value
    if not settings.nccl_force_ll128 and "NCCL_PROTO" in environ:
        refuse_ll128({"NCCL_PROTO": Request(environ["NCCL_PROTO"], "in this worker")})


def at_first_communicator(
    environ: MutableMapping[str, str] = os.environ, *, log: bool = True
) -> None:
    """NCCL reads most variables once, now: what is set later does nothing.

    Where a value is to be proved, and the user has no NCCL log of his own, NCCL writes one for us.
    """
    if worker.first is not None:
        return
    worker.first = nccl_variables(c_environment())
    if log and worker.requested and not {*DEBUG, DEBUG_FILE} & set(environ):
        worker.log = Path(tempfile.mkdtemp(prefix="verify-graphs-nccl-"), "log")
        environ.update(DEBUG | {DEBUG_FILE: str(worker.log)})


def stop_log(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL write no more, so that serving does not pay for it."""
    for name in (*DEBUG, DEBUG_FILE):
        environ.pop(name, None)
    for library in nccl_libraries(environ):
        reopen_log(library)


def forget_log() -> None:
    """Stop and remove the log that was asked for, if there is one."""
    if worker.log is not None:
        stop_log()
        shutil.rmtree(worker.log.parent, ignore_errors=True)
        worker.log = None


def for_actors(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that a Ray scheduler actor needs to become a worker as any other."""
    settings = settings_from_env(environ)
    if settings is None:
        return {}
    asked = settings.nccl_requests()
    flags = {name for name, request in asked.items() if request.source == FLAG}
    held = {
        name: value
        for name, value in nccl_variables(environ).items()
        if name in flags or name not in HOST_ONLY
    }
    shell = tuple(
        pair for pair in settings.nccl_shell or () if pair.partition("=")[0] not in HOST_ONLY
    )
    return {ENV: replace(settings, nccl_shell=shell, nccl_driver=as_pairs(held)).to_json()}


def in_actor(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a Ray actor that a driver of ours started."""
    settings = settings_from_env(environ)
    return settings is not None and settings.nccl_driver is not None


class Actors:
    """SGLang's scheduler actor class, started with ``for_actors`` in its runtime environment."""

    def __init__(self, actors: Any) -> None:
        self._actors = actors

    def __getattr__(self, name: str) -> Any:
        if name == "_actors":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._actors, name)

    def options(self, **options: Any) -> Any:
        """As Ray's; values of a given runtime environment stay."""
        runtime = dict(options.pop("runtime_env", None) or {})
        runtime["env_vars"] = for_actors() | dict(runtime.get("env_vars") or {})
        return self._actors.options(**options, runtime_env=runtime)


def nccl_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that are ours to report."""
    return {name: value for name, value in environ.items() if accepted(name)}


def _who(name: str) -> str:
    if name in SGLANG_WRITES:
        return f"SGLang ({SGLANG_WRITES[name]})"
    return f"something in the launcher, after its flags were read; see {REAPPLY_FLAG}"
