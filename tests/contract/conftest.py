"""The unpacked wheels: ``ci/sources.sh`` puts them where these tests look."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_verify_graphs.compat.releases import RELEASES, Release
from tests.contract.source import Source

ROOT = Path(__file__).resolve().parents[2]


def sources() -> Path:
    """Folder with one folder of source per release; SGLANG_SOURCES names another one."""
    return Path(os.environ.get("SGLANG_SOURCES") or ROOT / ".cache" / "sglang")


_known: dict[str, Source] = {}


_MODERN = [release for release in RELEASES if not release.one_width]
_LEGACY = [release for release in RELEASES if release.one_width]


@pytest.fixture(params=_MODERN, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    """A release whose worker steps between states; ``test_legacy.py`` has the others."""
    return request.param


@pytest.fixture(params=_LEGACY, ids=lambda release: release.version)
def legacy(request: pytest.FixtureRequest) -> Release:
    return request.param


@pytest.fixture
def source(release: Release) -> Source:
    return source_of(release)


def source_of(release: Release) -> Source:
    """The unpacked wheel of a release."""
    if release.version not in _known:
        root = sources() / release.version
        if not (root / "sglang").is_dir():
            message = f"no source of SGLang {release.version}: run ci/sources.sh {release.version}"
            if os.environ.get("SGLANG_SOURCES"):
                pytest.fail(f"{message} (SGLANG_SOURCES={os.environ['SGLANG_SOURCES']})")
            pytest.skip(message)
        _known[release.version] = Source(root)
    return _known[release.version]
