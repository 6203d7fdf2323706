"""Write patches/README.md from the headers of the patches.

python ci/ledger.py [--check]
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"
TRAILERS = ("Patch-Name", "Depends-On", "Plugin", "Upstream", "Drop-When")
SECTIONS = ("Problem", "Evidence", "Approach", "Test")

INTRO = """\
# Patches for SGLang

<!-- Written by ci/ledger.py from the headers of the patches: change those. -->

What belongs in SGLang itself, as `git format-patch` series on the wheels of three releases, one
idea a patch: for those who cannot run plugins, and for whoever takes one upstream. `ci/patches.sh`
applies them without fuzz, reverts them to the same bytes, sees every patch's own test fail without
it and pass with it, and serves real SGLang with all of them on a CPU.

## Apply

In the folder that holds the installed `sglang` package:

    cd "$(python -c 'from importlib.util import find_spec as f; print(f("sglang").origin[:-19])')"
    export GIT_CEILING_DIRECTORIES="$(dirname "$PWD")"   # git apply skips files inside a repository
    for p in /path/to/patches/0.5.17/*.patch; do git apply --include='sglang/*' "$p"; done

`--include` leaves out the tests, which lie in SGLang's own layout (`test/registered/unit`). Undo it
in the opposite order:

    for p in $(ls -r /path/to/patches/0.5.17/*.patch); do
      git apply -R --include='sglang/*' "$p"
    done

Without git, `patch -p1 --fuzz=0 < "$p"` and `patch -R -p1 --fuzz=0 < "$p"` do the same and put the
tests below `test/` beside the package, where Python does not look.

A patch that depends on no other applies alone, in any order; `graph-key-width` needs `gate-reason`.
Servers that are running do not notice; start them again. The plugin sees the patches that an SGLang
carries and leaves to them what they mend: `sglang-verify-graphs doctor` names them as not needed.
"""


@dataclass(frozen=True)
class Patch:
    """One patch file: its subject, the paragraphs of its message and its trailers."""

    release: str
    path: Path
    subject: str
    fields: dict[str, str]

    @property
    def name(self) -> str:
        return self.fields["Patch-Name"]


def read(path: Path) -> Patch:
    """Raises ValueError where the header lacks something."""
    head = path.read_text().partition("\n---\n")[0]
    headers, _, body = head.partition("\n\n")
    subject = re.search(r"^Subject: \[PATCH\] (.*(?:\n .*)*)", headers, re.M)
    if subject is None:
        raise ValueError(f"{path}: no subject")
    fields: dict[str, str] = {}
    for paragraph in body.strip().split("\n\n"):
        for section in SECTIONS:
            if paragraph.startswith(f"{section}: "):
                fields[section] = " ".join(paragraph[len(section) + 2 :].split())
    for trailer, value in re.findall(r"^([A-Z][a-z]+-?[A-Z]?[a-z]*): (.*)$", body, re.M):
        if trailer in TRAILERS:
            fields[trailer] = value
    missing = {*SECTIONS, *TRAILERS} - {*fields, "Depends-On"}
    if missing:
        raise ValueError(f"{path}: the message lacks {', '.join(sorted(missing))}")
    return Patch(path.parent.name, path, " ".join(subject[1].split()), fields)


def series() -> dict[str, list[Patch]]:
    """The patches of every release, oldest release first, in the order in which they apply."""
    releases = sorted(
        (folder for folder in PATCHES.iterdir() if folder.is_dir()),
        key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)],
    )
    return {
        folder.name: [read(path) for path in sorted(folder.glob("*.patch"))] for folder in releases
    }


def ledger() -> str:
    by_name: dict[str, list[Patch]] = {}
    for patches in series().values():
        for patch in patches:
            by_name.setdefault(patch.name, []).append(patch)
    rows = [INTRO, "## Which release gets what\n"]
    releases = list(series())
    rows += [f"| patch | {' | '.join(releases)} |", f"| --- |{' --- |' * len(releases)}"]
    longest = [patch.name for patch in max(series().values(), key=len)]
    names = sorted(by_name, key=longest.index)
    for name in names:
        number = {patch.release: patch.path.name[:4] for patch in by_name[name]}
        cells = [
            f"[{number[r]}]({r}/{_file(by_name[name], r)})" if r in number else "" for r in releases
        ]
        rows.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
    for name in names:
        rows.append(_entry(by_name[name]))
    return "\n".join(rows) + "\n"


def _file(patches: list[Patch], release: str) -> str:
    return next(patch.path.name for patch in patches if patch.release == release)


def _entry(patches: list[Patch]) -> str:
    """The text of the newest release, and what the others say differently."""
    newest = patches[-1]
    lines = [f"\n## {newest.name}\n", f"{newest.subject}.\n"]
    for title, field in (
        ("Why", "Problem"),
        ("Evidence", "Evidence"),
        ("How", "Approach"),
        ("The plugin", "Plugin"),
        ("Upstream", "Upstream"),
        ("Drop it when", "Drop-When"),
    ):
        lines.append(f"- **{title}:** {_sentence(newest.fields[field])}")
        for patch in patches[:-1]:
            if patch.fields[field] != newest.fields[field]:
                lines.append(f"  - {patch.release}: {_sentence(patch.fields[field])}")
    if "Depends-On" in newest.fields:
        lines.append(f"- **Applies after:** `{newest.fields['Depends-On']}`")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    first = text.split()[0]
    if first.isalpha() and first.islower():
        text = text[0].upper() + text[1:]
    return text.rstrip(".") + "."


def main() -> int:
    target = PATCHES / "README.md"
    text = ledger()
    if "--check" in sys.argv[1:]:
        if not target.exists() or target.read_text() != text:
            print("patches/README.md is not what the patches say: run python ci/ledger.py")
            return 1
        return 0
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
