"""The series in ``patches/``: their headers are whole, and the ledger says what they say.

That they apply, revert and do what they claim is ``ci/patches.sh``'s.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(ROOT.glob("patches/*/*.patch"))

pytestmark = pytest.mark.contract


def _ledger() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ledger", ROOT / "ci" / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ledger"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


LEDGER = _ledger()


def files_of(patch: Path) -> list[str]:
    return re.findall(r"^diff --git a/(\S+) b/\S+$", patch.read_text(), re.M)


def test_the_ledger_is_generated_from_the_patches() -> None:
    assert (ROOT / "patches" / "README.md").read_text() == LEDGER.ledger(), "python ci/ledger.py"


def test_every_release_of_the_series_is_there() -> None:
    assert list(LEDGER.series()) == ["0.5.9", "0.5.17", "0.5.23"]


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: f"{p.parent.name}-{p.name[:4]}")
def test_a_patch_brings_code_and_the_test_that_it_names(path: Path) -> None:
    patch, files = LEDGER.read(path), files_of(path)
    tests = [name for name in files if name.startswith("test/registered/unit/")]
    assert tests == [patch.fields["Test"]]
    assert [name for name in files if not name.startswith("sglang/srt/")] == tests
    assert len(files) > 1


@pytest.mark.parametrize("release", LEDGER.series())
def test_what_a_patch_depends_on_comes_before_it(release: str) -> None:
    before: set[str] = set()
    for patch in LEDGER.series()[release]:
        needed = patch.fields.get("Depends-On")
        assert needed is None or needed in before
        assert patch.name not in before
        before.add(patch.name)
