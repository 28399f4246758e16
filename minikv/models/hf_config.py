"""config.json (and generation_config.json) of a Hugging Face model directory as a ModelConfig.

Missing keys get the default that transformers has for the architecture; sizes that define the
model are required. What minikv cannot run is refused here, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minikv.errors import ModelError
from minikv.models.config import Architecture, ModelConfig, RopeConfig
from minikv.models.fields import MOST_LAYERS, Fields, shorten
from minikv.models.rope_config import rope_from_config


@dataclass(frozen=True)
class _Family:
    """Defaults of one architecture for keys a config.json may leave out."""

    architecture: Architecture
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2048, bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": _Family("qwen2", 32768, num_kv_heads=32),
    "Qwen3ForCausalLM": _Family("qwen3", 32768, num_kv_heads=32, head_dim=128),
}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_DTYPES = ("float32", "float16", "bfloat16")


def normalise_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a parsed config.json, old or new key shapes.

    `generation` is the parsed generation_config.json; its EOS ids join those of `raw`.
    Raises ModelError naming key and value for anything malformed or not supported.
    """
    if not isinstance(raw, dict) or not isinstance(generation or {}, dict):
        raise ModelError("config.json and generation_config.json must each hold a JSON object.")
    fields = Fields(raw, "config.json")
    family = _family(fields)
    _refuse_unsupported(fields)
    max_positions = fields.integer("max_position_embeddings", family.max_positions)
    rope = rope_from_config(fields, max_positions)
    max_context = scaled_context(rope, max_positions)
    heads = _heads(fields, family)
    if rope.kind == "dynamic" and heads["head_dim"] < 4:
        raise ModelError("config.json has a dynamic RoPE, which needs a head_dim of at least 4.")
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    _refuse_sliding_window(fields, family.architecture, num_layers, max_context)
    attention_bias = family.architecture != "qwen2" and fields.flag("attention_bias", False)
    eos = fields.token_ids("eos_token_id", family.eos_token_id)
    extra_eos = Fields(generation or {}, "generation_config.json").token_ids("eos_token_id")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        **heads,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=max_context,
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.architecture == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family.architecture == "qwen3",
        bos_token_id=fields.token_id("bos_token_id", family.bos_token_id),
        eos_token_ids=tuple(dict.fromkeys((*eos, *extra_eos))),
        dtype=_dtype(fields),
    )


def scaled_context(rope: RopeConfig, max_positions: int) -> int:
    """Tokens a model reaches with its RoPE scaling.

    dynamic stretches past `max_positions` as it goes; a yarn config often keeps the unscaled
    length in `max_position_embeddings`. The other types state the final length there.
    """
    if rope.kind == "dynamic":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn" and rope.original_context is not None:
        return max(max_positions, int(rope.original_context * rope.factor))
    return max_positions


def _family(fields: Fields) -> _Family:
    supported = ", ".join(_FAMILIES)
    names = fields.get("architectures")
    if not names:
        raise ModelError(f"config.json lacks architectures, which must name one of {supported}.")
    known = [name for name in names if name in _FAMILIES] if isinstance(names, list) else []
    if not known:
        fields.refuse("architectures", f"but only {supported} are supported")
    family = _FAMILIES[known[0]]
    if fields.text("model_type", family.architecture) != family.architecture:
        fields.refuse("model_type", f"which contradicts architectures = {shorten(names)}")
    return family


def _refuse_unsupported(fields: Fields) -> None:
    for key in _EXPERT_KEYS:
        if fields.get(key):
            fields.refuse(key, "but mixture-of-experts models are not supported")
    if fields.get("quantization_config") is not None:
        fields.refuse(
            "quantization_config",
            "but quantised safetensors are not supported; use the full weights or a GGUF file",
        )
    if fields.text("hidden_act", "silu") not in _ACTIVATIONS:
        fields.refuse("hidden_act", f"but only {' and '.join(_ACTIVATIONS)} are supported")


def _refuse_sliding_window(fields: Fields, architecture: Architecture, num_layers: int, context: int) -> None:
    """Refuse windows that would hide part of the context; a longer or unused one is harmless."""
    layer_types = fields.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        fields.refuse("layer_types", "which must be a list")
    for kind in layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json has layer_types with {shorten(kind)}, but only full attention is supported."
            )
    # Qwen configs carry a window that is off unless asked for; a Llama config that has one means it.
    if not fields.flag("use_sliding_window", architecture == "llama"):
        return
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
    else:
        first = fields.integer("max_window_layers", 0 if architecture == "llama" else 28, least=0)
        slides = first < num_layers
    # A Qwen config that asks for a window without saying how long means the family's 4,096.
    default = context if architecture == "llama" else 4096
    if slides and fields.integer("sliding_window", default) < context:
        fields.refuse("sliding_window", f"but a window shorter than the context ({context}) is not supported")


def _heads(fields: Fields, family: _Family) -> dict[str, int]:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = heads
    if "num_key_value_heads" not in fields.values and family.num_kv_heads is not None:
        kv_heads = family.num_kv_heads
    kv_heads = fields.integer("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        fields.refuse("num_attention_heads", f"which is not a multiple of num_key_value_heads = {kv_heads}")
    # A null head_dim means hidden_size / heads; only an absent one has a default of its own.
    default = family.head_dim if "head_dim" not in fields.values else None
    if fields.get("head_dim") is None and default is None:
        if hidden % heads:
            fields.refuse("hidden_size", f"which is not a multiple of num_attention_heads = {heads}")
        default = hidden // heads
    head_dim = fields.integer("head_dim", default)
    if head_dim % 2:
        raise ModelError(
            f"config.json gives a head_dim of {head_dim}, but rotary embeddings need an even one."
        )
    return {"num_query_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        fields.refuse(key, f"but only {', '.join(_DTYPES)} weights are supported")
    return name
