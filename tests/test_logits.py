"""The decoder against transformers: same weights, same logits."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
import transformers

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.decoder import Decoder
from minikv.models.hf_config import normalise_config
from minikv.models.safetensors_weights import SafetensorsWeights
from minikv.models.weights import check_weights
from minikv.scheduler.batching import Rows, batch_of

ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
    },
}
GROUPS = {1: (4, 4), 2: (4, 2), 3: (6, 2), 4: (8, 2), 7: (14, 2), 8: (8, 1)}


def peer_and_ours(
    tmp_path, family, *, heads=(6, 2), rope=None, tied=False, head_dim=16, context=256, **extra
):
    """A random transformers model, saved, and minikv's decoder over the saved files."""
    torch.manual_seed(0)
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    rope_parameters = {"rope_theta": 10000.0, **(rope or {"rope_type": "default"})}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=131,
        hidden_size=64 if family == "qwen3" else heads[0] * head_dim,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=rope_parameters,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attn_implementation="eager",
        **extra,
    )
    peer = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            # Biases and norms start at 0 and 1, which would hide a mistake in their use.
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    peer.save_pretrained(tmp_path)
    ours = normalise_config(json.loads((tmp_path / "config.json").read_text()))
    weights = SafetensorsWeights(tmp_path)
    check_weights(weights, ours)
    return peer, Decoder(ours, weights, TorchBackend())


def our_logits(decoder: Decoder, ids: list[int], chunk: int = 512) -> torch.Tensor:
    """Logits of every position, the prompt computed in chunks."""
    config = decoder.config
    num_pages = -(-len(ids) // 8) * config.num_layers * config.num_kv_heads
    pool = PagePool(num_pages, 8, config.head_dim, torch.float32)
    store = LaneStore(pool, 1, config.num_layers, config.num_kv_heads, len(ids))
    seq, rows = store.open(), []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        assert store.reserve(seq, len(part))
        rows.append(decoder.forward(batch_of(store, [Rows(seq, part, start, len(ids), "all")])))
        store.append(seq, len(part))
    return torch.cat(rows)


def assert_same_logits(peer, decoder, length=96, chunk=512):
    ids = np.random.default_rng(0).integers(3, peer.config.vocab_size, length).tolist()
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0].float()
    actual = our_logits(decoder, ids, chunk)
    spread = (expected.max() - expected.min()).item()
    difference = (actual - expected).abs().max().item()
    assert difference < 1e-4 * spread, f"logits differ by {difference:.2e} of {spread:.2f}"
    return difference / spread


@pytest.mark.parametrize("rope", ROPES)
def test_llama_equals_transformers_with_every_rope_type(tmp_path, rope):
    peer, ours = peer_and_ours(tmp_path, "llama", rope=ROPES[rope])
    assert_same_logits(peer, ours, length=200)


def test_dynamic_rope_equals_transformers_past_the_original_context(tmp_path):
    peer, ours = peer_and_ours(tmp_path, "llama", rope=ROPES["dynamic"], context=64)
    assert ours.config.max_context == 128
    assert_same_logits(peer, ours, length=120)
    assert_same_logits(peer, ours, length=120, chunk=17)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_family_and_group_size_equals_transformers(tmp_path, family, group):
    tied = group % 2 == 0
    peer, ours = peer_and_ours(tmp_path, family, heads=GROUPS[group], tied=tied)
    assert ours.config.group_size == group
    assert ours.config.tied_embeddings is tied
    assert_same_logits(peer, ours)
    assert_same_logits(peer, ours, chunk=7)


def test_qwen3_with_a_head_dim_of_its_own_equals_transformers(tmp_path):
    peer, ours = peer_and_ours(tmp_path, "qwen3", heads=(4, 2), head_dim=32)
    assert ours.config.head_dim * ours.config.num_query_heads != ours.config.hidden_size
    assert_same_logits(peer, ours)


def test_llama_with_attention_and_mlp_biases_equals_transformers(tmp_path):
    peer, ours = peer_and_ours(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert ours.config.output_bias and ours.config.mlp_bias
    assert_same_logits(peer, ours)


def test_real_small_model_equals_transformers_on_the_same_weights(smollm_path):
    from pydoc_data.topics import topics

    from minikv.models.sources import open_model, resolve_model

    opened = open_model(resolve_model(str(smollm_path)))
    ids = opened.tokenizer.encode(topics["assignment"])[:512]
    assert len(ids) == 512
    c = opened.config
    peer = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_query_heads,
            num_key_value_heads=c.num_kv_heads,
            max_position_embeddings=c.max_context,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            tie_word_embeddings=c.tied_embeddings,
        )
    ).eval()
    state = {name: opened.weights.load(name) for name in opened.weights.names() if "rope" not in name}
    missing, extra = peer.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not extra, asdict(c)
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0]
    actual = our_logits(Decoder(c, opened.weights, TorchBackend(), "f32"), ids, chunk=128)
    spread = (expected.max() - expected.min()).item()
    assert (actual - expected).abs().max().item() < 1e-4 * spread
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() > 0.995
