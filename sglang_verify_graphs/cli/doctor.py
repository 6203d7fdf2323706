"""``doctor``: is the installed SGLang served, and what is patched on it?

Reads SGLang's source, because importing it takes ten seconds and may need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, distributions, entry_points
from pathlib import Path
from typing import Any

from sglang_verify_graphs.compat.patched import carried, mended
from sglang_verify_graphs.compat.preflight import (
    PLUGIN_LOADER,
    Row,
    State,
    check,
    check_patches,
    check_values,
    check_worker,
    defects,
    in_source,
    refused,
)
from sglang_verify_graphs.compat.releases import Release, resolve_release, sglang_version
from sglang_verify_graphs.compat.requirements import requirements_of
from sglang_verify_graphs.compat.source import Source, installed
from sglang_verify_graphs.errors import UnsupportedError
from sglang_verify_graphs.install import PLUGIN, left_out

_GROUP = "sglang.srt.plugins"
_PTH = "sglang_verify_graphs.pth"
_INSTALL = "it is not installed; pip install sglang-verify-graphs beside this SGLang"


@dataclass(frozen=True)
class Diagnosis:
    """All that ``doctor`` found."""

    sglang: str | None
    path: str | None
    rows: tuple[Row, ...]
    capabilities: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"served": not refused(self.rows), **asdict(self)}

    def lines(self) -> Iterator[str]:
        yield f"SGLang {self.sglang or 'is not installed'}{f' in {self.path}' * bool(self.path)}"
        width = max(len(row.name) for row in self.rows)
        for row in self.rows:
            yield f"{row.kind:<10}  {row.name:<{width}}  {row}"
        for name, value in self.capabilities.items():
            yield f"{'capability':<10}  {name:<{width}}  {json.dumps(value)}"
        if problems := refused(self.rows):
            yield f"not served: {len(problems)} refused; stock behaviour stays"
        else:
            yield "served"


def add_to(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "doctor",
        help="whether the installed SGLang is served, and what is patched on it",
        description="Checks the installed SGLang without importing it: exit 0 where it is served, "
        "1 where something is refused.",
    )
    parser.add_argument(
        "--sglang", type=_unpacked, metavar="PATH", help="an unpacked wheel, not the installed one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    root, version = arguments.sglang or (installed(), sglang_version())
    found = diagnose(root, version)
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(*found.lines(), sep="\n")
    return 1 if refused(found.rows) else 0


def diagnose(root: Path | None, version: str | None) -> Diagnosis:
    """Every check there is, on the SGLang below ``root``."""
    path = None if root is None else str(root)
    try:
        stock = resolve_release(version, allow_untested=True)
    except UnsupportedError as error:
        return Diagnosis(version, path, (Row("release", "SGLang", State.REFUSED, str(error)),), {})
    source = Source(root or Path())
    patches = carried(stock, source)
    release = mended(stock, patches)
    needs, find = requirements_of(release), in_source(source)
    capabilities = asdict(release)
    del capabilities["version"], capabilities["tested"]
    rows = (
        _release(release),
        *_roads(
            loads_plugins=not refused(check([PLUGIN_LOADER], find)),
            ray="ray-env" in patches,
        ),
        *check(needs.launcher, find),
        *check_worker(needs, find),
        *check_values(release, source),
        *check_patches(patches),
        *defects(stock, patches),
    )
    return Diagnosis(version, path, rows, capabilities)


def _release(release: Release) -> Row:
    try:
        resolve_release(release.version, allow_untested=False)
    except UnsupportedError as error:
        return Row("release", f"SGLang {release.version}", State.REFUSED, str(error))
    return Row("release", f"SGLang {release.version}", reason="it is in the tested list")


def _roads(*, loads_plugins: bool, ray: bool) -> Iterator[Row]:
    """How the wrappers reach worker processes."""
    entry = f"entry point {_GROUP}: {PLUGIN}"
    if not loads_plugins:
        yield Row("road", entry, State.NOT_NEEDED, "this SGLang loads no plugins")
    elif PLUGIN in entry_points(group=_GROUP).names:
        yield Row("road", entry)
    else:
        yield Row("road", entry, State.REFUSED, _INSTALL)
    if _has_pth():
        yield Row("road", _PTH)
    elif loads_plugins:
        why = " load plugins too" if ray else ", which load no plugins, need it"
        yield Row("road", _PTH, State.NOT_NEEDED, f"absent; Ray actors{why}")
    else:
        yield Row("road", _PTH, State.REFUSED, _INSTALL)
    if problem := left_out():
        yield Row("road", "SGLANG_PLUGINS", State.REFUSED, problem)
    elif os.environ.get("SGLANG_PLUGINS"):
        yield Row("road", "SGLANG_PLUGINS", reason=f"it names {PLUGIN}")
    else:
        yield Row("road", "SGLANG_PLUGINS", State.NOT_NEEDED, "unset, every plugin is loaded")


def _has_pth() -> bool:
    try:
        files = distribution("sglang-verify-graphs").files or []
    except PackageNotFoundError:
        return False
    return any(file.name == _PTH and Path(str(file.locate())).is_file() for file in files)


def _unpacked(text: str) -> tuple[Path, str]:
    root = Path(text)
    found = [d for d in distributions(path=[text]) if d.metadata["Name"] == "sglang"]
    if not (root / "sglang").is_dir() or not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds no unpacked wheel: no sglang/ beside sglang-*.dist-info/METADATA"
        )
    return root, found[0].version
