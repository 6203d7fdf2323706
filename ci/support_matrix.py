"""Write docs/support.md from the rows of ``sglang_verify_graphs/support.py``, or check it.

python ci/support_matrix.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
sys.path.insert(0, str(ROOT))

from sglang_verify_graphs.compat.releases import RELEASES  # noqa: E402
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


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date: run python ci/support_matrix.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
