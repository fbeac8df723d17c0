#!/usr/bin/env bash
# Benchmarks on a GPU machine without a package index: unpacks what .gpu/ holds, then runs refit_latency.
#
#     benchmarks/gpu_run.sh SCENARIO|SET... [refit_latency's options]
#
# See gpu_env.sh for .gpu/; the trainer's archive is needed by the scenarios that train with what is in it. .gpu/COMMIT may
# name the commit. Results: $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results/gpu}
. benchmarks/gpu_env.sh
for name in engine ray; do
  [ -e "$PREFIX/$name/.complete" ] || { echo "$PREFIX/$name is not unpacked: .gpu/$name.tar.xz is missing or broken" >&2; exit 1; }
done

export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
models_path=
if [ -e "$PREFIX/trainer/.complete" ]; then models_path=$PREFIX/trainer; fi

nvidia-smi --query-gpu=index,name,uuid,memory.used --format=csv || true
exec timeout --kill-after=20 "$LIMIT_S" python3 -m benchmarks.refit_latency \
  --out "$OUT" --engine-pythonpath "$PREFIX/engine" --trainer-pythonpath "$PREFIX/ray" \
  --models-pythonpath "$models_path" \
  ${COMMIT:+--commit "$COMMIT"} $([ -f .gpu/COMMIT ] && echo --commit "$(cat .gpu/COMMIT)") "$@"
