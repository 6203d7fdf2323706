#!/usr/bin/env bash
# Serve SmolLM2-135M and its EAGLE-3 draft with stock SGLang and this package, and check the result.
#
#   ci/demo.sh
#
# SGLANG  the SGLang release to install into .venv (default 0.5.23)
# Runs on the GPU if there is one, otherwise on a CPU. Needs the network on its first run.
set -euo pipefail
cd "$(dirname "$0")/.."

example=examples/smollm2-135m-eagle3
target=.cache/demo/smollm2-135m
python=.venv/bin/python

ci/env.sh "${SGLANG:-0.5.23}" .venv
if [[ ! -f $target/.complete ]]; then
  rm -rf "$target"
  $python "$example/target.py" "$target"
  touch "$target/.complete"
fi
exec $python ci/demo.py --target "$target" --draft "$example/draft" --work .cache/demo
