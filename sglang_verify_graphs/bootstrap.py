"""Run by the wheel's ``.pth`` at interpreter start, only where the feature was asked for.

SGLang loads no plugins in some processes (Ray actors, old releases) and loads none at all that a
``SGLANG_PLUGINS`` whitelist leaves out. This road makes sure that the wrappers are applied in the
first case, and that the second ends with a message instead of a server without the feature.
"""

from __future__ import annotations


def _on_server_args(module: object) -> None:
    """First SGLang module of every process; the scheduler may still be half imported here."""
    from sglang_verify_graphs.install import install_launcher, refuse_whitelist

    refuse_whitelist()
    install_launcher()


def _on_scheduler(module: object) -> None:
    from sglang_verify_graphs.nccl.reach import in_actor
    from sglang_verify_graphs.plugin import load

    load()
    if in_actor():
        from sglang_verify_graphs.compat.nccl import load_plugins

        load_plugins()


def _bootstrap() -> None:
    try:
        from wrapt import register_post_import_hook
    except ImportError:
        return  # a build environment: nothing of SGLang is imported there
    register_post_import_hook(_on_server_args, "sglang.srt.server_args")
    register_post_import_hook(_on_scheduler, "sglang.srt.managers.scheduler")


_bootstrap()
