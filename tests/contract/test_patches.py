"""The series in ``patches/``: their headers are whole, and the ledger says what they say.

That they apply, revert and do what they claim is ``ci/patches.sh``'s.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_verify_graphs.compat.patched import carried, mended
from sglang_verify_graphs.compat.preflight import DEFECTS, State, defects
from sglang_verify_graphs.compat.releases import RELEASES, resolve_release
from sglang_verify_graphs.compat.requirements import requirements_of
from sglang_verify_graphs.compat.source import Source
from tests.contract.conftest import source_of

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


# -- what the plugin sees of them ------------------------------------------------------------------


def patched(stock: Path, target: Path, patches: list[Path]) -> Source:
    """What the patches touch of a release, with these applied."""
    names = {name for patch in PATCHES for name in files_of(patch)}
    for name in filter(lambda name: (stock / name).is_file(), names):
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes((stock / name).read_bytes())
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(target.parent)}
    for patch in patches:
        command = ["git", "apply", "--include=sglang/*", str(patch)]
        subprocess.run(command, cwd=target, env=env, check=True)
    return Source(target)


@pytest.mark.parametrize("version", LEDGER.series())
def test_each_patch_is_seen_and_only_where_it_is(version: str, tmp_path: Path) -> None:
    release = resolve_release(version, allow_untested=False)
    stock = source_of(release)
    assert carried(release, stock) == ()
    before: list[Path] = []
    for n, patch in enumerate(LEDGER.series()[version]):
        before.append(patch.path)
        source = patched(stock.root, tmp_path / str(n), before)
        known = {p.name for p in LEDGER.series()[version][: n + 1]}
        assert set(carried(release, source)) == known


def test_no_other_release_carries_one() -> None:
    for release in RELEASES:
        assert carried(release, source_of(release)) == ()


@pytest.mark.parametrize("version", LEDGER.series())
def test_what_is_mended_is_not_needed(version: str) -> None:
    release = resolve_release(version, allow_untested=False)
    names = [patch.name for patch in LEDGER.series()[version]]
    stock, with_patches = defects(release), defects(release, names)
    left = {d.name for d, row in zip(DEFECTS, with_patches, strict=True) if d.patch in names}
    for before, after in zip(stock, with_patches, strict=True):
        assert after.state is (State.NOT_NEEDED if after.name in left else before.state)
    faults = [row for row in stock if row.name in left and row.state is State.APPLIED]
    assert faults


def test_mended_capabilities_take_their_requirements_along() -> None:
    release = resolve_release("0.5.17", allow_untested=False)
    assert len(requirements_of(release).capture) == 4
    assert len(requirements_of(mended(release, ["draft-extend-width"])).capture) == 3
    both = mended(release, ["draft-extend-width", "wide-candidates"])
    assert len(requirements_of(both).capture) == 2
    assert mended(release, ["cheap-switch", "gate-reason"]) == release
