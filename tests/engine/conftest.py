"""Engine tests need the virtual environment of one SGLang release."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

HAS_ENGINE = find_spec("sglang") is not None and find_spec("torch") is not None
collect_ignore_glob = [] if HAS_ENGINE else ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if HAS_ENGINE else "engine tests: left out, no SGLang in this environment"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target and its EAGLE-3 draft as `EngineConfig` wants them; accept length 2.7 at 3 steps."""
    from tests.engine.pairs import build_pair

    built = build_pair(tmp_path_factory.mktemp("pair"))
    return {"target": str(built.target), "draft": str(built.draft)}
