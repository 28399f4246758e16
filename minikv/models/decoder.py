"""The decoder: one class for Llama, Qwen2 and Qwen3. It knows weights, a batch and a backend; it
knows neither text nor the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.backend import AttentionBackend
from minikv.kernels.batch import Batch
from minikv.models.config import ModelConfig
from minikv.models.int8_linear import Int8Linear, activation_levels
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

    weights_kind: `auto` rounds the matrices that the file has quantised to 8 bits and keeps the
    others float32, `q8` rounds all, `f32` none. A matrix with an odd number of inputs stays
    float32, and all do where torch cannot multiply in 8 bits.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        backend: AttentionBackend,
        weights_kind: str = "auto",
    ):
        self.config = config
        self.backend = backend
        self.rope = Rope(config.rope, config.head_dim)
        self.embedding = weights.embedding()
        loader = _Loader(config, weights, weights_kind)
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.norm = weights.load("model.norm.weight")
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        self.head = loader.linear([head], None)
        # The order of attention's sums depends on how the work was arranged, and where activations
        # are rounded to 8 bits, the last bits decide which way. In float64 they do not reach that far.
        rounded = any(isinstance(matrix, Int8Linear) for matrix in self._matrices)
        self._attention_dtype = torch.float64 if rounded else torch.float32

    @property
    def _matrices(self) -> list[Linear]:
        layers = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self.layers]
        return [self.head, *chain.from_iterable(layers)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(matrix.nbytes for matrix in self._matrices)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logit_rows), vocab] float32; keys and values of all rows are written."""
        return self.logits(self.hidden_states(batch), batch.logit_rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits [n, vocab] float32 of the rows [n] int64 of what `hidden_states` gave."""
        if not len(rows):
            return hidden.new_empty(0, self.config.vocab_size)
        return self.head(hidden.index_select(0, rows))

    @torch.inference_mode()
    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer's attention: [hidden, query_heads * head_dim] float32."""
        output = self.layers[layer].output
        columns = output(torch.eye(self.config.num_query_heads * self.config.head_dim))
        return (columns if output.bias is None else columns - output.bias).t()

    @torch.inference_mode()
    def hidden_states(self, batch: Batch) -> Tensor:
        """Normalised last hidden states [T, hidden] float32 of every row."""
        config, backend = self.config, self.backend
        heads = config.num_query_heads + 2 * config.num_kv_heads
        batch.cos, batch.sin = self.rope.cos_sin(batch.positions, batch.rope_lengths)
        batch.pool.write_entries(batch.slots, batch.positions)
        if batch.capture_rows is not None:
            shape = (len(batch.capture_rows), config.num_query_heads, config.head_dim)
            batch.captured = torch.empty(config.num_layers, *shape)
        backend.plan(batch)
        hidden = self.embedding.lookup(batch.token_ids)
        for index, layer in enumerate(self.layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            qkv = layer.qkv(normed).view(batch.num_rows, heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv = self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            q, k, v = backend.rotate_and_write(qkv, batch, index)
            if batch.captured is not None:
                batch.captured[index] = q[batch.capture_rows]
            q, k, v = (x.to(self._attention_dtype) for x in (q, k, v))
            attended, _ = backend.attend(q, k, v, batch, index)
            hidden = hidden + layer.output(attended.reshape(batch.num_rows, -1).float())
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


class _Loader:
    def __init__(self, config: ModelConfig, weights: WeightSource, kind: str):
        self.config, self.weights, self.kind = config, weights, kind
        self.levels = None if kind == "f32" else activation_levels()

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}"

        def vector(part: str) -> Tensor:
            return self.weights.load(f"{prefix}.{part}.weight")

        def joined(*parts: str, bias: bool) -> Linear:
            return self.joined([f"{prefix}.{part}" for part in parts], bias)

        return _Layer(
            attention_norm=vector("input_layernorm"),
            qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
            q_norm=vector("self_attn.q_norm") if config.qk_norm else None,
            k_norm=vector("self_attn.k_norm") if config.qk_norm else None,
            output=joined("self_attn.o_proj", bias=config.output_bias),
            mlp_norm=vector("post_attention_layernorm"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
            down=joined("mlp.down_proj", bias=config.mlp_bias),
        )

    def joined(self, modules: list[str], bias: bool) -> Linear:
        """The weights of several modules with the same inputs as one matrix."""
        biases = [self.weights.load(f"{module}.bias") for module in modules] if bias else []
        return self.linear([f"{module}.weight" for module in modules], torch.cat(biases) if bias else None)

    def linear(self, names: list[str], bias: Tensor | None) -> Linear:
        """The weights of these names one below the other, as one matrix."""
        plain = all(self.weights.blocks(name) is None for name in names)
        odd = self.weights.shape(names[0])[1] % 2
        if self.levels is None or odd or (plain and self.kind == "auto"):
            return DenseLinear(self._load(names), bias)
        return Int8Linear(self._load(names), bias, self.levels)

    def _load(self, names: list[str]) -> Tensor:
        """One weight alone, such as a large head, is not copied."""
        loaded = [self.weights.load(name) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)
