"""Engine tests of the patches need a patched SGLang first on the path: see ``ci/patches.sh``."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

PATCHED = os.environ.get("SGLANG_PATCHED")
"""Folder with the patched ``sglang`` package."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PATCHED:
        spec = find_spec("sglang")
        assert spec is not None
        assert str(spec.origin).startswith(PATCHED), f"{spec.origin} is not below {PATCHED}"
        return
    skip = pytest.mark.skip(reason="needs a patched SGLang: ci/patches.sh")
    for item in items:
        if item.path.parent.name == "patches" and item.get_closest_marker("engine"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As in ``tests/engine``."""
    from tests.engine.pairs import build_pair

    built = build_pair(tmp_path_factory.mktemp("pair"))
    return {"target": str(built.target), "draft": str(built.draft)}
