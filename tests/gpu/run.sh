#!/usr/bin/env bash
# The GPU tests on a machine without a package index: unpacks what .gpu/ holds into $PREFIX (/opt), then runs pytest.
#
#     tests/gpu/run.sh [pytest's arguments: tests/gpu/test_memory.py -s ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
. benchmarks/gpu_env.sh
export ENGINE_PYTHONPATH=$PREFIX/engine TRAINER_PYTHONPATH=$PREFIX/trainer:$PREFIX/ray
exec timeout --kill-after=20 "$LIMIT_S" python3 -m pytest -p no:cacheprovider \
  $([ -f .gpu/COMMIT ] && echo --commit "$(cat .gpu/COMMIT)") "${@:-tests/gpu}"
