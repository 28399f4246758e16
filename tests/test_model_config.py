"""config.json in all its shapes, and the sentence for each thing that is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from model_files import hf_config

from minikv.errors import ModelError
from minikv.models.config import RopeConfig, expected_shapes
from minikv.models.hf_config import normalise_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def refusal(raw, generation=None) -> str:
    with pytest.raises(ModelError) as caught:
        normalise_config(raw, generation)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN},
            {"rope_parameters": {"full_attention": YARN | {"rope_theta": 1e4}}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN | {"type": "yarn"}},
            {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), YARN)},
        ),
    ],
)
def test_old_and_new_rope_shapes_mean_the_same(old, new):
    before = normalise_config(hf_config(**{"rope_theta": ...} | old))
    assert normalise_config(hf_config(**{"rope_theta": ...} | new)) == before


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers():
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN}
    assert normalise_config(hf_config(**both)).rope.kind == "linear"


def test_original_context_beside_the_rope_settings_is_read():
    raw = hf_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=128)
    assert normalise_config(raw).rope.original_context == 128


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (YARN, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_context_includes_what_the_scaling_adds(rope, context):
    assert normalise_config(hf_config(rope_scaling=rope)).max_context == context


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_missing_keys_get_the_defaults_of_transformers(family):
    peer = getattr(transformers, f"{family}Config")()
    architecture = family.lower()
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"architectures": [f"{family}ForCausalLM"]} | {key: getattr(peer, key) for key in required}
    config = normalise_config(raw)
    assert config.architecture == architecture
    assert config.num_kv_heads == peer.num_key_value_heads
    assert config.head_dim == (
        getattr(peer, "head_dim", None) or peer.hidden_size // peer.num_attention_heads
    )
    assert config.max_context == peer.max_position_embeddings
    assert config.rms_norm_eps == peer.rms_norm_eps
    assert config.rope == RopeConfig(theta=peer.rope_parameters["rope_theta"])
    assert config.tied_embeddings == peer.tie_word_embeddings
    assert config.bos_token_id == peer.bos_token_id
    assert config.eos_token_ids == (() if peer.eos_token_id is None else (peer.eos_token_id,))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_expected_tensors_are_those_of_transformers(family, tied):
    flags = {"attention_bias": True} | ({"mlp_bias": True} if family == "llama" else {})
    raw = hf_config(family, tie_word_embeddings=tied, **(flags if family != "qwen2" else {}))
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    keys = {
        key: value for key, value in raw.items() if key not in ("architectures", "rope_theta", "torch_dtype")
    }
    peer = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**keys))
    state = {name: tuple(tensor.shape) for name, tensor in peer.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    config = normalise_config(raw)
    assert expected_shapes(config) == state
    assert config.num_parameters() == sum(parameter.numel() for parameter in peer.parameters())


def test_a_null_head_dim_is_derived_and_an_explicit_one_kept():
    assert normalise_config(hf_config(head_dim=None)).head_dim == 16
    assert normalise_config(hf_config("qwen3", head_dim=None)).head_dim == 16
    assert normalise_config(hf_config("qwen3", head_dim=...)).head_dim == 128
    assert normalise_config(hf_config("qwen3", head_dim=32)).head_dim == 32


def test_kv_bytes_count_keys_and_values_of_all_layers():
    config = normalise_config(hf_config())
    assert config.kv_bytes_per_token(torch.float16) == 2 * 2 * 2 * 16 * 2
    assert config.group_size == 2


@pytest.mark.parametrize(
    ("eos", "extra", "union"),
    [
        (2, None, (2,)),
        ([2, 5], {"eos_token_id": [5, 7]}, (2, 5, 7)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {}, ()),
        (..., {"eos_token_id": None}, (2,)),
    ],
)
def test_eos_is_the_union_of_config_and_generation_config(eos, extra, union):
    assert normalise_config(hf_config(eos_token_id=eos), extra).eos_token_ids == union


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 64},
        {"quantization_config": None, "num_experts": None, "rope_scaling": None},
        {"hidden_act": "swish", "partial_rotary_factor": 1.0},
    ],
)
def test_settings_without_effect_are_accepted(harmless):
    plain = normalise_config(hf_config("qwen2"))
    assert normalise_config(hf_config("qwen2", **harmless)) == plain


@pytest.mark.parametrize(
    ("architecture", "changes", "fragments"),
    [
        ("llama", {"architectures": ...}, ["lacks architectures"]),
        ("llama", {"architectures": []}, ["lacks architectures"]),
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel"]),
        ("llama", {"architectures": "LlamaForCausalLM"}, ["architectures", "LlamaForCausalLM"]),
        ("llama", {"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM"]),
        ("llama", {"model_type": "mistral"}, ["model_type", "mistral"]),
        ("qwen3", {"num_experts": 8}, ["num_experts = 8", "mixture-of-experts"]),
        ("llama", {"num_local_experts": 4}, ["num_local_experts = 4"]),
        ("llama", {"sliding_window": 64}, ["sliding_window = 64"]),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            ["sliding_window = 64", "256"],
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2},
            ["sliding_window = 64"],
        ),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, ["layer_types", "linear_attention"]),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads = 4", "num_key_value_heads = 3"]),
        ("llama", {"head_dim": None, "hidden_size": 66}, ["hidden_size = 66", "num_attention_heads = 4"]),
        ("llama", {"head_dim": 15}, ["head_dim", "15"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers = 0"]),
        ("llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers = 1000000000"]),
        ("llama", {"hidden_size": -64}, ["hidden_size = -64"]),
        ("llama", {"vocab_size": "many"}, ["vocab_size", "many"]),
        ("llama", {"vocab_size": ...}, ["lacks vocab_size"]),
        ("llama", {"num_attention_heads": True}, ["num_attention_heads = True"]),
        ("llama", {"intermediate_size": 1.5}, ["intermediate_size = 1.5"]),
        ("llama", {"rms_norm_eps": float("nan")}, ["rms_norm_eps = nan"]),
        ("llama", {"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "1e-5"]),
        ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ("llama", {"eos_token_id": [2, -1]}, ["eos_token_id", "-1"]),
        ("llama", {"bos_token_id": 1.5}, ["bos_token_id = 1.5"]),
    ],
)
def test_unsupported_settings_are_refused_naming_key_and_value(architecture, changes, fragments):
    message = refusal(hf_config(architecture, **changes))
    assert all(fragment in message for fragment in ["config.json", *fragments]), message


@pytest.mark.parametrize(
    ("rope", "fragments"),
    [
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, ["type", "longrope"]),
        ({"type": "su"}, ["su"]),
        ({"rope_type": "ntk-by-parts"}, ["rope_type", "ntk-by-parts"]),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, ["mrope_section"]),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, ["mrope_section"]),
        ({"type": "linear", "rope_type": "yarn", "factor": 2.0}, ["yarn", "linear"]),
        ({"rope_type": ["yarn"]}, ["rope_type"]),
        ({"rope_type": "linear"}, ["lacks factor"]),
        ({"rope_type": "linear", "factor": 0.5}, ["factor = 0.5"]),
        ({"rope_type": "linear", "factor": "2"}, ["factor"]),
        (
            {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25},
            ["partial_rotary_factor = 0.25"],
        ),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, ["lacks high_freq_factor"]),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            ["high_freq_factor = 1", "low_freq_factor"],
        ),
        (YARN | {"beta_fast": 1.0, "beta_slow": 2.0}, ["beta_fast", "beta_slow"]),
        (YARN | {"original_max_position_embeddings": 0}, ["original_max_position_embeddings = 0"]),
        ({"rope_type": "default", "rope_theta": 0}, ["rope_theta = 0"]),
        ("yarn", ["rope_scaling", "yarn"]),
        (
            {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
            ["rope_scaling", "per layer type"],
        ),
    ],
)
def test_unsupported_rope_settings_are_refused_naming_key_and_value(rope, fragments):
    message = refusal(hf_config(rope_scaling=rope))
    assert all(fragment in message for fragment in ["config.json", "rope_scaling", *fragments]), message


def test_a_generation_config_of_the_wrong_kind_is_refused():
    assert "generation_config.json" in refusal(hf_config(), {"eos_token_id": "</s>"})
    assert "object" in refusal([])


def test_dynamic_rope_needs_more_than_one_pair():
    raw = hf_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, head_dim=2)
    assert "head_dim" in refusal(raw)


def test_a_config_survives_json():
    config = normalise_config(json.loads(json.dumps(hf_config(rope_scaling=YARN))))
    assert config.rope == replace(RopeConfig(), kind="yarn", factor=4.0, original_context=64)
