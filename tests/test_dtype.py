"""The option `dtype`: of weights and activations on a device, and refused where it means nothing."""

from __future__ import annotations

import pytest
import torch
from cli_tools import error_of, invoke, write_tiny_model

from minikv import LLM, CacheConfig, ConfigError
from minikv.kernels.torch_cpu import TorchBackend
from minikv.loading import load_model
from minikv.models.build import weights_kind
from minikv.models.linear import DeviceLinear


class Away(TorchBackend):
    """A backend on a device: what it loads has types, and no numbers."""

    device = torch.device("meta")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        ("auto", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("fp32", torch.float32),
    ],
)
def test_matrices_activations_and_kv_on_a_device_have_the_dtype(model_dir, dtype, torch_dtype, monkeypatch):
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (Away(), "as asked"))
    loaded = load_model(model_dir, CacheConfig(), 1 << 30, dtype=dtype)
    matrices = [loaded.decoder.head, loaded.decoder.layers[0].qkv, loaded.decoder.layers[1].down]
    assert all(isinstance(matrix, DeviceLinear) for matrix in matrices)
    assert {matrix.weight.dtype for matrix in matrices} == {torch_dtype}
    assert matrices[1](torch.zeros(2, loaded.config.hidden_size, device="meta")).dtype == torch_dtype
    assert loaded.kv_dtype == torch_dtype
    bits_of = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    assert loaded.weights == bits_of[torch_dtype]


def test_what_the_kv_cache_is_asked_to_be_counts_more(model_dir, monkeypatch):
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (Away(), "as asked"))
    loaded = load_model(model_dir, CacheConfig(kv_dtype="int8"), 1 << 30, dtype="fp16")
    assert loaded.kv_dtype == torch.int8


@pytest.mark.parametrize(
    ("of_file", "kind"),
    [("float16", "f16"), ("F16", "f16"), ("bfloat16", "bf16"), ("float32", "bf16"), ("Q4_K", "bf16")],
)
def test_auto_takes_the_type_of_a_file_that_has_16_bits(of_file, kind):
    assert weights_kind("auto", "auto", of_file, Away()) == kind


def test_on_the_cpu_the_kind_of_weights_is_as_asked():
    assert weights_kind("q8", "auto", "float16", TorchBackend()) == "q8"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dtype": "fp16"},
            "dtype fp16 is for device cuda; on the CPU weights says how weights are kept: auto, q4, q8, bf16 "
            "or f32.",
        ),
        ({"dtype": "int8"}, "dtype must be auto, bf16, fp16 or fp32, not 'int8'."),
    ],
)
def test_a_dtype_that_means_nothing_is_refused(model_dir, options, sentence):
    with pytest.raises(ConfigError) as caught:
        LLM(model_dir, **options)
    assert str(caught.value) == sentence
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    assert error_of(invoke("generate", model_dir, "-p", "hi", *arguments)) == sentence


@pytest.mark.parametrize("weights", ["q4", "bf16"])
def test_weights_on_a_device_are_refused_naming_dtype(model_dir, weights, monkeypatch):
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (Away(), "as asked"))
    with pytest.raises(ConfigError) as caught:
        load_model(model_dir, CacheConfig(), 1 << 30, weights=weights)
    assert str(caught.value) == (
        f"weights {weights} is for the CPU; on device meta dtype says the type of weights and activations: "
        "auto, bf16, fp16 or fp32."
    )
