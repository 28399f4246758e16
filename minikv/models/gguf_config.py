"""GGUF metadata and tensor table as a ModelConfig, refusing what the decoder cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minikv.models.config import Architecture, ModelConfig, RopeConfig
from minikv.models.fields import MOST_LAYERS, Fields
from minikv.models.hf_config import scaled_context
from minikv.models.rope import yarn_scale
from minikv.models.weights import EMBEDDING, HEAD

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Keys that change the computation, and the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.dimension_sections": (0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_FIRST_LAYER = "model.layers.0."


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str = "float32",
    frequency_factors: tuple[float, ...] | None = None,
    origin: str = "The GGUF file",
) -> ModelConfig:
    """The ModelConfig of a GGUF file.

    `shapes` maps canonical tensor names to row-major shapes: the size of the vocabulary, tying
    and biases are read off the tensors. `dtype` is the dominant type, `frequency_factors` the
    values of `rope_freqs.weight` if present, `origin` the file's name in messages. Raises
    ModelError naming key and value for anything malformed or not supported.
    """
    general = Fields(metadata, origin)
    name = general.text("general.architecture")
    if name not in _ARCHITECTURES:
        general.refuse("general.architecture", f"but only {', '.join(_ARCHITECTURES)} are supported")
    fields = Fields(_of_architecture(metadata, name), f"{origin}, {name} metadata,")
    for key, neutral in _NEUTRAL.items():
        if fields.get(key) is not None and fields.get(key) not in neutral:
            fields.refuse(key, "which is not supported")
    max_positions = fields.integer("context_length")
    heads = _heads(fields)
    rope = _rope(fields, max_positions, heads["head_dim"], frequency_factors)
    max_context = scaled_context(rope, max_positions)
    if 0 < fields.integer("attention.sliding_window", 0, least=0) < max_context:
        fields.refuse(
            "attention.sliding_window",
            f"but a window shorter than the context ({max_context}) is not supported",
        )
    return ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=shapes.get(EMBEDDING, (1,))[0],
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", most=MOST_LAYERS),
        **heads,
        rms_norm_eps=_as_written(fields.number("attention.layer_norm_rms_epsilon")),
        max_context=max_context,
        rope=rope,
        tied_embeddings=HEAD not in shapes,
        qkv_bias=name == "qwen2" or f"{_FIRST_LAYER}self_attn.q_proj.bias" in shapes,
        output_bias=f"{_FIRST_LAYER}self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{_FIRST_LAYER}mlp.down_proj.bias" in shapes,
        qk_norm=name == "qwen3",
        bos_token_id=general.token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=general.token_ids("tokenizer.ggml.eos_token_id"),
        dtype=dtype,
    )


def _of_architecture(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys below `name.`, without that prefix; a per-layer list of one value is that value."""
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    constant = {
        k: v[0] for k, v in own.items() if isinstance(v, list) and v and all(item == v[0] for item in v)
    }
    return own | constant


def _heads(fields: Fields) -> dict[str, int]:
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(key), list):
            fields.refuse(key, "but sizes that differ between layers are not supported")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        fields.refuse(
            "attention.head_count", f"which is not a multiple of attention.head_count_kv = {kv_heads}"
        )
    if fields.get("attention.key_length") is None and hidden % heads:
        fields.refuse("embedding_length", f"which is not a multiple of attention.head_count = {heads}")
    head_dim = fields.integer("attention.key_length", hidden // heads, least=2)
    if head_dim % 2:
        fields.refuse("attention.key_length", "but rotary embeddings need an even one")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            fields.refuse(key, f"which must equal the head size of {head_dim}")
    return {"num_query_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _rope(fields: Fields, max_positions: int, head_dim: int, factors: tuple[float, ...] | None) -> RopeConfig:
    theta = _as_written(fields.number("rope.freq_base", 10000.0, above=1.0))
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        fields.refuse("rope.scaling.type", "which is not a supported RoPE type (none, linear, yarn)")
    if factors is not None:
        if len(factors) != head_dim // 2 or not all(factor > 0 for factor in factors):
            fields.refuse(
                "rope.dimension_count", "but rope_freqs.weight does not hold one positive factor per pair"
            )
        return RopeConfig("llama3", theta, frequency_factors=factors)
    # Older files name the factor of linear scaling differently; zero means unscaled.
    key = "rope.scaling.factor" if fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = _as_written(fields.number(key, 1.0)) if fields.get(key) else 1.0
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    if factor < 1.0:
        fields.refuse(key, "which must be at least 1")
    if kind == "linear":
        return RopeConfig("linear", theta, factor=factor)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_context=fields.integer("rope.scaling.original_context_length", max_positions),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_attention(fields, factor),
    )


def _yarn_attention(fields: Fields, factor: float) -> float | None:
    """llama.cpp multiplies its attention factors into the one that follows from the scale."""
    extra = fields.number("rope.scaling.attn_factor", 1.0) * fields.number(
        "rope.scaling.yarn_attn_factor", 1.0
    )
    return None if extra == 1.0 else extra * yarn_scale(factor, 1.0)


def _as_written(value: float) -> float:
    """The decimal number behind a float32: 9.99999975e-06 was written 1e-05."""
    return float(str(np.float32(value)))
