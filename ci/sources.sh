#!/usr/bin/env bash
# Unpack the Python source of SGLang releases for the contract tests: nothing of it is run.
#
#   ci/sources.sh [RELEASE...]     into .cache/sglang/RELEASE, from wheels kept in .cache/wheels
#
# Without a release: all that the package knows. PYTHON names the interpreter (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [[ $# -ne 1 ]]; then
  if [[ $# -eq 0 ]]; then
    mapfile -t all < <(PYTHONPATH=. "$python" -c '
from sglang_verify_graphs.compat.releases import RELEASES
print(*(release.version for release in RELEASES), sep="\n")')
    set -- "${all[@]}"
  fi
  printf '%s\n' "$@" | xargs -P 4 -n 1 "$0"  # the index answers several downloads at once
  exit
fi

release=$1
target=.cache/sglang/$release
if [[ -f $target/.complete ]]; then
  echo "[sources] $release is there"
  exit
fi
echo "[sources] $release: downloading its wheel and unpacking the .py files"
mkdir -p .cache/wheels
"$python" -m pip download --disable-pip-version-check -qq --no-deps --only-binary :all: \
  --dest .cache/wheels "sglang==$release"
rm -rf "$target"
"$python" - "$release" "$target" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

release, target = sys.argv[1:]
(wheel,) = Path(".cache/wheels").glob(f"sglang-{release}-*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(target, [n for n in archive.namelist() if n.endswith((".py", "METADATA"))])
Path(target, ".complete").touch()
PYTHON
