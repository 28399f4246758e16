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
# Interrupted, not killed, so that pytest still says what failed before. Most of the time goes into compiling
# kernels, which Triton keeps on disk for all: with pytest-xdist several processes do it.
tests() {
    timeout --signal=INT --kill-after=10 "$@" || status=1
}
pytest=("$python" -m pytest -q --noconftest -p no:cacheprovider)
if "$python" -c 'import xdist' 2>/dev/null; then
    pytest=(env OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE "${pytest[@]}" -n 8)
fi
for file in tests/test_gpu.py tests/test_gpu_engine.py; do
    tests 170 "${pytest[@]}" --maxfail 5 -m gpu "$file"
done
tests 80 "${pytest[@]}" tests/test_triton_attention.py
timeout 170 "$python" benchmarks/bench_gpu.py "$@" || status=1
exit "$status"
