"""What minikv knows of a model: sizes, RoPE, biases and end tokens, in one shape for all sources.

Values only. `hf_config` and `gguf_config` fill these from files and refuse what is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

Architecture = Literal["llama", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, by the names transformers uses.

    `original_context` is the length the scaling starts from (dynamic, llama3, yarn). The yarn
    `attention_factor` scales cos and sin; None derives it from `factor`, or from `mscale` and
    `mscale_all_dim` when both are set. `frequency_factors` (one per rotary pair) divide the
    unscaled frequencies: the form in which GGUF files store llama3 scaling.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama, Qwen2 or Qwen3 family.

    `max_context` counts tokens and includes what RoPE scaling adds. `dtype` is the type most
    weights are stored in (`bfloat16`, `float16`, `float32`, or a GGUF type such as `Q4_1`).
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers, stored as `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def num_parameters(self) -> int:
        """Weights in the model; a tied head is counted once."""
        return sum(prod(shape) for shape in expected_shapes(self).values())


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, by canonical Hugging Face name, as [out, in] or [size].

    `lm_head.weight` is absent when the embeddings are tied.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices: dict[str, tuple[tuple[int, int], bool]] = {
        "self_attn.q_proj": ((q_size, hidden), config.qkv_bias),
        "self_attn.k_proj": ((kv_size, hidden), config.qkv_bias),
        "self_attn.v_proj": ((kv_size, hidden), config.qkv_bias),
        "self_attn.o_proj": ((hidden, q_size), config.output_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, bias) in matrices.items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = (shape[0],)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
