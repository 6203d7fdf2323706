#!/usr/bin/env bash
# The patches of patches/ against the wheels they are for, on a CPU.
#
#   ci/patches.sh [--each]
#
# --each    also run each patch's test with that patch alone, and what it depends on
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

# engine_tests TEST...: the project's, on the patched package; those of tests/patches need it.
engine_tests() {
  SGLANG_PATCHED=$folder/all PYTHONPATH=$folder/all CUDA_VISIBLE_DEVICES='' \
    python -m pytest -m engine "$@" >"$folder/engine.log" 2>&1 \
    || { tail -60 "$folder/engine.log"; fail "$release: engine tests"; }
  say "$release: engine tests: $(grep -oE '[0-9]+ passed' "$folder/engine.log")"
}

run_release() {
  local release=$1 folder=$work/$1
  local -a patches=("$root/patches/$1"/*.patch) alone
  mkdir -p "$folder"
  check_series
  install_patched "$folder/all" "${patches[@]}"
  own_tests "$folder/all" "$folder/all.tests" "$folder/all.log" \
    || { tail -40 "$folder/all.log"; fail "$release: the patches' tests"; }
  say "$release: the patches' tests: $(grep -oE '[0-9]+ passed' "$folder/all.log")"
  own_tests "" "$folder/all.tests" "$folder/stock.log" && fail "$release: the tests pass on stock"
  for test in $(cd "$folder/all.tests" && find . -name 'test_*.py' -printf '%P\n'); do
    grep -qE "^(FAILED|ERROR) $test" "$folder/stock.log" || fail "$release: $test passes on stock"
  done
  say "$release: each of them fails on stock"
  if [[ -n $each ]]; then
    for patch in "${patches[@]}"; do
      mapfile -t alone < <(with_dependencies "$patch")
      install_patched "$folder/one" "${alone[@]}"
      own_tests "$folder/one" "$folder/one.tests" "$folder/one.log" \
        || { tail -40 "$folder/one.log"; fail "$release: $(name "$patch") alone"; }
      say "$release: $(name "$patch") alone: $(grep -oE '[0-9]+ passed' "$folder/one.log")"
    done
  fi
  case $release in
    0.5.9) engine_tests tests/engine/legacy -k "TestConfiguredWidth or TestObserve" ;;
    *) engine_tests tests/patches ;;
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
if [[ $status == 0 ]]; then say "all passed"; else say "FAILED"; fi
exit $status
