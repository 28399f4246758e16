"""GGUF files: the same model as in safetensors, every stored type, and one sentence per fault."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from model_files import gguf_metadata, hf_config, random_tensors, write_gguf

from minikv.errors import ModelError
from minikv.models.gguf_config import config_from_gguf
from minikv.models.gguf_file import GGUFFile, can_dequantise
from minikv.models.gguf_weights import GGUFWeights
from minikv.models.hf_config import normalise_config
from minikv.models.rope import Rope, attention_factor, inverse_frequencies
from minikv.models.sources import open_model, resolve_model

EMBEDDING = "model.embed_tokens.weight"
SUPPORTED = [kind for kind in Q if can_dequantise(kind)]


def open_gguf(path):
    return open_model(resolve_model(str(path)))


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_config_and_tensors_equal_the_directory_they_were_made_from(tmp_path, family, flags, tied):
    raw = hf_config(family, tie_word_embeddings=tied, **flags)
    tensors = random_tensors(raw)
    model = open_gguf(write_gguf(tmp_path / "m.gguf", raw, tensors))
    expected = normalise_config(raw)
    assert {**vars(model.config), "dtype": 0, "eos_token_ids": 0} == {
        **vars(expected),
        "dtype": 0,
        "eos_token_ids": 0,
    }
    assert set(model.config.eos_token_ids) == {0, 2}
    assert sorted(model.weights.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        loaded = model.weights.load(name)
        assert loaded.is_contiguous()
        assert torch.equal(loaded, tensor), name


@pytest.mark.parametrize("quant", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_quantised_tensors_load_close_to_the_original(tmp_path, quant):
    raw = hf_config()
    tensors = random_tensors(raw)
    model = open_gguf(write_gguf(tmp_path / "m.gguf", raw, tensors, quant=quant))
    assert model.config.dtype == quant.name
    for name, tensor in tensors.items():
        error = (model.weights.load(name) - tensor).abs().max()
        assert error <= tensor.abs().max() / (7 if tensor.ndim == 2 else 1e6)
    assert model.weights.load(EMBEDDING, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_every_type_of_the_gguf_package_is_dequantised_as_it_does(tmp_path, kind):
    """Random blocks: enough rows that loading takes several steps, and a lookup of some."""
    values, (block, size) = 2048, gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (301, values // block * size), dtype=np.uint8)
    plain = {Q.F32: np.float32, Q.F16: np.float16}
    rows = stored.view(plain[kind]) if kind in plain else stored
    path = write_gguf(tmp_path / "m.gguf", tensors={}, extra={"token_embd.weight": (rows, kind)})
    weights = GGUFWeights(GGUFFile(path), None)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(rows, kind).copy())
        loaded, table = weights.load(EMBEDDING), weights.embedding()
        ids = torch.tensor([300, 0, 7, 7])
        exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(loaded, expected, **exactly)
        torch.testing.assert_close(table.lookup(ids), expected[ids], **exactly)
        assert table.lookup(ids[:0]).shape == (0, values)


def test_the_supported_types_include_those_in_common_use():
    common = {
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }
    assert common <= {kind.name for kind in SUPPORTED}


def test_a_type_that_cannot_be_dequantised_is_refused_naming_tensor_and_type(tmp_path):
    extra = {"blk.0.odd.weight": (np.zeros((2, 4), np.int32), Q.I32)}
    message = refusal(write_gguf(tmp_path / "m.gguf", extra=extra))
    assert "blk.0.odd.weight" in message
    assert "I32" in message


def test_fingerprint_is_of_the_content(tmp_path):
    first = open_gguf(write_gguf(tmp_path / "a.gguf")).fingerprint
    assert open_gguf(write_gguf(tmp_path / "b.gguf")).fingerprint == first
    other = write_gguf(tmp_path / "c.gguf", tensors=random_tensors(hf_config(), seed=1))
    assert open_gguf(other).fingerprint != first


class TestStrictness:
    def test_missing_tensor(self, tmp_path):
        tensors = random_tensors(hf_config())
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        assert "model.layers.1.self_attn.k_proj.weight" in refusal(
            write_gguf(tmp_path / "m.gguf", tensors=tensors)
        )

    def test_extra_tensor(self, tmp_path):
        extra = {"blk.0.ffn_gate_exps.weight": (np.zeros((2, 64), np.float32), Q.F32)}
        assert "blk.0.ffn_gate_exps.weight" in refusal(write_gguf(tmp_path / "m.gguf", extra=extra))

    def test_wrong_shape(self, tmp_path):
        tensors = random_tensors(hf_config()) | {"model.norm.weight": torch.zeros(32)}
        message = refusal(write_gguf(tmp_path / "m.gguf", tensors=tensors))
        assert "model.norm.weight" in message
        assert "[32]" in message

    def test_more_tokens_than_rows(self, tmp_path):
        raw = hf_config(vocab_size=100)
        assert "100 rows" in refusal(write_gguf(tmp_path / "m.gguf", raw))


class TestBrokenFile:
    def test_missing(self, tmp_path):
        assert "does not exist" in refusal(tmp_path / "none.gguf")

    def test_empty(self, tmp_path):
        (tmp_path / "m.gguf").touch()
        assert "is empty" in refusal(tmp_path / "m.gguf")

    def test_not_a_gguf(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
        assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")

    def test_truncated_anywhere(self, tmp_path):
        whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
        path = tmp_path / "m.gguf"
        for keep in [5, 8, 20, 24, 100, 900, 3000, *range(4000, len(whole) - 1, 9973), len(whole) - 40]:
            path.write_bytes(whole[:keep])
            assert "damaged or incomplete" in refusal(path), keep

    def test_unknown_version(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 99, 0, 0))
        assert "damaged or incomplete" in refusal(tmp_path / "m.gguf")

    @pytest.mark.parametrize("kind", [4, 8, 9])  # uint32, string, array
    def test_absurd_array_length_ends_at_once(self, tmp_path, kind):
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
        (tmp_path / "m.gguf").write_bytes(header + struct.pack("<IQ", kind, 2**60) + bytes(64))
        assert "damaged or incomplete" in refusal(tmp_path / "m.gguf")

    def test_split(self, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", split__count=3)
        assert "split" in refusal(path)

    def test_vocabulary_only(self, tmp_path):
        assert "no tensors" in refusal(write_gguf(tmp_path / "m.gguf", tensors={}))

    def test_unreadable(self, tmp_path, monkeypatch):
        path = write_gguf(tmp_path / "m.gguf")

        def deny(*_args, **_options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(type(path), "open", deny)
        assert "Permission denied" in refusal(path)


def config(architecture: str = "llama", **changes):
    metadata = {"general.architecture": architecture} | gguf_metadata(hf_config(architecture), **changes)
    return config_from_gguf(metadata, {EMBEDDING: (300, 64)})


class TestConfig:
    def test_values_written_as_float32_come_back_as_they_were_meant(self):
        assert config().rms_norm_eps == 1e-5
        assert config(llama__rope__freq_base=float(np.float32(1e-5)) + 500000.0).rope.theta == 500000.0

    def test_vocabulary_and_tying_are_read_off_the_tensors(self):
        assert config().vocab_size == 300
        assert config().tied_embeddings
        metadata = {"general.architecture": "llama"} | gguf_metadata(hf_config())
        assert not config_from_gguf(
            metadata, {EMBEDDING: (300, 64), "lm_head.weight": (300, 64)}
        ).tied_embeddings

    def test_optional_keys_may_be_missing(self):
        removed = ("attention__key_length", "attention__value_length", "rope__freq_base")
        minimal = config(**{f"llama__{key}": ... for key in removed})
        assert minimal == config()
        assert config(llama__attention__head_count_kv=...).num_kv_heads == 4

    def test_arrays_per_layer_are_accepted_if_constant(self):
        assert config(llama__attention__head_count_kv=[2, 2], llama__feed_forward_length=[96, 96]) == config()

    def test_linear_scaling(self):
        scaled = config(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
        assert (scaled.rope.kind, scaled.rope.factor, scaled.max_context) == ("linear", 4.0, 256)
        assert config(llama__rope__scale_linear=4.0) == scaled
        assert config(llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0) == config()
        assert config(llama__rope__scaling__type="linear", llama__rope__scaling__factor=0.0) == config()

    def test_yarn_scaling_equals_that_of_a_directory(self):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
        prefix = "qwen2__rope__scaling__"
        keys = {f"{prefix}type": "yarn", f"{prefix}factor": 4.0, f"{prefix}original_context_length": 256}
        ours, expected = config("qwen2", **keys), normalise_config(hf_config("qwen2", rope_scaling=yarn))
        assert ours.rope == expected.rope
        assert ours.max_context == expected.max_context == 1024
        doubled = config("qwen2", **keys, **{f"{prefix}attn_factor": 2.0})
        assert attention_factor(doubled.rope) == pytest.approx(2 * attention_factor(ours.rope))

    def test_stored_rope_factors_are_llama3_scaling(self, tmp_path):
        factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
        model = open_gguf(write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": (factors, Q.F32)}))
        assert model.config.rope.kind == "llama3"
        assert "rope_freqs.weight" not in model.weights.names()
        plain = inverse_frequencies(normalise_config(hf_config()).rope, 16)
        torch.testing.assert_close(Rope(model.config.rope, 16).inv_freq, plain / torch.from_numpy(factors))

    def test_rope_factors_of_the_wrong_number_are_refused(self, tmp_path):
        extra = {"rope_freqs.weight": (np.ones(5, np.float32), Q.F32)}
        assert "rope_freqs.weight" in refusal(write_gguf(tmp_path / "m.gguf", extra=extra))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("llama__block_count", 0),
            ("llama__expert_count", 8),
            ("llama__attention__head_count", [4, 2]),
            ("llama__attention__head_count_kv", [2, 1]),
            ("llama__attention__head_count_kv", 3),
            ("llama__attention__value_length", 32),
            ("llama__attention__key_length", 15),
            ("llama__rope__dimension_count", 8),
            ("llama__rope__dimension_sections", [4, 4, 0, 0]),
            ("llama__rope__scaling__type", "longrope"),
            ("llama__rope__scaling__factor", 0.5),
            ("llama__attention__sliding_window", 64),
            ("llama__attention__causal", False),
            ("llama__attention__scale", 0.25),
            ("llama__context_length", "long"),
            ("llama__attention__layer_norm_rms_epsilon", -1.0),
        ],
    )
    def test_unsupported_metadata_is_refused_naming_key_and_value(self, key, value):
        with pytest.raises(ModelError) as caught:
            config(**{key: value})
        name = key.removeprefix("llama__").replace("__", ".")
        assert {"attention.head_count_kv": "attention.head_count"}.get(name, name) in str(caught.value)

    def test_unknown_architecture_is_refused(self, tmp_path):
        message = refusal(write_gguf(tmp_path / "m.gguf", architecture="gemma3"))
        assert "gemma3" in message

    def test_required_key_missing(self):
        with pytest.raises(ModelError, match="lacks context_length"):
            config(llama__context_length=...)
