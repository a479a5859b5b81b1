#!/usr/bin/env bash
# Everything that needs a GPU, on one GPU, within 8 minutes: the tests marked `device`, then training of models D and M
# in bf16 and decoding of SmolLM2, beside transformers where that is installed. Results are in $OUT (runs/bench/gpu).
#   bench/gpu.sh                     on a machine whose python3 or .venv has a torch that sees a GPU; else .venv is made
#   WHEELS=folder bench/gpu.sh       without a package index: what is missing is installed from wheels
# Exits 1 when a part failed; the others are run all the same.
set -u -o pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/bench/gpu}
mkdir -p "$OUT"
started=$SECONDS
failed=()

sees_gpu() {
  [ -n "$1" ] && "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

python=
for candidate in .venv/bin/python "$(command -v python3)"; do
  if sees_gpu "$candidate"; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  command -v nvidia-smi >/dev/null || { echo "bench/gpu.sh: this machine shows no GPU (no nvidia-smi)" >&2; exit 2; }
  make --silent venv || exit 2
  python=.venv/bin/python
  sees_gpu "$python" || { echo "bench/gpu.sh: the torch of $python sees no GPU: install a CUDA build" >&2; exit 2; }
fi

# What is missing beside torch, which stays as it is: another build may be right for this driver.
site="$PWD/runs/bench/site"
export PYTHONPATH="$PWD/src:$site" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
missing=$("$python" - <<'END'
import importlib.util
packages = {"yaml": "pyyaml", "huggingface_hub": "huggingface-hub"}
modules = "pydantic yaml rich click safetensors tokenizers gguf jinja2 huggingface_hub psutil pytest numpy"
print(*(packages.get(name, name) for name in modules.split() if importlib.util.find_spec(name) is None))
END
)
if [ -n "$missing" ]; then
  echo "installing $missing"
  mkdir -p "$site"
  install=(timeout 90 "$python" -m pip install --quiet --no-compile --target "$site")
  if [ -n "${WHEELS:-}" ]; then
    "${install[@]}" --no-index --no-deps "$WHEELS"/*.whl || exit 2
  else
    grep -v '^torch==' constraints.txt >"$site/constraints.txt"
    # shellcheck disable=SC2086  # a list of names
    "${install[@]}" --constraint "$site/constraints.txt" $missing || exit 2
  fi
fi

# part NAME SECONDS COMMAND...: its output on the screen and in NAME.log.
part() {
  local name=$1 limit=$2
  shift 2
  echo "== $name (at most $limit s; $((SECONDS - started)) s so far)"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT/$name.log" || failed+=("$name")
}

"$python" - <<'END' | tee "$OUT/machine.txt"
import torch
print(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"{torch.cuda.device_count()} GPUs")
END

part device_tests 170 "$python" -m pytest -q -m device -W default -p no:cacheprovider --durations=10 tests/device

sides=(herder)
"$python" -c 'import transformers' 2>/dev/null && sides+=(transformers)
bench=("$python" bench/run.py --device cuda --precisions bf16 --sides "${sides[@]}" --sequences 32 --repeats 8 --limit 10)
part train 120 "${bench[@]}" --works train -o "$OUT/train.json"
part train_moe 110 "${bench[@]}" --works train-moe -o "$OUT/train_moe.json"

weights=$("$python" -c '
from herder.data import packages
name = "smollm2-135m-instruct"
print("there" if packages._path(name).exists() else "")' 2>/dev/null)
if [ -n "$weights" ] || [ -d runs/bench/smollm2-135m-instruct ]; then
  part decode 70 "${bench[@]}" --works decode prefill -o "$OUT/decode.json"
else
  echo "== decode: left out, SmolLM2 is not in the cache (herder data fetch smollm2-135m-instruct brings it)"
fi

echo "== $((SECONDS - started)) s; results in $OUT"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
