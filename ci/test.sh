#!/usr/bin/env bash
# Every test there is, on a CPU; sets up what it needs below .venvs and .cache.
#
#   ci/test.sh
#
# SGLANG_RELEASES  releases to run on, space-separated (default: 0.5.17 0.5.23); the contract tests
#                  read every release either way. `ci/matrix.sh` runs on more.
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra releases <<<"${SGLANG_RELEASES:-0.5.17 0.5.23}"
newest=${releases[-1]}
export CUDA_VISIBLE_DEVICES=  # the engine tests are about SGLang on a CPU, wherever they run
export PYTEST_ADDOPTS="${PYTEST_ADDOPTS:-} --color=no"
started=$SECONDS
logs=.cache/test-logs
names=() outcomes=() times=() lines=() failed=
mkdir -p "$logs"

say() { printf '\n== [%4d s] %s\n' "$((SECONDS - started))" "$*"; }
bin() { echo ".venvs/$1/bin"; }

# step NAME COMMAND...: run it, show its output, and remember how it ended.
step() {
  local name=$1 log="$logs/${1//[^a-z0-9.]/-}.log" begun=$SECONDS status=0
  shift
  say "$name"
  "$@" 2>&1 | tee "$log" || status=$?
  remember "$name" "$status" "$((SECONDS - begun))" "$log"
}

remember() {
  names+=("$1")
  if [[ $2 == 0 ]]; then outcomes+=(ok); else outcomes+=(FAILED) failed=yes; fi
  times+=("$3")
  lines+=("$(grep -E '(passed|failed|error|skipped|deselected|no tests ran).* in [0-9.]+' "$4" | tail -1 | tr -d = || true)")
}

summary() {
  printf '\n== summary, %d s\n' "$((SECONDS - started))"
  for i in "${!names[@]}"; do
    printf '%-6s %4d s  %-28s %s\n' "${outcomes[i]}" "${times[i]}" "${names[i]}" "${lines[i]}"
  done
  if [[ -z $failed ]]; then echo "all passed"; else echo "FAILED"; fi
}

# engine_tests RELEASE: its output is shown with the release before each line, and kept without.
engine_tests() {
  local begun=$SECONDS status=0
  "$(bin "$1")/python" -m pytest -v -m engine --junitxml "$logs/$1.engine.xml" tests \
    --ignore tests/engine/legacy --ignore tests/patches 2>&1 | tee "$logs/engine-$1.log" \
    | sed -u "s/^/$1  /" || status=$?
  echo "$status $((SECONDS - begun))" >"$logs/engine-$1.status"
}

# set_up: the environment of each release, side by side.
set_up() {
  local pids=() status=0
  for release in "${releases[@]}"; do
    ci/env.sh "$release" ".venvs/$release" --editable --cpu &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}

step "set up ${releases[*]}" set_up
step "SGLang source" env PYTHON="$(bin "$newest")/python" ci/sources.sh
if [[ -n $failed ]]; then
  summary
  exit 1
fi

step "ruff check" "$(bin "$newest")/ruff" check .
step "ruff format" "$(bin "$newest")/ruff" format --check .
step "mypy" "$(bin "$newest")/mypy"
step "unit and contract" env SGLANG_SOURCES="$PWD/.cache/sglang" \
  "$(bin "$newest")/python" -m pytest -n 2 -m "not engine and not gpu" tests/unit tests/contract

say "engine tests on ${releases[*]}, side by side"
pids=()
set -m  # each run in a process group of its own, so that it can be ended whole
trap 'for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done' EXIT
for release in "${releases[@]}"; do
  rm -f "$logs/engine-$release.status"
  engine_tests "$release" &
  pids+=($!)
done
set +m
for index in "${!releases[@]}"; do
  release=${releases[index]}
  wait "${pids[index]}" || true
  read -r status seconds <"$logs/engine-$release.status" || status=1 seconds=0
  remember "engine on $release" "$status" "$seconds" "$logs/engine-$release.log"
done

step "patches" env RELEASES="0.5.17 0.5.23" ci/patches.sh  # 0.5.9 has packages of its own

step "hot path times" "$(bin "$newest")/python" -m pytest tests/unit/test_hot_path.py \
  --benchmark-enable --benchmark-only --benchmark-max-time=0.3 \
  --benchmark-columns=min,median,mean,rounds --benchmark-sort=name

summary
[[ -z $failed ]]
