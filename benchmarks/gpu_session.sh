#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes on one: tests first, then one table.
#     benchmarks/gpu_session.sh [--quick]
# PYTHON names an interpreter that has pytest, triton and what minikv needs, torch for CUDA; nothing is fetched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TRITON_INTERPRET=0

"$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__); assert torch.cuda.is_available(), "no CUDA device"'
status=0
# All share compiled kernels, which Triton keeps on disk.
for tests in tests/test_gpu.py tests/test_gpu_engine.py; do
    timeout 170 "$python" -m pytest -q --maxfail 5 --noconftest -p no:cacheprovider -m gpu "$tests" || status=1
done
timeout 80 "$python" -m pytest -q --noconftest -p no:cacheprovider tests/test_triton_attention.py || status=1
timeout 170 "$python" benchmarks/bench_gpu.py "$@" || status=1
exit "$status"
