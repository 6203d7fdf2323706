"""The pure group needs neither torch nor SGLang, and no module of it imports another layer."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_verify_graphs

PACKAGE = Path(sglang_verify_graphs.__file__).parent
ALLOWED = {
    "buckets": set(),
    "errors": set(),
    "gate": {"buckets"},
    "estimate": set(),
    "costs": {"errors", "estimate"},
    "acceptance": {"estimate"},
    "chooser": {"acceptance", "buckets", "costs", "estimate"},
    "policy": {"buckets", "chooser", "costs", "errors"},
    "settings": {"errors", "nccl"},
    "metrics": {"buckets", "gate"},
    "support": set(),
    "runner": {"buckets", "errors", "gate", "metrics"},
    "rounds": set(),
    "nccl.evidence": {"errors"},
    "nccl.log": {"nccl.evidence"},
    "nccl.profiles": {"errors", "nccl.evidence"},
    "nccl.status": {"nccl.evidence"},
    "nccl.compare": {"buckets", "nccl.evidence", "nccl.status"},
}

_BLOCK = """
import sys
for name in ("torch", "sglang", "wrapt"):
    sys.modules[name] = None
import sglang_verify_graphs
for name in sys.argv[1:]:
    __import__("sglang_verify_graphs." + name)
"""


def test_pure_modules_import_on_any_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCK, *ALLOWED], capture_output=True, text=True, check=False,
        cwd=PACKAGE.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ALLOWED)
def test_layers(module: str) -> None:
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        node.module.removeprefix("sglang_verify_graphs.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_verify_")
    }
    assert imported <= ALLOWED[module]


def test_only_compat_imports_sglang() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "sglang" for name in names), path


def test_only_compat_knows_releases() -> None:
    """What a release does is a capability flag; the number behind it stands in one place."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "compat":
            assert not re.search(r"0\.5\.\d", path.read_text(encoding="utf-8")), path
