#!/usr/bin/env bash
# The full matrix on a CPU: every release that the package knows, as far as it can be run here.
#
#   ci/matrix.sh [PART...]         contract, full, short, interpreter (default: all four)
#
# contract      every release: its wheel, read and not run
# full          all engine tests, on FULL (default 0.5.17 0.5.20 0.5.23)
# short         serving alone, on SHORT: releases that run on the packages of one of the above
# interpreter   releases whose kernels only run under Triton's interpreter, on INTERPRETER
#
# Writes benchmarks/results/matrix.json; a part that was left out keeps the rows it had.
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra full <<<"${FULL:-0.5.17 0.5.20 0.5.23}"
read -ra short <<<"${SHORT:-0.5.13.post1:0.5.17 0.5.14:0.5.17 0.5.15.post1:0.5.17 0.5.16:0.5.17 0.5.18:0.5.17 0.5.19:0.5.17 0.5.21:0.5.20 0.5.22:0.5.23}"
read -ra interpreter <<<"${INTERPRETER:-0.5.9 0.5.10.post1 0.5.12.post1}"
parts=" ${*:-contract full short interpreter} "
newest=.venvs/${full[-1]}/bin/python
reports=.cache/matrix
failed=
export CUDA_VISIBLE_DEVICES= PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --color=no"
rm -rf "$reports"
mkdir -p "$reports"

wanted() { [[ $parts == *" $1 "* ]]; }
say() { printf '\n== [%4d s] %s\n' "$SECONDS" "$*"; }

# run NAME PYTHON TESTS...: one report, named RELEASE.KIND or contract.
run() {
  say "$1"
  "$2" -m pytest --junitxml "$reports/$1.xml" "${@:3}" || failed=yes
}

for release in "${full[@]}"; do
  ci/env.sh "$release" ".venvs/$release" --editable --cpu
done

if wanted contract; then
  PYTHON=$newest ci/sources.sh
  SGLANG_SOURCES=$PWD/.cache/sglang run contract "$newest" -m contract tests/contract
fi

if wanted full; then
  for release in "${full[@]}"; do
    run "$release.engine" ".venvs/$release/bin/python" -m engine tests \
      --ignore tests/engine/legacy --ignore tests/patches
  done
fi

if wanted short; then
  for pair in "${short[@]}"; do
    release=${pair%:*} base=.venvs/${pair#*:}/bin/python only=$PWD/.cache/only/${pair%:*}
    [[ -d $only ]] || "$base" -m pip install --disable-pip-version-check -qq --no-deps \
      --target "$only" "sglang==$release"
    PYTHONPATH=$only run "$release.engine-short" "$base" -m engine tests/engine/test_serving.py
  done
fi

if wanted interpreter; then
  for release in "${interpreter[@]}"; do
    ci/env.sh "$release" ".venvs/$release" --editable --cpu
    run "$release.interpreter" ".venvs/$release/bin/python" -m engine tests/engine/legacy
  done
fi

"$newest" ci/matrix_results.py "$reports" benchmarks/results/matrix.json
[[ -z $failed ]]
