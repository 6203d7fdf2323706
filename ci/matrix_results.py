"""Merge the pytest reports of a matrix run into its result file: a row per release and kind.

python ci/matrix_results.py REPORTS RESULT
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_RELEASE = re.compile(r"\[(\d+\.\d+\.\d+(?:\.post\d+)?)[\]-]")


def rows_of(report: Path) -> list[dict[str, Any]]:
    """What one report says, by release: of the test's name, else of the file's."""
    release, _, kind = report.stem.rpartition(".")
    root = ElementTree.parse(report).getroot()
    suite = next(root.iter("testsuite"))
    counts: dict[str, Counter[str]] = {}
    for case in suite.iter("testcase"):
        named = _RELEASE.search(case.get("name", ""))
        of = release or (named.group(1) if named else "")
        if of:
            counts.setdefault(of, Counter())[_outcome(case)] += 1
    day = datetime.now(timezone.utc).date().isoformat()
    return [
        {"release": of, "kind": kind}
        | {outcome: count[outcome] for outcome in ("passed", "failed", "skipped")}
        | {"date": day}
        for of, count in counts.items()
    ]


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def _order(row: dict[str, Any]) -> tuple[list[int], str]:
    return [int(n) for n in re.findall(r"\d+", row["release"])], row["kind"]


def main() -> None:
    reports, result = map(Path, sys.argv[1:])
    rows = {(r["release"], r["kind"]): r for r in _read(result)}
    for report in sorted(reports.glob("*.xml")):
        rows |= {(r["release"], r["kind"]): r for r in rows_of(report)}
    lines = [json.dumps(row) for row in sorted(rows.values(), key=_order)]
    result.write_text("[\n  " + ",\n  ".join(lines) + "\n]\n", encoding="utf-8")
    for line in lines:
        print(line)


def _read(result: Path) -> list[dict[str, Any]]:
    return json.loads(result.read_text(encoding="utf-8")) if result.exists() else []


if __name__ == "__main__":
    main()
