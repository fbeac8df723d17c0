#!/usr/bin/env bash
# The GPU tests on a machine without a package index: unpacks what .gpu/ holds into $PREFIX (/opt), then runs pytest.
#
#     tests/gpu/run.sh [pytest's arguments: tests/gpu/test_memory.py -s ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
PREFIX=${PREFIX:-/opt}
LIMIT_S=${LIMIT_S:-570}

for name in engine ray trainer; do
  archive=.gpu/$name.tar.xz
  if [ -f "$archive" ] && [ ! -e "$PREFIX/$name/.complete" ]; then
    mkdir -p "$PREFIX/$name"
    (xz -dc -T0 "$archive" | tar -C "$PREFIX/$name" -xf - && touch "$PREFIX/$name/.complete") &
  fi
done
wait

export HF_HUB_OFFLINE=1 SGLANG_IS_FLASHINFER_AVAILABLE=false NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export ENGINE_PYTHONPATH=$PREFIX/engine TRAINER_PYTHONPATH=$PREFIX/trainer:$PREFIX/ray
export PYTHONPATH=$PREFIX/ray
exec timeout --kill-after=20 "$LIMIT_S" python3 -m pytest -p no:cacheprovider "${@:-tests/gpu}"
