"""The compiled kernels: packed products and attention against plain torch, for every instruction set
of this processor, bit for bit whatever the batch and the number of threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import random_batch, run

from minikv.errors import ConfigError
from minikv.kernels.backend import choose_backend
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LibraryMissing, instruction_sets, load_library
from minikv.kernels.cpu.pack import (
    StoredBlocks,
    dequantise,
    pack_blocks,
    pack_codes,
    pack_dense,
    quantise,
)
from minikv.kernels.reference import ReferenceBackend

try:
    ISAS = instruction_sets(load_library())
except LibraryMissing as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

KINDS = ("q4", "q8", "f32", "bf16", "f16")


@pytest.fixture(scope="module")
def backends() -> dict[tuple[str, int], CpuBackend]:
    return {(isa, threads): CpuBackend(threads, isa) for isa in ISAS for threads in (1, 2, 3, 8)}


def packed(weight, kind, bias=None):
    """The packed matrix and the float32 weight that it stands for."""
    if kind in ("q4", "q8"):
        codes = quantise(weight, kind)
        return pack_codes(codes, bias), dequantise(codes)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[kind]
    return pack_dense(weight, kind, bias), weight.to(dtype).float()


def rounded(x):
    """Activations as the quantised products see them: int8 with a scale per 32."""
    groups = x.view(len(x), x.shape[1] // 32, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups * torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))).round()
    return (codes * scales).view_as(x)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 32), (40, 96), (131, 64), (9, 1536), (960, 576)])
def test_products_equal_plain_ones(backends, isa, kind, outputs, inputs):
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.1
    bias = torch.randn(outputs, generator=generator)
    matrix, meant = packed(weight, kind, bias)
    x = torch.randn(7, inputs, generator=generator)
    seen = rounded(x) if kind in ("q4", "q8") else x
    expected = (seen.double() @ meant.double().T + bias).float()
    out = backends[isa, 1].linear(matrix, x)
    torch.testing.assert_close(out, expected, atol=2e-5 * inputs**0.5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_quantised_products_stay_within_their_formats_bound(backends, kind):
    """Against the unquantised product: the codes' own error and half a step of the activations."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 256, generator=generator), torch.randn(16, 256, generator=generator)
    matrix, meant = packed(weight, kind)
    out = backends[ISAS[0], 1].linear(matrix, x)
    step = x.view(16, -1, 32).abs().amax(-1) / 127 / 2
    bound = torch.einsum("tg,ng->tn", step, meant.abs().view(64, -1, 32).sum(-1))
    assert ((out - x @ meant.T).abs() <= bound + 1e-4).all()
    relative = (out - x @ weight.T).norm() / (x @ weight.T).norm()
    assert relative < {"q4": 0.12, "q8": 0.012}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_in_any_batch_on_any_number_of_threads(backends, kind):
    matrix, _ = packed(torch.randn(200, 96), kind)
    x = torch.randn(33, 96)
    for isa in ISAS:
        whole = backends[isa, 1].linear(matrix, x)
        for threads in (1, 2, 3, 8):
            for rows in (1, 2, 3, 4, 5, 8, 33):
                part = backends[isa, threads].linear(matrix, x[:rows])
                assert torch.equal(part, whole[:rows]), (isa, threads, rows)


@given(
    kind=st.sampled_from(KINDS),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 6),
    rows=st.integers(0, 11),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=120)
def test_products_of_any_shape_and_scale(backends, kind, outputs, groups, rows, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, groups * 32, generator=generator)
    x = torch.randn(rows, groups * 32, generator=generator) * scale
    matrix, meant = packed(weight, kind)
    seen = rounded(x) if kind in ("q4", "q8") else x
    expected = (seen.double() @ meant.double().T).float()
    for isa in ISAS:
        out = backends[isa, 2].linear(matrix, x)
        torch.testing.assert_close(out, expected, atol=3e-5 * max(scale, 1e-6) * groups, rtol=3e-5)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("order", [False, True])
def test_gguf_blocks_are_packed_without_a_second_rounding(backends, name, order):
    kind = getattr(gguf.GGMLQuantizationType, name)
    weight = np.random.default_rng(0).standard_normal((24, 64), dtype=np.float32)
    data = gguf.quantize(weight, kind)
    meant = torch.from_numpy(gguf.dequantize(data, kind))
    rows = torch.randperm(24) if order else None
    backend = backends[ISAS[0], 1]
    matrix = pack_blocks(backend.library, [StoredBlocks(name, data, rows)] * 2, 64)
    # One input at a time picks out a column of the weight; 127 is an exact code.
    unit = torch.eye(64) * 127
    out = backend.linear(matrix, unit).T / 127
    expected = meant if rows is None else meant[rows]
    torch.testing.assert_close(out, torch.cat((expected, expected)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_attention_equals_reference_on_ragged_lanes(backends, isa, dtype, group):
    head_dim = {1: 64, 2: 80, 3: 64, 4: 96, 5: 128, 6: 16, 7: 64, 8: 256, 16: 32}[group]
    rows, lengths = [1, 1, 7, 1, 2, 40, 1, 1], [33, 0, 50, 300, 0, 9, 580, 255]
    batch = random_batch(
        rows, lengths, kv_heads=2, head_dim=head_dim, page_size=32, masses=group % 2 == 1, dtype=dtype,
        seed=group, keys_transposed=True,
    )  # fmt: skip
    qkv = torch.randn(sum(rows), 2 * group + 4, head_dim, generator=torch.Generator().manual_seed(1))
    expected, expected_lse = run(ReferenceBackend(), batch, qkv.clone())
    # The keys of the pass may round to the neighbouring number: the rotation sums in another order.
    tolerance = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.int8: 2e-2}[dtype]
    results = [run(backends[isa, threads], batch, qkv.clone()) for threads in (1, 2, 3)]
    torch.testing.assert_close(results[0][0], expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(results[0][1], expected_lse, atol=tolerance, rtol=tolerance)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 511, 512, 513])
@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_rows_of_a_chunk_get_the_bits_of_single_steps(backends, length, rows):
    """A chunk over a lane, and the same rows one pass at a time, end in the same bits."""
    batch = random_batch(
        [rows], [length], kv_heads=2, page_size=32, masses=False, dtype=torch.float16, keys_transposed=True
    )
    qkv = torch.randn(rows, 10, 16, generator=torch.Generator().manual_seed(2))
    backend = backends[ISAS[0], 2]
    whole, whole_lse = run(backend, batch, qkv.clone())
    for t in range(rows):
        single = row_of(batch, t)
        out, lse = run(backend, single, qkv[t : t + 1].clone())
        assert torch.equal(out[0], whole[t])
        assert torch.equal(lse[0], whole_lse[t])


def row_of(batch, t):
    """Row t of a batch of one sequence as a batch of its own, after the rows before it."""
    from dataclasses import replace

    single = slice(t, t + 1)
    return replace(
        batch, token_ids=batch.token_ids[single], positions=batch.positions[single],
        rope_lengths=batch.rope_lengths[single], row_starts=[0, 1],
        past_lengths=batch.past_lengths + t, cos=batch.cos[single], sin=batch.sin[single], plan=None,
    )  # fmt: skip


@given(
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    group=st.sampled_from([1, 2, 3, 5, 8, 16]),
    rows=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=60)
def test_attention_on_random_shapes(backends, head_dim, group, rows, data):
    lengths = [data.draw(st.sampled_from([0, 1, 31, 32, 64, 255, 256, 300, 513])) for _ in rows]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    batch = random_batch(
        rows, lengths, kv_heads=1, head_dim=head_dim, page_size=32, masses=data.draw(st.booleans()),
        dtype=dtype, seed=len(rows), keys_transposed=True,
    )  # fmt: skip
    qkv = torch.randn(sum(rows), group + 2, head_dim, generator=torch.Generator().manual_seed(3))
    expected, _ = run(ReferenceBackend(), batch, qkv.clone())
    tolerance = 5e-6 if dtype == torch.float32 else 1e-3
    for isa in ISAS:
        out, _ = run(backends[isa, 2], batch, qkv.clone())
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_a_missing_library_leaves_plain_torch_with_a_reason(monkeypatch):
    def absent():
        raise LibraryMissing("the compiled kernels were not built")

    monkeypatch.setattr("minikv.kernels.cpu.backend.load_library", absent)
    backend, reason = choose_backend("auto", "auto", 2, 64)
    assert backend.name == "torch"
    assert reason == "plain torch kernels, because the compiled kernels were not built"
    with pytest.raises(ConfigError, match="backend cpu cannot be used: the compiled kernels were not built"):
        choose_backend("cpu", "auto", 2, 64)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "words"), [(24, None, "not 24"), (512, None, "256"), (64, 16, "32")]
)
def test_a_model_the_kernels_do_not_fit_leaves_plain_torch(head_dim, page_size, words):
    backend, reason = choose_backend("auto", "auto", 1, head_dim, page_size)
    assert backend.name == "torch"
    assert words in reason


# The library in a process


def run_python(code: str) -> None:
    """Run code in a process of its own that must end by itself, and well."""
    setup = "import torch\nfrom minikv.kernels.cpu.backend import CpuBackend\n"
    setup += "from minikv.kernels.cpu.pack import pack_dense, pack_codes, quantise\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_forked_child_computes_with_threads_of_its_own():
    run_python("""
import os
backend = CpuBackend(3)
matrix, x = pack_dense(torch.randn(64, 32), "f32"), torch.randn(5, 32)
expected = backend.linear(matrix, x)
children = []
for used in (True, False):
    child = os.fork()
    if not child:
        if used:
            assert torch.equal(backend.linear(matrix, x), expected)
            assert torch.equal(backend.linear(matrix, x), expected)
        del backend
        os._exit(0)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
assert torch.equal(backend.linear(matrix, x), expected)
""")


def test_a_process_ends_while_another_thread_computes():
    run_python("""
import threading, time
backend = CpuBackend(2)
matrix, x, y = pack_dense(torch.randn(4096, 512), "f32"), torch.randn(64, 512), torch.empty(64, 4096)
pointers = x.data_ptr(), 64, y.data_ptr()
def work():
    # The library alone: torch's own operators abort in a thread that Python ends.
    while True:
        backend.library.mkv_linear(backend.context, matrix.struct, *pointers)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""")


def test_threads_that_the_system_refuses_are_a_clear_error():
    run_python("""
import resource
from minikv.errors import ConfigError
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
try:
    CpuBackend(200)
except ConfigError as error:
    assert str(error) == "The system could not start 200 threads; ask for fewer."
else:
    raise AssertionError("200 stacks of 8 MiB in 64 MiB")
CpuBackend(2).linear(pack_dense(torch.randn(8, 32), "f32"), torch.randn(1, 32))
""")


def test_buffers_that_find_no_memory_are_an_error_and_the_backend_goes_on():
    run_python("""
import resource
backend = CpuBackend(2)
matrix = pack_codes(quantise(torch.randn(8, 1024), "q8"))
x = torch.randn(40000, 1024)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), resource.RLIM_INFINITY))
try:
    backend.linear(matrix, x)
except MemoryError:
    pass
else:
    raise AssertionError("40 MB of codes in 16 MiB")
assert torch.equal(backend.linear(matrix, x[:7]), backend.linear(matrix, x[:9])[:7])
""")


def test_a_team_that_never_worked_ends(backends):
    for threads in range(1, 9):
        for _ in range(10):
            CpuBackend(threads)


def test_results_are_float32_whatever_torchs_default_is(backends):
    matrix, x = pack_dense(torch.randn(8, 32), "f32"), torch.randn(2, 32)
    torch.set_default_dtype(torch.float64)
    try:
        assert backends[ISAS[0], 1].linear(matrix, x).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_is_not_hidden_by_a_product(backends, isa, kind, bad):
    matrix, _ = packed(torch.rand(24, 96) + 1, kind)
    for place in range(0, 96, 5):
        x = torch.rand(3, 96)
        x[1, place] = bad
        out = backends[isa, 2].linear(matrix, x)
        assert not torch.isfinite(out[1]).any()
        assert torch.isfinite(out[0]).all() and torch.isfinite(out[2]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_key_that_is_not_finite_is_not_hidden_by_attention(backends, isa, dtype):
    batch = random_batch([1], [40], kv_heads=1, page_size=32, masses=False, dtype=dtype, keys_transposed=True)
    qkv = torch.randn(1, 3, 16)
    qkv[0, 1, 3] = float("nan")
    out, _ = run(backends[isa, 1], batch, qkv)
    assert torch.isnan(out).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_likeliest_token_is_the_lowest_of_the_largest(isa, threads):
    """With ties across vectors, blocks and threads; -1 where a logit is not finite."""
    backend = CpuBackend(threads, isa)
    for vocab in (1, 7, 64, 200, 1000):
        head = pack_dense(torch.zeros(vocab, 32), "f32", torch.zeros(vocab))
        norm = torch.ones(32)
        for best in sorted({0, vocab // 2, vocab - 1}):
            head.bias[[best, vocab - 1]] = 2.0
            hidden = torch.randn(3, 32)
            logits, likeliest = backend.logits(head, hidden, torch.tensor([2, 0]), norm, 1e-5)
            assert likeliest.tolist() == [best, best] == logits.argmax(-1).tolist()
            head.bias[:] = 0.0
        for fault in (float("nan"), float("inf"), -float("inf")):
            head.bias[vocab // 2] = fault
            assert backend.logits(head, hidden, torch.tensor([1]), norm, 1e-5)[1].tolist() == [-1]
            head.bias[:] = 0.0
