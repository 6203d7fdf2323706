"""Write what is supported, or check it: docs/support.md from the rows of
``sglang_verify_graphs/support.py``, the README's table of releases from the result files.

python ci/support_matrix.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- releases: written by ci/support_matrix.py -->\n", "<!-- end -->"
sys.path.insert(0, str(ROOT))

from sglang_verify_graphs.compat.releases import RELEASES, Release  # noqa: E402
from sglang_verify_graphs.support import LIMITS, Limit  # noqa: E402

_HEAD = """\
# What is served, and what is not

Written by `ci/support_matrix.py` from `sglang_verify_graphs/support.py`; a test compares the two.

SGLang releases: {releases}. Any other is refused unless `--verify-graph-allow-untested` is given.

A mode of the first table switches the feature off: SGLang's own behaviour stays, the reason is
logged at start-up and stands in `/server_info`. A mode of the second keeps the configured draft
steps and refuses other step counts. `--verify-graph-strict` refuses to start in the first case, and
in the second if other step counts were asked for.
"""


def page() -> str:
    """The whole file."""
    releases = ", ".join(release.version for release in RELEASES)
    return "\n".join(
        [
            _HEAD.format(releases=releases),
            "## Off",
            "",
            *_table([limit for limit in LIMITS if not limit.fixed_width]),
            "",
            "## One width",
            "",
            *_table([limit for limit in LIMITS if limit.fixed_width]),
            "",
        ]
    )


def _table(limits: list[Limit]) -> list[str]:
    rows = [[_cell(text) for text in (limit.mode, limit.why, limit.fix)] for limit in limits]
    return [
        "| Mode | Why | What to do |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- the README's table ----------------------------------------------------------------------------

_KINDS = {
    "engine": "all engine tests",
    "engine-short": "serving",
    "interpreter": "a short run, kernels under Triton's interpreter",
}


def readme() -> str:
    """The README with its table of releases made anew."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + releases() + END + rest.split(END, 1)[1]


def releases() -> str:
    """A row per release, newest first: what is served, and what has run."""
    matrix = {(row["release"], row["kind"]): row for row in _results("matrix.json")}
    served = [run for path in sorted(RESULTS.glob("serve-*.json")) for run in [_load(path)]]
    lines = [
        "| SGLang | draft steps | source read (contract) | CPU engine | GPU |",
        "| --- | --- | --- | --- | --- |",
    ]
    for release in reversed(RELEASES):
        contract = matrix.get((release.version, "contract"))
        runs = [
            f"{what}: {_count(row)}"
            for kind, what in _KINDS.items()
            if (row := matrix.get((release.version, kind)))
        ]
        gpus = [_gpu(run) for run in served if run["sglang"] == release.version]
        cells = [
            release.version,
            _steps(release),
            _count(contract) if contract else "",
            "; ".join(runs),
            "; ".join(gpus),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _steps(release: Release) -> str:
    if release.one_width:
        return "the configured count"
    return "0 to the configured count" if release.zero_steps else "1 to the configured count"


def _count(row: dict[str, Any]) -> str:
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return f"{row['passed']} passed{failed}, {row['date']}"


def _gpu(run: dict[str, Any]) -> str:
    backends = ", ".join(
        dict.fromkeys(row["attention"] for row in (*run["equality"], *run["rows"]))
    )
    return f"{run['device']}: {backends}, {run['date'][:10]}"


def _results(name: str) -> Any:
    path = RESULTS / name
    return _load(path) if path.exists() else []


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    wanted = {PAGE: page(), README: readme()}
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        name = path.relative_to(ROOT)
        if "--check" in sys.argv[1:]:
            print(f"{name} is out of date: run python ci/support_matrix.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {name}")
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
