"""Entry point ``sglang.srt.plugins``: SGLang calls ``load`` in the launcher and in every worker."""

from __future__ import annotations


def load() -> None:
    """Install, or end the process with one line: SGLang logs an exception and goes on unpatched."""
    from sglang_verify_graphs.errors import SettingsError
    from sglang_verify_graphs.install import install

    try:
        install()
    except SettingsError as error:
        raise SystemExit(f"[verify-graphs] {error}") from None
