#!/usr/bin/env bash
# Build a virtual environment: one SGLang release, this package, and the tools of the tests.
#
#   ci/env.sh RELEASE DIR [--editable] [--cpu]
#
# --editable  install the package as a link to this checkout (tests); otherwise as a user would
# --cpu       the light CPU set even where there is an NVIDIA GPU
#
# Does nothing where DIR is up to date. PYTHON names the interpreter (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $# -lt 2 || $1 == -* ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
release=$1 dir=$2 editable= cpu=
shift 2
for option; do
  case $option in
    --editable) editable=yes ;;
    --cpu) cpu=yes ;;
    *) echo "ci/env.sh: unknown option $option" >&2; exit 2 ;;
  esac
done

# What the CPU route installs in place of SGLang's own dependencies, which are gigabytes of kernels.
declare -A packages=(
  [0.5.9]="transformers==4.57.1 compressed-tensors==0.18.0 openai==2.6.1"
  [0.5.10.post1]="transformers==5.3.0 compressed-tensors==0.18.0 openai==2.6.1"
  [0.5.12.post1]="transformers==5.6.0 compressed-tensors==0.18.0 openai==2.6.1"
  [0.5.17]="transformers==5.12.1 compressed-tensors==0.18.0 openai==2.6.1 xgrammar==0.2.1"
  [0.5.20]="transformers==5.12.1 compressed-tensors==0.18.0 openai==2.6.1 xgrammar==0.2.1"
  [0.5.23]="transformers==5.19.0 compressed-tensors==0.18.0 openai==2.8.0 xgrammar==0.2.7
            apache-tvm-ffi==0.1.11"
)
torch=torch==2.13.0
common="numpy requests triton ipython aiohttp orjson psutil pybase64 pillow msgspec pyzmq dill
        sentencepiece gguf partial-json-parser uvicorn fastapi einops setproctitle uvloop
        safetensors tokenizers"
server="jsonschema soundfile==0.13.1 python-multipart prometheus-client"
model="gguf safetensors tokenizers"
ray="ray==2.60.0 msgpack protobuf filelock click packaging"

if [[ -z ${packages[$release]:-} ]]; then
  echo "ci/env.sh: no package set for SGLang $release (known: ${!packages[*]})" >&2
  exit 2
fi

say() { printf '[env %s] %s\n' "$release" "$*"; }
pip() { "$dir/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
digest() { cat -- "$@" | sha256sum | cut -c1-16; }

if [[ -z $cpu ]] && nvidia-smi --list-gpus >/dev/null 2>&1; then route=gpu; else route=cpu; fi
stamp="$release $route $(digest <<<"$torch $common $server $model ${packages[$release]}")"

if [[ $(cat "$dir/.sglang" 2>/dev/null || true) == "$stamp" ]]; then
  say "SGLang is up to date in $dir"
else
  started=$SECONDS
  say "creating $dir with $("${PYTHON:-python3}" --version)"
  rm -rf "$dir"
  "${PYTHON:-python3}" -m venv "$dir"
  if [[ $route == gpu ]]; then
    say "NVIDIA GPU found: installing sglang==$release with its kernels (about 10 GB)"
    # shellcheck disable=SC2086
    pip install "sglang==$release" $model
  else
    say "installing $torch and the packages SGLang $release imports on a CPU"
    # shellcheck disable=SC2086
    pip install "$torch" $common $server ${packages[$release]}
    say "installing sglang==$release without its CUDA dependencies"
    pip install --no-deps "sglang==$release"
  fi
  echo "$stamp" >"$dir/.sglang"
  say "SGLang ready after $((SECONDS - started)) s"
fi

sources=(pyproject.toml README.md LICENSE ./*.pth)
if [[ -n $editable ]]; then
  mode="editable $(digest "${sources[@]}")"
else
  mapfile -t modules < <(find sglang_verify_graphs -name '*.py' | LC_ALL=C sort)
  mode="copy $(digest "${sources[@]}" "${modules[@]}")"
fi
if [[ $(cat "$dir/.package" 2>/dev/null || true) == "$mode" ]]; then
  say "sglang-verify-graphs is up to date"
else
  say "installing sglang-verify-graphs (${mode%% *}${editable:+, with the test tools})"
  if [[ -n $editable ]]; then
    pip install --editable ".[dev]"
  else
    pip install --force-reinstall --no-deps .
    pip install .
  fi
  echo "$mode" >"$dir/.package"
fi
# One Ray for all environments, for tests/engine/test_ray.py alone: 79 MB to fetch, 250 MB on disk.
if [[ -n $editable ]]; then
  mkdir -p .cache
  exec 9>.cache/ray.lock
  flock 9  # environments are made side by side
  if [[ $(cat .cache/ray/.ray 2>/dev/null || true) != "$ray" ]]; then
    started=$SECONDS
    rm -rf .cache/ray
    # shellcheck disable=SC2086
    pip install --no-deps --target .cache/ray $ray
    echo "$ray" >.cache/ray/.ray
    say "Ray ready in .cache/ray after $((SECONDS - started)) s"
  fi
  exec 9>&-
fi
"$dir/bin/python" -c '
from importlib.metadata import version
names = "sglang", "sglang-verify-graphs", "torch", "transformers"
print("[env %s]" % version("sglang"), *(f"{name} {version(name)}" for name in names))'
