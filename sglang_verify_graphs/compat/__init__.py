"""The only place that names SGLang internals. It adapts, it never decides."""

from __future__ import annotations

from sglang_verify_graphs.compat.releases import Release, resolve_release, sglang_version

__all__ = ["Release", "resolve_release", "sglang_version"]
