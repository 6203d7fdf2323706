"""``doctor`` on the real source of every release, without importing any of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from sglang_verify_graphs.cli import main
from sglang_verify_graphs.compat.preflight import (
    DEFECTS,
    check,
    check_values,
    check_worker,
    in_source,
)
from sglang_verify_graphs.compat.releases import RELEASES, Release
from sglang_verify_graphs.compat.requirements import requirements_of
from sglang_verify_graphs.compat.source import Source
from sglang_verify_graphs.compat.values import attributes
from tests.contract.conftest import sources
from tests.unit.test_install import ROOT, needs_pth

RUN = """
import sys
from sglang_verify_graphs.cli import main
main()
print([name for name in ("torch", "sglang") if name in sys.modules])
"""


@pytest.fixture(autouse=True)
def no_whitelist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


@pytest.fixture(params=RELEASES, ids=lambda release: release.version)
def release(request: pytest.FixtureRequest) -> Release:
    return request.param


@pytest.fixture
def wheel(release: Release) -> Path:
    root = sources() / release.version
    if not root.is_dir():
        pytest.skip(f"no source of SGLang {release.version}: run ci/sources.sh {release.version}")
    return root


@pytest.fixture
def newest() -> Path:
    root = sources() / RELEASES[-1].version
    if not root.is_dir():
        pytest.skip(f"no source: run ci/sources.sh {RELEASES[-1].version}")
    return root


def doctor(capsys: pytest.CaptureFixture[str], root: Path) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", "--sglang", str(root)])
    return status, json.loads(capsys.readouterr().out)


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [r for r in found["rows"] if name in r["name"]]
    return one


def copy_of(newest: Path, target: Path) -> Path:
    """What doctor reads of a release, to change a line of it."""
    source, needs = Source(newest), requirements_of(RELEASES[-1])
    check(needs.launcher, in_source(source))
    check_worker(needs, in_source(source))
    check_values(RELEASES[-1], source)
    names = {*source._trees, "sglang.srt.plugins"}
    for path in filter(None, map(source._path, names)):
        copied = target / path.relative_to(newest)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes())
    for metadata in newest.glob("sglang-*.dist-info"):
        shutil.copytree(metadata, target / metadata.name)
    return target


# -- every release ---------------------------------------------------------------------------------


@pytest.mark.contract
@needs_pth
def test_it_names_every_patch_and_serves(
    capsys: pytest.CaptureFixture[str], wheel: Path, release: Release
) -> None:
    status, found = doctor(capsys, wheel)
    refused = [r for r in found["rows"] if r["state"] == "refused"]
    assert (status, refused, found["served"]) == (0, [], True)
    assert found["sglang"] == release.version
    named = [r["name"] for r in found["rows"] if r["kind"] in ("patch", "call")]
    assert named == [str(need) for need in requirements_of(release)]
    values = [r["name"] for r in found["rows"] if r["kind"] == "values"]
    assert values == list(attributes(release))
    defects = {r["name"]: r["state"] for r in found["rows"] if r["kind"] == "defect"}
    assert defects == {d.name: "applied" if d.present(release) else "not needed" for d in DEFECTS}
    assert found["capabilities"].items() <= vars(release).items()
    assert len(found["capabilities"]) == len(vars(release)) - 2


@pytest.mark.contract
@needs_pth
def test_the_text_says_what_the_json_says(
    capsys: pytest.CaptureFixture[str], wheel: Path, release: Release
) -> None:
    _, found = doctor(capsys, wheel)
    assert main(["doctor", "--sglang", str(wheel)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == f"SGLang {release.version} in {wheel}"
    assert lines[-1] == "served"
    assert len(lines) == len(found["rows"]) + len(found["capabilities"]) + 2
    for one in (*(r["name"] for r in found["rows"]), *found["capabilities"]):
        assert one in text


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.contract
@needs_pth
@pytest.mark.parametrize(
    ("file", "old", "new", "name", "reason"),
    [
        ("managers/scheduler.py", "def get_internal_state(", "def get_state(",
         "Scheduler.get_internal_state", "it is gone"),
        ("server_args.py", "def add_cli_args(parser", "def add_cli_args(argparser",
         "ServerArgs.add_cli_args", "it takes ['argparser'], not parser"),
        ("speculative/eagle_worker_v2.py", "def activate_step_by_batch(self, ",
         "def activate_step_by_batch(self, rank, ", "EAGLEWorkerV2.activate_step_by_batch",
         "it must be given rank, which this package does not know"),
        ("mem_cache/memory_pool.py", "self.size = size", "self.rows = size", ":ReqToTokenPool",
         "it has no size"),
    ],
    ids=["gone", "another signature", "a new required parameter", "a value"],
)  # fmt: skip
def test_what_changed_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], newest: Path, tmp_path: Path,
    file: str, old: str, new: str, name: str, reason: str,
) -> None:  # fmt: skip
    root = copy_of(newest, tmp_path)
    assert doctor(capsys, root)[0] == 0
    path = root / "sglang" / "srt" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    status, found = doctor(capsys, root)
    assert status == 1
    assert not found["served"]
    assert row(found, name)["state"] == "refused"
    assert row(found, name)["reason"] == reason
    assert [r["name"] for r in found["rows"] if r["state"] == "refused"] == [
        row(found, name)["name"]
    ]


@pytest.mark.contract
@needs_pth
def test_an_untested_release_is_refused_and_its_table_shown(
    capsys: pytest.CaptureFixture[str], newest: Path, tmp_path: Path
) -> None:
    (tmp_path / "sglang").symlink_to(newest / "sglang")
    metadata = tmp_path / "sglang-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 99.0\n")
    status, found = doctor(capsys, tmp_path)
    assert status == 1
    refused = [r for r in found["rows"] if r["state"] == "refused"]
    assert [r["name"] for r in refused] == ["SGLang 99.0"]
    assert RELEASES[0].version in refused[0]["reason"]
    assert "--verify-graph-allow-untested" in refused[0]["reason"]


@pytest.mark.contract
@needs_pth
def test_a_whitelist_that_leaves_us_out(
    capsys: pytest.CaptureFixture[str], newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    status, found = doctor(capsys, newest)
    assert status == 1
    assert "SGLANG_PLUGINS=other,verify_graphs" in row(found, "SGLANG_PLUGINS")["reason"]
    monkeypatch.setenv("SGLANG_PLUGINS", "other,verify_graphs")
    assert doctor(capsys, newest)[0] == 0


@pytest.mark.contract
def test_no_road_into_the_workers(
    capsys: pytest.CaptureFixture[str], newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout on the path alone: nothing is installed, so no process would load it."""
    from sglang_verify_graphs.cli import doctor as module

    monkeypatch.setattr(module, "PLUGIN", "absent")
    monkeypatch.setattr(module, "_PTH", "absent.pth")
    status, found = doctor(capsys, newest)
    assert status == 1
    assert "pip install" in row(found, "entry point")["reason"]
    assert row(found, "absent.pth")["state"] == "not needed"


def test_no_sglang_at_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_verify_graphs.cli import doctor as module

    monkeypatch.setattr(module, "installed", lambda: None)
    monkeypatch.setattr(module, "sglang_version", lambda: None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("SGLang is not installed\n")
    assert f"pip install sglang=={RELEASES[-1].version}" in out


@pytest.mark.parametrize("argv", [[], ["no-such"], ["doctor", "--no-such"], ["doctor", "--sglang"]])
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: sglang-verify-graphs" in capsys.readouterr().err


def test_a_path_without_a_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--sglang", str(tmp_path)])
    assert ended.value.code == 2
    assert "holds no unpacked wheel" in capsys.readouterr().err


# -- the process -----------------------------------------------------------------------------------


@pytest.mark.contract
def test_nothing_heavy_is_imported_and_nothing_private_is_shown(newest: Path) -> None:
    env = os.environ | {
        "SGLANG_VERIFY_GRAPHS": '{"secret": "hush"}', "HF_TOKEN": "hush", "SGLANG_API_KEY": "hush",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", RUN, "doctor", "--sglang", str(newest)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "hush" not in done.stdout + done.stderr


@needs_pth
def test_the_console_script() -> None:
    (script,) = entry_points(group="console_scripts", name="sglang-verify-graphs")
    assert script.load() is main
