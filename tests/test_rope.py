"""RoPE tables against transformers' own functions, and the rotation against its definition."""

from __future__ import annotations

import pytest
import torch
from model_files import hf_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minikv.kernels.reference import rotate
from minikv.models.config import RopeConfig
from minikv.models.hf_config import normalise_config
from minikv.models.rope import Rope, attention_factor, inverse_frequencies

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn-attention": YARN | {"attention_factor": 0.75},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn-mscale-alone": YARN | {"mscale": 0.7},
    "yarn-untruncated": YARN | {"truncate": False},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-null-factor": YARN | {"factor": None},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
}


def both(parameters: dict, context: int = 1024, head_dim: int = 64) -> tuple[LlamaConfig, RopeConfig]:
    parameters = {"rope_theta": 50000.0} | parameters
    shape = {"hidden_size": 4 * head_dim, "head_dim": head_dim, "max_position_embeddings": context}
    peer = LlamaConfig(num_attention_heads=4, rope_parameters=dict(parameters), **shape)
    return peer, normalise_config(hf_config(rope_parameters=parameters, rope_theta=..., **shape)).rope


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_attention_factor_equal_transformers(name):
    peer, ours = both(ROPES[name])
    expected, factor = ROPE_INIT_FUNCTIONS[peer.rope_parameters["rope_type"]](peer)
    torch.testing.assert_close(inverse_frequencies(ours, 64), expected, rtol=1e-6, atol=0)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("name", ["default", *(name for name in ROPES if name != "dynamic")])
def test_tables_equal_transformers(name):
    peer, ours = both(ROPES.get(name, {"rope_type": "default"}))
    positions = torch.tensor([0, 1, 2, 77, 128, 500, 1023])
    cos, sin = Rope(ours, 64).cos_sin(positions)
    expected_cos, expected_sin = LlamaRotaryEmbedding(peer)(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, expected_cos[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(sin, expected_sin[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 400, 512])
def test_dynamic_frequencies_follow_the_length_of_the_sequence(length):
    peer, ours = both({"rope_type": "dynamic", "factor": 2.0}, context=256)
    positions = torch.arange(length)
    expected_cos, expected_sin = LlamaRotaryEmbedding(peer)(torch.zeros(1), positions[None])
    cos, sin = Rope(ours, 64).cos_sin(positions, torch.full((length,), length))
    torch.testing.assert_close(cos, expected_cos[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin, expected_sin[0], rtol=1e-4, atol=1e-4)


def test_lengths_matter_for_dynamic_only():
    positions, lengths = torch.arange(9), torch.full((9,), 900)
    _, ours = both(YARN)
    rope = Rope(ours, 64)
    assert torch.equal(rope.cos_sin(positions)[0], rope.cos_sin(positions, lengths)[0])
    _, ours = both({"rope_type": "dynamic", "factor": 2.0}, context=256)
    rope = Rope(ours, 64)
    assert torch.equal(rope.cos_sin(positions)[0], rope.cos_sin(positions, positions + 1)[0])
    assert not torch.equal(rope.cos_sin(positions)[0], rope.cos_sin(positions, lengths)[0])


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_a_token_gets_the_same_bits_in_any_batch(kind):
    rope = Rope(RopeConfig(kind, factor=2.0, original_context=64), 48)
    positions = torch.arange(200)
    whole = rope.cos_sin(positions)
    for index in range(0, 200, 13):
        alone = rope.cos_sin(positions[index : index + 1])
        assert torch.equal(alone[0][0], whole[0][index])
        assert torch.equal(alone[1][0], whole[1][index])


def test_stored_frequency_factors_equal_llama3():
    _, ours = both(ROPES["llama3"])
    plain, scaled = inverse_frequencies(RopeConfig(theta=50000.0), 64), inverse_frequencies(ours, 64)
    stored = RopeConfig("llama3", theta=50000.0, frequency_factors=tuple((plain / scaled).tolist()))
    torch.testing.assert_close(inverse_frequencies(stored, 64), scaled, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype):
    torch.manual_seed(0)
    q = torch.randn(5, 3, 16).to(dtype)
    cos, sin = Rope(RopeConfig(), 16).cos_sin(torch.tensor([0, 3, 9, 33, 63]))
    expected, _ = apply_rotary_pos_emb(q, q, cos.to(dtype), sin.to(dtype), unsqueeze_dim=1)
    rotated = rotate(q, cos, sin)
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 2e-2)
    assert torch.equal(rotated[0], q[0])
