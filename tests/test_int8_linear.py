"""8-bit weights in plain torch: what a layer computes, and which matrices of a model it is used for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cli_tools import ROOT
from gguf import GGMLQuantizationType
from model_files import write_directory, write_gguf
from test_logits import our_logits
from tiny import TINY, RandomWeights, drain, greedy, prompt, tiny_engine

from minikv import LLM, ConfigError, TierConfig
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models import int8_linear
from minikv.models.basis import FourierBasis
from minikv.models.build import build_decoder, weight_bytes
from minikv.models.decoder import Decoder
from minikv.models.int8_linear import Int8Linear, activation_levels
from minikv.models.linear import DenseLinear
from minikv.models.sources import open_model, resolve_model

LEVELS = activation_levels()
if LEVELS is None:
    pytest.skip("torch cannot multiply in 8 bits here", allow_module_level=True)

SHAPES = [(960, 576), (576, 1536), (131, 96), (7, 2), (5000, 34)]  # outputs, inputs


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(outputs, inputs, bias=None, levels=LEVELS):
    """A layer that takes rows as they are, and its weight."""
    weight, basis = noise(outputs, inputs, seed=1) / inputs**0.5, FourierBasis()
    linear = Int8Linear(weight, bias, levels, basis.against_inputs)
    return (lambda x: linear(basis.inputs(x))), weight


def error(actual, expected):
    """Of each row, relative to its length."""
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


# One layer


@pytest.mark.parametrize("levels", [127, 63])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(shape, levels):
    linear, _ = layer(*shape, noise(shape[0]), levels)
    x = noise(512, shape[1]) * torch.logspace(-6, 6, 512).unsqueeze(-1)
    together = linear(x)
    for count in (*range(1, 10), 64):
        for start in (0, 211, 512 - count):
            rows = slice(start, start + count)
            assert torch.equal(linear(x[rows].clone()), together[rows]), f"{count} rows from {start}"


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_close_to_those_in_float32(shape):
    linear, weight = layer(*shape)
    x = noise(64, shape[1], seed=2)
    assert error(linear(x), x @ weight.T).mean() < 0.015


def test_a_few_large_inputs_cost_the_others_no_precision():
    linear, weight = layer(960, 576)
    x = noise(64, 576, seed=2)
    x[:, 100] *= 200
    small = x.clone()
    small[:, 100] = 0
    difference = linear(x) - x @ weight.T
    # Rounded in steps of the largest input, the small ones would nearly all be zero.
    assert difference.norm() < 0.2 * (small @ weight.T).norm()


def test_scale_of_a_row_changes_nothing_but_the_scale():
    linear, _ = layer(131, 96)
    x = noise(5, 96)
    assert torch.equal(linear(x * 2.0**40), linear(x) * 2.0**40)
    assert torch.equal(linear(x * 2.0**-40), linear(x) * 2.0**-40)


def test_a_row_of_zeros_gives_exactly_the_bias():
    bias = noise(131)
    linear, _ = layer(131, 96, bias)
    assert torch.equal(linear(torch.zeros(2, 96)), bias.expand(2, -1))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_spoils_no_other(number):
    linear, _ = layer(131, 96)
    x = noise(3, 96)
    expected = linear(x)
    x[1, 5] = number
    y = linear(x)
    assert torch.equal(y[[0, 2]], expected[[0, 2]])
    assert not y[1].isfinite().any()


SATURATING = """
import torch
from minikv.models.basis import FourierBasis
from minikv.models.int8_linear import Int8Linear, activation_levels
levels, basis = activation_levels(), FourierBasis()
weight, x = torch.randn(32, 256), torch.randn(64, 256)
linear = Int8Linear(weight, None, levels, basis.against_inputs)
y, expected = linear(basis.inputs(x)), x @ weight.T
assert (y - expected).norm() < 0.03 * expected.norm()
assert torch.equal(linear(basis.inputs(x[1:2])), y[1:2])
print(levels)
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or torch.backends.quantized.engine not in ("x86", "fbgemm"),
    reason="only this library's kernels can be told to take older instructions",
)
def test_half_of_the_range_is_used_where_products_would_saturate():
    environment = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", SATURATING],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "63"), done.stderr


# A model


def kinds(decoder):
    """The layer types in use, without repetition: those of the layers and that of the head."""
    layers = {type(m) for a in decoder.layers for m in (a.qkv, a.output, a.gate_up, a.down)}
    assert len(layers) == 1
    return layers.pop(), type(decoder.head)


def decoder_of(path, kind="auto"):
    opened = open_model(resolve_model(str(path)))
    decoder = build_decoder(opened.config, opened.weights, TorchBackend(), kind)
    assert isinstance(decoder, Decoder)
    return decoder


def test_auto_keeps_a_float_file_in_float32(tmp_path):
    assert kinds(decoder_of(write_directory(tmp_path))) == (DenseLinear, DenseLinear)
    half = write_gguf(tmp_path / "half.gguf", quant=GGMLQuantizationType.F16)
    assert kinds(decoder_of(half)) == (DenseLinear, DenseLinear)


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "Q5_1"])
def test_auto_rounds_a_quantised_file_to_8_bits(tmp_path, quant):
    path = write_gguf(tmp_path / "model.gguf", quant=GGMLQuantizationType[quant])
    assert kinds(decoder_of(path)) == (Int8Linear, Int8Linear)
    assert kinds(decoder_of(path, "f32")) == (DenseLinear, DenseLinear)


def test_q8_rounds_a_float_file(tmp_path):
    assert kinds(decoder_of(write_directory(tmp_path), "q8")) == (Int8Linear, Int8Linear)


def test_a_model_of_odd_sizes_stays_float32():
    config = replace(TINY, intermediate_size=33)
    assert kinds(Decoder(config, RandomWeights(config), TorchBackend(), "q8")) == (DenseLinear, DenseLinear)


def test_8_bits_take_a_quarter_of_the_memory(tmp_path):
    path = write_directory(tmp_path)
    eight, full = decoder_of(path, "q8"), decoder_of(path, "f32")
    assert 0.25 * full.weight_bytes < eight.weight_bytes < 0.3 * full.weight_bytes
    estimates = [weight_bytes(full.config, kind, TorchBackend()) for kind in ("q8", "auto", "f32")]
    assert estimates[0] < 0.3 * estimates[1] and estimates[1] == estimates[2]


def test_without_the_operator_weights_are_float32(tmp_path, monkeypatch):
    def missing(*_):
        raise AttributeError("no such operator")

    monkeypatch.setattr(int8_linear, "_pack", missing)
    decoder = decoder_of(write_directory(tmp_path), "q8")
    assert kinds(decoder) == (DenseLinear, DenseLinear)
    assert weight_bytes(decoder.config, "q8", TorchBackend()) == 4 * decoder.config.num_parameters()


@pytest.mark.parametrize(
    ("backend", "weights", "possible"),
    [
        ("torch", "q4", "auto, q8 or f32"),
        ("torch", "bf16", "auto, q8 or f32"),
        ("reference", "q8", "auto or f32"),
    ],
)
def test_weights_that_a_backend_cannot_use_are_refused_naming_those_it_can(
    tmp_path, backend, weights, possible
):
    with pytest.raises(ConfigError) as caught:
        LLM(write_directory(tmp_path), backend=backend, weights=weights)
    assert str(caught.value) == f"weights must be {possible} with backend {backend}, not {weights}."


def test_loading_warns_of_nothing(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", quant=GGMLQuantizationType.Q8_0)
    code = "import sys; from minikv import LLM; LLM(sys.argv[1], backend='torch').generate('the')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


PROMPTS = [prompt(n, seed=n) for n in (3, 17, 1, 40, 8, 64, 5, 31)]


@pytest.fixture(scope="module", params=[{}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}])
def decoder(request):
    config = replace(TINY, **request.param)
    return Decoder(config, RandomWeights(config), TorchBackend(), "q8")


def run_all(engine, prompts):
    ids = [engine.add(p, greedy(20))[0] for p in prompts]
    tokens = drain(engine).tokens
    return [tokens[i] for i in ids]


@pytest.fixture(scope="module")
def alone(decoder):
    results = [run_all(tiny_engine(decoder), [ids])[0] for ids in PROMPTS]
    assert len({tuple(ids) for ids in results}) > 4, "the tiny model must not answer everything alike"
    return results


def test_batched_ids_are_those_of_each_prompt_alone(decoder, alone):
    assert run_all(tiny_engine(decoder), PROMPTS) == alone


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_any_size_give_the_same_ids(decoder, alone, chunk):
    options = {"prefill_chunk": chunk, "max_seqs": 8, "max_batch_tokens": max(8, chunk) + 3}
    assert run_all(tiny_engine(decoder, **options), PROMPTS) == alone


def test_the_built_in_model_answers_as_in_float32(smollm_path):
    text = (ROOT / "examples" / "data" / "lighthouse.txt").read_text(encoding="utf-8")
    ids = open_model(resolve_model(str(smollm_path))).tokenizer.encode(text)[:200]
    rounded, full = (our_logits(decoder_of(smollm_path, kind), ids) for kind in ("auto", "f32"))
    expected, actual = (torch.log_softmax(logits.double(), -1) for logits in (full, rounded))
    divergence = (expected.exp() * (expected - actual)).sum(-1)
    assert divergence.mean() < 0.015
    assert (rounded.argmax(-1) == full.argmax(-1)).float().mean() > 0.9


def test_the_built_in_model_keeps_its_ids_in_a_batch(smollm_path):
    params = greedy(24)
    prompts = ["A lighthouse is", "Name three birds.", "The sea", "Once upon a time there was"]
    with LLM(str(smollm_path), backend="torch", tiers=TierConfig(hot="256MiB")) as llm:
        together = [result.token_ids for result in llm.generate(prompts, params)]
        assert [llm.generate([p], params)[0].token_ids for p in prompts] == together
