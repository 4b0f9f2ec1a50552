#!/usr/bin/env bash
# What a Medusa step costs on this GPU at the shape of Llama 3 8B, bf16, random weights (no download, 18 GB of GPU
# memory, a few minutes). Installs nothing: run it where medusa-train is installed. OUT: folder of the figures;
# PYTHON: the interpreter.
set -euo pipefail

python=${PYTHON:-python}
out=${OUT:-bench-gpu}

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "bench_gpu: $python sees no CUDA device; run this on a machine with a GPU and a CUDA build of torch" >&2
  exit 2
}
mkdir -p "$out"
# Ended from outside as well, so that a lent machine is given back in time.
timeout 350 "$python" -m medusa_train.cli bench --simulate-shape llama-3-8b --dtype bfloat16 --repeats 5 \
  --batch-sizes 1,8 --accepted-histogram 0.35,0.3,0.2,0.15 --out "$out/simulate-llama-3-8b.json" |
  tee "$out/simulate-llama-3-8b.txt"
