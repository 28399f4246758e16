"""The decoder: one class for Llama, Qwen2 and Qwen3. It knows weights, a batch and a backend; it
knows neither text nor the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.backend import AttentionBackend
from minikv.kernels.batch import Batch
from minikv.models.config import ModelConfig
from minikv.models.linear import DenseLinear, Linear
from minikv.models.rope import Rope
from minikv.models.weights import WeightSource


@dataclass
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights packed for one device, and the forward pass over a batch.

    Query, key and value projections are one matrix, gate and up another: fewer, larger products.
    Source tensors are read and dropped layer by layer, so at most one layer exists twice.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, backend: AttentionBackend):
        self.config = config
        self.backend = backend
        self.rope = Rope(config.rope, config.head_dim)
        self.embedding = weights.embedding()
        self.layers = [_load_layer(config, weights, index) for index in range(config.num_layers)]
        self.norm = weights.load("model.norm.weight")
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        self.head: Linear = DenseLinear(weights.load(head))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logit_rows), vocab] float32; keys and values of all rows are written."""
        hidden = self.hidden_states(batch)
        if not len(batch.logit_rows):
            return hidden.new_empty(0, self.config.vocab_size)
        return self.head(hidden.index_select(0, batch.logit_rows))

    @torch.inference_mode()
    def hidden_states(self, batch: Batch) -> Tensor:
        """Normalised last hidden states [T, hidden] float32 of every row."""
        config, backend = self.config, self.backend
        heads = config.num_query_heads + 2 * config.num_kv_heads
        batch.cos, batch.sin = self.rope.cos_sin(batch.positions, batch.rope_lengths)
        batch.pool.write_entries(batch.slots, batch.positions)
        backend.plan(batch)
        hidden = self.embedding.lookup(batch.token_ids)
        for index, layer in enumerate(self.layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            qkv = layer.qkv(normed).view(batch.num_rows, heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv = self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            q, k, v = backend.rotate_and_write(qkv, batch, index)
            attended, _ = backend.attend(q, k, v, batch, index)
            hidden = hidden + layer.output(attended.reshape(batch.num_rows, -1))
            gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return self._rms_norm(hidden, self.norm)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Qwen3: each query and key head normalised over head_dim before rotation."""
        queries, kv_heads = self.config.num_query_heads, self.config.num_kv_heads
        q, k, v = qkv.split([queries, kv_heads, kv_heads], dim=1)
        return torch.cat((self._rms_norm(q, q_norm), self._rms_norm(k, k_norm), v), dim=1)


def _load_layer(config: ModelConfig, weights: WeightSource, index: int) -> _Layer:
    prefix = f"model.layers.{index}"

    def load(name: str) -> Tensor:
        return weights.load(f"{prefix}.{name}")

    def linear(*names: str, bias: bool) -> Linear:
        weight = torch.cat([load(f"{name}.weight") for name in names])
        return DenseLinear(weight, torch.cat([load(f"{name}.bias") for name in names]) if bias else None)

    attention = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
    return _Layer(
        attention_norm=load("input_layernorm.weight"),
        qkv=linear(*attention, bias=config.qkv_bias),
        q_norm=load("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=load("self_attn.k_norm.weight") if config.qk_norm else None,
        output=linear("self_attn.o_proj", bias=config.output_bias),
        mlp_norm=load("post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
        down=linear("mlp.down_proj", bias=config.mlp_bias),
    )
