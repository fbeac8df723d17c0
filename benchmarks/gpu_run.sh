#!/usr/bin/env bash
# Benchmarks on a GPU machine without a package index: unpacks what .gpu/ holds, then runs refit_latency.
#
#     benchmarks/gpu_run.sh SCENARIO|SET... [refit_latency's options]
#
# .gpu/{engine,ray,trainer}.tar.xz hold SGLang, Ray (with msgspec and pyzmq), and nemo-automodel with megatron-core for
# the machine's own Python and torch; the last is needed by the scenarios that train with one of those. Each is unpacked
# once into $PREFIX (/opt). .gpu/COMMIT may name the commit. Results: $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
PREFIX=${PREFIX:-/opt}
OUT=${OUT:-benchmarks/results/gpu}
LIMIT_S=${LIMIT_S:-570}

for name in engine ray trainer; do
  archive=.gpu/$name.tar.xz
  if [ -f "$archive" ] && [ ! -e "$PREFIX/$name/.complete" ]; then
    mkdir -p "$PREFIX/$name"
    (xz -dc -T0 "$archive" | tar -C "$PREFIX/$name" -xf - && touch "$PREFIX/$name/.complete") &
  fi
done
wait
for name in engine ray; do
  [ -e "$PREFIX/$name/.complete" ] || { echo "$PREFIX/$name is not unpacked: .gpu/$name.tar.xz is missing or broken" >&2; exit 1; }
done

export HF_HUB_OFFLINE=1 SGLANG_IS_FLASHINFER_AVAILABLE=false RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export PYTHONPATH=$PREFIX/ray
models_path=
if [ -e "$PREFIX/trainer/.complete" ]; then models_path=$PREFIX/trainer; fi

nvidia-smi --query-gpu=index,name,uuid,memory.used --format=csv || true
exec timeout --kill-after=20 "$LIMIT_S" python3 -m benchmarks.refit_latency \
  --out "$OUT" --engine-pythonpath "$PREFIX/engine" --trainer-pythonpath "$PREFIX/ray" \
  --models-pythonpath "$models_path" \
  ${COMMIT:+--commit "$COMMIT"} $([ -f .gpu/COMMIT ] && echo --commit "$(cat .gpu/COMMIT)") "$@"
