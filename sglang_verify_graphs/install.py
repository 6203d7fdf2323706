"""Applies the wrappers when SGLang's modules are imported, and takes them back by identity.

Seven wrappers in all, none of them on anything that is pickled:
``ServerArgs.add_cli_args``/``from_cli_args`` in the launcher, and in the scheduler process
``Scheduler.init_all_cuda_graphs`` (``init_model_worker`` in releases that capture there),
``Scheduler.get_internal_state`` and ``set_internal_state``, ``PyNcclCommunicator.__init__``, and
``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``, once a round. A Ray driver starts its
scheduler actors through one more object.
"""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wrapt

from sglang_verify_graphs.compat.facts import width_and_requests
from sglang_verify_graphs.compat.nccl import ACTOR, RAY
from sglang_verify_graphs.compat.patched import carried, mended
from sglang_verify_graphs.compat.preflight import (
    check,
    check_patches,
    check_values,
    check_worker,
    in_process,
    refused,
)
from sglang_verify_graphs.compat.releases import Release, resolve_release, sglang_version
from sglang_verify_graphs.compat.requirements import LAUNCHER, SCHEDULER, requirements_of
from sglang_verify_graphs.compat.source import Source
from sglang_verify_graphs.compat.source import installed as sglang_folder
from sglang_verify_graphs.control import KEYS
from sglang_verify_graphs.errors import SettingsError, UnsupportedError, VerifyGraphsError
from sglang_verify_graphs.nccl import reach
from sglang_verify_graphs.settings import (
    ENV,
    FLAG,
    Settings,
    add_arguments,
    mentions_flags,
    settings_from_args,
    settings_from_env,
)
from sglang_verify_graphs.startup import Report, capture_verify_graphs

logger = logging.getLogger("sglang_verify_graphs")

PLUGIN = "verify_graphs"
_SERVER_ARGS = LAUNCHER[0].module
_SCHEDULER = SCHEDULER
"""Modules whose import triggers a patch."""


@dataclass
class Patch:
    """One wrapped attribute: what was there, and what we put there."""

    owner: Any
    name: str
    original: Any
    ours: Any
    active: bool = True
    """False: the wrapper stays, below another library's, and passes every call through."""

    @property
    def there(self) -> Any:
        return self.owner.__dict__.get(self.name)


_patches: dict[str, Patch] = {}
_hooked: set[str] = set()
report = Report()


def install() -> None:
    """Wrap what the settings ask for, now or when SGLang imports it. Safe to call again."""
    install_launcher()
    install_scheduler()


def install_launcher() -> None:
    """Wrap the flag parser where a command line may name our flags."""
    launcher = multiprocessing.parent_process() is None  # a worker holds the launcher's argv
    if launcher and mentions_flags(sys.argv[1:]):
        _when_imported(_SERVER_ARGS, _patch_server_args)


def install_scheduler() -> None:
    """Wrap the scheduler where the environment carries settings."""
    settings = settings_from_env(os.environ)
    if settings is not None:
        refuse_whitelist()
        if settings.nccl_shell is None:
            reach.in_launcher(settings)
        _when_imported(_SCHEDULER, _patch_scheduler)
        for module in RAY:
            _when_imported(module, _patch_ray)


def uninstall(module: str = "") -> list[str]:
    """Put the originals back, of one module or all; names those that others have wrapped since.

    Taking our wrapper out from below another library's would take theirs out too: it stays there
    and passes calls through.
    """
    kept = []
    for target, patch in list(_patches.items()):
        if not target.startswith(module):
            continue
        if patch.there is patch.ours:
            setattr(patch.owner, patch.name, patch.original)
        elif patch.there is not patch.original:
            kept.append(target)
            if patch.active:
                logger.warning(
                    "[verify-graphs] another library wrapped %s after us: its wrapper stays, ours "
                    "passes calls through",
                    target,
                )
            patch.active = False
            continue
        del _patches[target]
    return kept


def installed() -> list[str]:
    """Targets wrapped in this process."""
    return sorted(
        target
        for target, patch in _patches.items()
        if patch.active and patch.there is not patch.original
    )


def refuse_whitelist() -> None:
    """A whitelist that leaves this plugin out would leave workers unpatched in silence."""
    if problem := left_out():
        raise SystemExit(f"[verify-graphs] {problem}")


def left_out() -> str:
    """Why SGLang will not load this plugin; empty where it will."""
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if not allowed or PLUGIN in allowed:
        return ""
    return (
        f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']!r} leaves out {PLUGIN!r}, which {FLAG} "
        f"needs; add it: SGLANG_PLUGINS={','.join([*sorted(allowed), PLUGIN])}"
    )


# -- mechanics -------------------------------------------------------------------------------------


def _when_imported(module: str, patch: Callable[[Any], None]) -> None:
    if module in sys.modules:
        patch(sys.modules[module])
    elif module not in _hooked:
        _hooked.add(module)
        wrapt.register_post_import_hook(patch, module)


def _wrap(module: Any, qualname: str, wrapper: Callable[..., Any]) -> None:
    """Put a plain function, static or class method in the place of ``qualname``.

    Not a ``wrapt`` proxy, which claims to be the class method that it wraps: SGLang's hook registry
    takes ``__func__`` of one, so that another plugin's hook would drop our wrapper in silence.
    """
    target = f"{module.__name__}:{qualname}"
    known = _patches.get(target)
    if known is not None and known.there is not known.original:
        known.active = True  # ours is in place, at the top or below another library's
        return
    owner_name, name = qualname.rsplit(".", 1)
    owner = getattr(module, owner_name)
    original = owner.__dict__[name]
    kind = next((k for k in (staticmethod, classmethod) if isinstance(original, k)), None)

    @functools.wraps(getattr(original, "__func__", original))
    def ours(*args: Any, **kwargs: Any) -> Any:
        instance = None  # the class, of a class method
        if kind is not staticmethod:
            instance, *rest = args
            args = tuple(rest)
        if kind is None:
            wrapped = original.__get__(instance, owner)
        else:
            wrapped = original.__get__(None, instance or owner)
        if not patch.active:
            return wrapped(*args, **kwargs)
        return wrapper(wrapped, instance, args, kwargs)

    patch = _patches[target] = Patch(owner, name, original, kind(ours) if kind else ours)
    setattr(owner, name, patch.ours)


# -- launcher --------------------------------------------------------------------------------------


def _patch_server_args(module: Any) -> None:
    if problems := refused(check(LAUNCHER, in_process)):
        logger.error("[verify-graphs] off: %s; use a tested SGLang release", problems[0])
        return
    for need, wrapper in zip(LAUNCHER, (_add_cli_args, _from_cli_args), strict=True):
        _wrap(module, need.qualname, wrapper)


def _add_cli_args(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    add_arguments(args[0] if args else kwargs["parser"])
    return result


def _from_cli_args(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    namespace = args[0] if args else kwargs["args"]
    try:
        settings = settings_from_args(namespace)
        if settings is not None:
            refuse_whitelist()
            _check_release(settings)
            settings = reach.in_launcher(settings)  # before SGLang looks at the environment
        server_args = wrapped(*args, **kwargs)
        if settings is not None:
            _check_steps(settings, server_args)
    except SettingsError as error:
        raise SystemExit(f"[verify-graphs] {error}") from None
    uninstall(_SERVER_ARGS)  # the flags are parsed
    install_scheduler()
    return server_args


def _check_release(settings: Settings) -> None:
    """Under ``--verify-graph-strict`` an unknown release ends here, not after the model loaded."""
    try:
        resolve_release(sglang_version(), allow_untested=settings.allow_untested)
    except UnsupportedError as error:
        if settings.strict:
            raise SystemExit(f"[verify-graphs] not started: {error}") from None


def _check_steps(settings: Settings, server_args: Any) -> None:
    configured = getattr(server_args, "speculative_num_steps", None)
    if isinstance(configured, int) and not settings.observe:
        settings.steps_for(configured)


# -- scheduler process -----------------------------------------------------------------------------


def _patch_ray(module: Any) -> None:
    """Actors inherit nothing: hand them the settings where the driver starts them."""
    actors = getattr(module, ACTOR, None)
    if os.environ.get(ENV) and actors is not None and not isinstance(actors, reach.Actors):
        ours = reach.Actors(actors)
        _patches[f"{module.__name__}:{ACTOR}"] = Patch(module, ACTOR, actors, ours)
        setattr(module, ACTOR, ours)


def _patch_scheduler(module: Any) -> None:
    settings = settings_from_env(os.environ)
    if settings is None:
        return  # disabled before SGLang was imported
    reach.in_worker(settings)
    try:
        # Whether the release may be served is decided, and said, at the capture.
        release = resolve_release(sglang_version(), allow_untested=True)
    except UnsupportedError as error:
        _switch_off(str(error))
        return
    for need in requirements_of(release).scheduler:
        if problems := refused(check((need,), in_process)):
            _switch_off(f"{problems[0]}; install a tested SGLang release")
        else:
            wrapper = _WRAPPERS[need.qualname.split(".")[1]]
            _wrap(importlib.import_module(need.module), need.qualname, wrapper)


def _communicator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    reach.at_first_communicator(log=not report.reasons)  # off: nobody would read it
    wrapped(*args, **kwargs)


def _switch_off(why: str) -> None:
    settings = settings_from_env(os.environ)
    report.sglang = sglang_version()
    report.switch_off(f"off: {why}", strict=settings is not None and settings.strict)


def _init_all_cuda_graphs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    settings = settings_from_env(os.environ)
    if settings is None:
        wrapped(*args, **kwargs)
        return
    global report
    report = Report()
    try:
        _capture(instance, settings, lambda: wrapped(*args, **kwargs))
    finally:
        reach.forget_log()  # read by now, or never


def _capture(scheduler: Any, settings: Settings, stock_capture: Callable[[], None]) -> None:
    try:
        release = _usable_release(settings)
    except VerifyGraphsError as error:
        _switch_off(str(error))
        stock_capture()
        return
    capture_verify_graphs(scheduler, settings, release, report, stock_capture)


def _usable_release(settings: Settings) -> Release:
    release = resolve_release(sglang_version(), allow_untested=settings.allow_untested)
    source = Source(sglang_folder() or Path())
    patches = carried(release, source)
    release = mended(release, patches)
    report.preflight = (
        *check_worker(requirements_of(release), in_process),
        *check_values(release, source),
        *check_patches(patches),
    )
    if problems := refused(report.preflight):
        raise UnsupportedError(
            f"SGLang {release.version} is not what this package knows: {problems[0]}; "
            "install a tested release"
        )
    return release


def _get_internal_state(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if os.environ.get(ENV):
        if report.metrics is not None:
            report.metrics.publish()  # /metrics says what this answer says
        result.internal_state["verify_graphs"] = report.as_dict()
    return result


def _set_internal_state(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    asked = (args[0] if args else kwargs["recv_req"]).server_args
    ours = {key: asked[key] for key in KEYS if key in asked}
    taken = not ours or report.change(ours)
    if taken:
        for key in ours:
            del asked[key]
    answer = wrapped(*args, **kwargs)  # which refuses what it does not know,
    if not taken:
        answer.updated = False  # and in older releases says that it did not
    return answer


def _resolve_spec_v2_tokens(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if (controller := report.controller) is not None:
        controller.feedback.result(*width_and_requests(*args, **kwargs))
    return wrapped(*args, **kwargs)


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "init_all_cuda_graphs": _init_all_cuda_graphs,
    "init_model_worker": _init_all_cuda_graphs,
    "get_internal_state": _get_internal_state,
    "set_internal_state": _set_internal_state,
    "__init__": _communicator,
    "_resolve_spec_v2_tokens": _resolve_spec_v2_tokens,
}
