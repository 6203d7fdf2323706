#!/usr/bin/env bash
# The patches of patches/ against the wheels they are for, on a CPU.
#
#   ci/patches.sh [--each]
#
# --each    also run each patch's test with that patch alone, and what it depends on, and compare
#           an ordinary load with stock; writes benchmarks/results/patches.json
# RELEASES  releases to run on, space-separated (default: every folder of patches/)
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
work=$root/.cache/patches
each=
[[ ${1:-} == --each ]] && each=yes
read -ra releases <<<"${RELEASES:-$(cd patches && ls -d -- */ | tr -d / | sort -V | xargs)}"
export CUDA_VISIBLE_DEVICES=0  # none is there; SGLang's test helpers read the first digit
export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} -p no:cacheprovider --color=no"
started=$SECONDS

say() { printf '[patches %3d s] %s\n' "$((SECONDS - started))" "$*"; }
fail() { say "FAILED: $*"; exit 1; }
python() { "$root/.venvs/$release/bin/python" "$@"; }
passed() { grep -oE '[0-9]+ passed' "$1"; }
name() { sed -n 's/^Patch-Name: //p' "$1"; }
with_dependencies() {  # the patches that PATCH depends on, then PATCH
  local needed
  needed=$(sed -n 's/^Depends-On: //p' "$1")
  if [[ -n $needed ]]; then grep -l "^Patch-Name: $needed\$" "${patches[@]}"; fi
  echo "$1"
}

# own_tests PACKAGE TESTS LOG: the patches' tests on the `sglang` in PACKAGE, or the installed one.
own_tests() {
  (
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
    export PYTHONPATH=${1:+$1:}$root/tests/engine/standins:$root/tests/patches/standins
    cd "$2" && python -m pytest -c /dev/null --rootdir . -rfE --continue-on-collection-errors .
  ) >"$3" 2>&1
}

# Apply, revert and compile the whole series and each patch alone, in a repository of the sources.
check_series() {
  local tree=$work/$release/tree base
  rm -rf "$tree"
  mkdir -p "$tree"
  cp -r ".cache/sglang/$release/sglang" "$tree/"
  git -C "$tree" init -q
  git -C "$tree" config core.autocrlf false
  git -C "$tree" add -A -f
  base=$(git -C "$tree" write-tree)
  for patch in "${patches[@]}"; do
    git -C "$tree" apply --index "$patch" || fail "$release: $(name "$patch") does not apply"
    mapfile -t changed < <(git -C "$tree" apply --numstat "$patch" | cut -f3)
    (cd "$tree" && python -m compileall -qq "${changed[@]}") || fail "$release: $(name "$patch")"
  done
  find "$tree" -name __pycache__ -prune -exec rm -rf {} +
  git -C "$tree" write-tree >"$work/$release/patched-tree"
  for ((i = ${#patches[@]} - 1; i >= 0; i--)); do git -C "$tree" apply --index -R "${patches[i]}"; done
  [[ $(git -C "$tree" write-tree) == "$base" ]] || fail "$release: reverting leaves other bytes"
  for patch in "${patches[@]}"; do
    mapfile -t alone < <(with_dependencies "$patch")
    git -C "$tree" apply --index "${alone[@]}" || fail "$release: $(name "$patch") alone"
    git -C "$tree" read-tree --reset -u "$base"
  done
  for patch in "${patches[@]}"; do patch -s -p1 --fuzz=0 -d "$tree" <"$patch"; done
  git -C "$tree" add -A -f sglang test
  git -C "$tree" write-tree | cmp -s - "$work/$release/patched-tree" \
    || fail "$release: patch and git apply differ"
  for ((i = ${#patches[@]} - 1; i >= 0; i--)); do
    patch -s -R -p1 --fuzz=0 -d "$tree" <"${patches[i]}"
  done
  git -C "$tree" add -A -f
  [[ $(git -C "$tree" write-tree) == "$base" ]] || fail "$release: patch -R leaves other bytes"
  rm -rf "$tree"
  say "$release: ${#patches[@]} patches apply, compile and revert, each alone too"
}

# A copy of the installed package, patched as the README says, in FOLDER; the tests in FOLDER.tests.
# Files are links until a patch replaces them.
install_patched() {  # install_patched FOLDER PATCH...
  local folder=$1 installed
  shift
  installed=$(python -c 'from importlib.util import find_spec; print(find_spec("sglang").origin)')
  rm -rf "$folder" "$folder.tests"
  mkdir -p "$folder"
  cp -rl "$(dirname "$installed")" "$folder/"
  for patch; do (cd "$folder" && GIT_CEILING_DIRECTORIES=$(dirname "$PWD") git apply "$patch"); done
  mv "$folder/test" "$folder.tests"
}

# engine_tests WHAT PACKAGE TEST...: the project's, on the patched package.
engine_tests() {
  local what=$1 package=$2 log=$2.engine.log
  SGLANG_PATCHED=$package PYTHONPATH=$package CUDA_VISIBLE_DEVICES='' \
    python -m pytest -m engine "${@:3}" >"$log" 2>&1 \
    || { tail -60 "$log"; fail "$release: $what: engine tests"; }
  say "$release: $what: engine tests: $(passed "$log")"
}

run_release() {
  local release=$1 folder=$work/$1
  local -a patches=("$root/patches/$1"/*.patch) alone
  mkdir -p "$folder"
  check_series
  install_patched "$folder/all" "${patches[@]}"
  own_tests "$folder/all" "$folder/all.tests" "$folder/all.log" \
    || { tail -40 "$folder/all.log"; fail "$release: the patches' tests"; }
  say "$release: the patches' tests: $(passed "$folder/all.log")"
  own_tests "" "$folder/all.tests" "$folder/stock.log" && fail "$release: the tests pass on stock"
  for test in $(cd "$folder/all.tests" && find . -name 'test_*.py' -printf '%P\n'); do
    grep -qE "^(FAILED|ERROR) $test" "$folder/stock.log" || fail "$release: $test passes on stock"
  done
  say "$release: each of them fails on stock"
  if [[ -n $each ]]; then
    rm -f "$folder/each.tsv"
    for patch in "${patches[@]}"; do
      mapfile -t alone < <(with_dependencies "$patch")
      install_patched "$folder/one" "${alone[@]}"
      own_tests "$folder/one" "$folder/one.tests" "$folder/one.log" \
        || { tail -40 "$folder/one.log"; fail "$release: $(name "$patch") alone"; }
      say "$release: $(name "$patch") alone: $(passed "$folder/one.log")"
      engine_tests "$(name "$patch") alone" "$folder/one" tests/patches/test_ordinary.py
      printf '%s\t%s\t%s\t%s\n' "$release" "$(name "$patch")" "$(passed "$folder/one.log")" \
        "$(passed "$folder/one.engine.log")" >>"$folder/each.tsv"
    done
  fi
  case $release in
    0.5.9)
      engine_tests series "$folder/all" tests/engine/legacy tests/patches/test_ordinary.py \
        -k "TestConfiguredWidth or TestObserve or ordinary"
      ;;
    *) engine_tests series "$folder/all" tests/patches ;;
  esac
}

mkdir -p "$work"
for release in "${releases[@]}"; do
  ci/env.sh "$release" ".venvs/$release" --editable --cpu
  PYTHON=.venvs/$release/bin/python ci/sources.sh "$release"
done
".venvs/${releases[-1]}/bin/python" ci/ledger.py --check || fail "the ledger is out of date"

# Two at a time, the newest first: it takes longest.
set -m
pids=() running=0 status=0
trap 'for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done' EXIT
for ((n = ${#releases[@]} - 1; n >= 0; n--)); do
  if ((running == 2)); then
    wait -n || status=1
    running=1
  fi
  run_release "${releases[n]}" &
  pids+=($!)
  running=$((running + 1))
done
while ((running-- > 0)); do wait -n || status=1; done
if [[ $status != 0 ]]; then
  say "FAILED"
  exit 1
fi
say "all passed"
if [[ -n $each ]]; then
  for release in "${releases[@]}"; do cat "$work/$release/each.tsv"; done \
    | ".venvs/${releases[-1]}/bin/python" -c '
import csv, datetime, json, sys
names = "sglang", "patch", "own_tests", "ordinary_load_equals_stock"
rows = [dict(zip(names, row, strict=True)) for row in csv.reader(sys.stdin, delimiter="\t")]
print(json.dumps({"date": str(datetime.date.today()), "each_patch_alone": rows}, indent=1))
' >benchmarks/results/patches.json
fi
