"""The decoder: one class for Llama, Qwen2 and Qwen3. It knows weights, a batch and a backend; it
knows neither text nor the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.backend import CPU, AttentionBackend
from minikv.kernels.batch import Batch
from minikv.models.basis import Basis, FourierBasis, PlainBasis
from minikv.models.config import ModelConfig
from minikv.models.graphs import DecodeGraphs, Graph
from minikv.models.int8_linear import Int8Linear, activation_levels
from minikv.models.linear import DenseLinear, DeviceLinear, Linear
from minikv.models.rope import Rope
from minikv.models.weights import WeightSource

# Kinds of weights that only matrices on a device have.
_DEVICE_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass
class _Layer:
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights packed for one device, and the forward pass over a batch.

    Query, key and value projections are one matrix, gate and up another: fewer, larger products.
    Source tensors are read and dropped layer by layer, so at most one layer exists twice.

    weights_kind: `auto` rounds the matrices that the file has quantised to 8 bits and keeps the
    others float32, `q8` rounds all, `f32` none. All stay float32 in a model of odd sizes, and where
    torch cannot multiply in 8 bits. With 8 bits, vectors are written in another basis. `bf16` and `f16`,
    and `f32` too, are for backends on a device: products and attention in that type, everything between
    them in float32.

    A batch, the token table and logits are on the host; weights and rows of a pass where the backend is.
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
        self.device = backend.device
        self.rope = Rope(config.rope, config.head_dim)
        self.embedding = weights.embedding()
        loader = _Loader(config, weights, weights_kind, self.device)
        self.basis = loader.basis
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.last_norm = weights.load("model.norm.weight")
        self.head = loader.head(self.last_norm)
        # The order of attention's sums depends on how the work was arranged, and where activations
        # are rounded to 8 bits, the last bits decide which way. In float64 they do not reach that far.
        rounded = any(isinstance(matrix, Int8Linear) for matrix in self._matrices)
        self._attention_dtype = torch.float64 if rounded else torch.float32
        self._attention_dtype = loader.device_dtype or self._attention_dtype
        self.graphs: DecodeGraphs | None = None

    def use_graphs(self, make: Callable[[], Graph]) -> None:
        """Capture decode steps as graphs of those that `make` makes, and replay them. For a backend that can
        use its plans again."""
        backend: Any = self.backend
        self.graphs = DecodeGraphs(self._through_layers, backend, make)

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
            return torch.empty(0, self.config.vocab_size)
        return self.head(hidden.index_select(0, rows.to(self.device))).to(CPU, torch.float32)

    @torch.inference_mode()
    def some_logits(self, hidden: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """The columns ids [k] int64, ascending, of `logits`, on the decoder's device; but for rounding where
        the head is the table of inputs or on a device, whose rows can be had one by one. Other heads are
        packed as a whole."""
        if not len(ids):
            return torch.empty(len(rows), 0, device=self.device)
        if isinstance(self.head, DeviceLinear):
            return self.head.of_outputs(hidden.index_select(0, rows.to(self.device)), ids).float()
        apart = self.config.tied_embeddings and len(ids) < self.config.vocab_size
        if not apart:
            return self.logits(hidden, rows)[:, ids]
        weight = self.basis.hidden(self.embedding.lookup(ids).mul_(self.last_norm))
        return DenseLinear(weight)(hidden.index_select(0, rows))

    @torch.inference_mode()
    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer's attention: [hidden, query_heads * head_dim] float32."""
        output = self.layers[layer].output
        size = self.config.num_query_heads * self.config.head_dim
        columns = output(self.basis.inputs(torch.eye(size, device=self.device))).float()
        return self.basis.plain(columns if output.bias is None else columns - output.bias).t().to(CPU)

    @torch.inference_mode()
    def hidden_states(self, batch: Batch) -> Tensor:
        """Normalised last hidden states [T, width] float32 of every row, in the decoder's basis, until the
        next pass."""
        config = self.config
        cos, sin = self.rope.cos_sin(batch.positions, batch.rope_lengths)
        batch.cos, batch.sin = cos.to(self.device), sin.to(self.device)
        batch.pool.write_entries(batch.slots, batch.positions)
        batch.make_room_for_captures(config.num_layers, config.num_query_heads, config.head_dim)
        hidden = self.basis.hidden(self.embedding.lookup(batch.token_ids).to(self.device))
        if self.graphs is not None and (found := self.graphs.replay(hidden, batch)) is not None:
            return found
        self.backend.plan(batch)
        return self._through_layers(hidden, batch)

    def _through_layers(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Normalised last hidden states of rows whose embeddings are `hidden`, which is overwritten; the
        batch has its angles and its plan."""
        config, backend = self.config, self.backend
        heads = config.num_query_heads + 2 * config.num_kv_heads
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normalised(hidden)).view(batch.num_rows, heads, config.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv = self._norm_heads(qkv, layer.q_norm, layer.k_norm)
            q, k, v = backend.rotate_and_write(qkv, batch, index)
            if batch.capture_rows is not None and batch.captured is not None:
                assert batch.captured_norms is not None
                rows = batch.capture_rows.to(self.device)
                batch.captured[index] = q[rows].to(CPU)
                batch.captured_norms[index] = hidden[rows].norm(dim=1).to(CPU)
            for stage in batch.stages:
                stage.fill(index)
            if batch.route is not None:
                batch.route(index, q)
            attended, _ = backend.attend(q.to(self._attention_dtype), k, v, batch, index)
            hidden += layer.output(self.basis.inputs(attended.reshape(batch.num_rows, -1).float()))
            gate, up = layer.gate_up(self._normalised(hidden)).chunk(2, dim=-1)
            hidden += layer.down(self.basis.inputs(F.silu(gate).mul_(up)))
        return self._normalised(hidden)

    def _normalised(self, hidden: Tensor) -> Tensor:
        """RMS norm without its weight, which the matrix that follows holds."""
        return _unit_rms(hidden, self.config.hidden_size, self.config.rms_norm_eps)

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Qwen3: each query and key head normalised over head_dim before rotation."""
        queries, kv_heads = self.config.num_query_heads, self.config.num_kv_heads
        size, eps = self.config.head_dim, self.config.rms_norm_eps
        q, k, v = qkv.float().split([queries, kv_heads, kv_heads], dim=1)
        return torch.cat(
            (_unit_rms(q, size, eps).mul_(q_norm), _unit_rms(k, size, eps).mul_(k_norm), v), dim=1
        )


def _unit_rms(x: Tensor, size: int, eps: float) -> Tensor:
    """Rows divided by the root of their mean square over `size` numbers. Not F.rms_norm: its large
    temporaries take longer to map than to compute."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return x * squares.div_(size).add_(eps).rsqrt_()


class _Loader:
    """Packs matrices, written in the basis that their kind of weights needs. The norm that comes
    before a matrix is a factor of its columns."""

    def __init__(self, config: ModelConfig, weights: WeightSource, kind: str, device: torch.device):
        self.config, self.weights, self.kind, self.device = config, weights, kind, device
        self.device_dtype = _DEVICE_DTYPES.get(kind)
        if device != CPU and self.device_dtype is None:
            self.device_dtype = torch.float32
        rounds = any(self._is_rounded(name) for name in weights.names())
        self.levels = activation_levels() if rounds else None
        self.basis: Basis = PlainBasis() if self.levels is None else FourierBasis()

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}"
        mlp = f"{prefix}.mlp"
        qkv = [f"{prefix}.self_attn.{part}_proj" for part in ("q", "k", "v")]

        def norm(part: str) -> Tensor:
            return self.weights.load(f"{prefix}.{part}.weight")

        def head_norm(part: str) -> Tensor | None:
            return norm(f"self_attn.{part}").to(self.device) if config.qk_norm else None

        return _Layer(
            qkv=self.reading_hidden(qkv, norm("input_layernorm"), config.qkv_bias),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            output=self.writing_hidden(f"{prefix}.self_attn.o_proj", config.output_bias),
            gate_up=self.reading_hidden(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"], norm("post_attention_layernorm"), config.mlp_bias
            ),
            down=self.writing_hidden(f"{mlp}.down_proj", config.mlp_bias),
        )

    def head(self, norm: Tensor) -> Linear:
        module = "model.embed_tokens" if self.config.tied_embeddings else "lm_head"
        return self.reading_hidden([module], norm, bias=False)

    def reading_hidden(self, modules: list[str], norm: Tensor, bias: bool) -> Linear:
        """Several modules with the same inputs, the normalised residual stream, as one matrix."""
        weight = self._joined([f"{module}.weight" for module in modules])
        biases = self._joined([f"{module}.bias" for module in modules]) if bias else None
        return self._pack(modules, weight, biases, lambda rows: self.basis.hidden(rows.mul_(norm)))

    def writing_hidden(self, module: str, bias: bool) -> Linear:
        """A module whose outputs are added to the residual stream."""
        weight = self.basis.hidden(self.weights.load(f"{module}.weight").t()).t()
        biases = self.basis.hidden(self.weights.load(f"{module}.bias").unsqueeze(0))[0] if bias else None
        return self._pack([module], weight, biases, self.basis.against_inputs)

    def _joined(self, names: list[str]) -> Tensor:
        """Tensors one below the other; one alone, such as a large head, is not copied."""
        loaded = [self.weights.load(name) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)

    def _pack(
        self,
        modules: list[str],
        weight: Tensor,
        bias: Tensor | None,
        columns: Callable[[Tensor], Tensor],
    ) -> Linear:
        rounded = any(self._is_rounded(f"{module}.weight") for module in modules)
        if self.device_dtype is not None:
            return DeviceLinear(columns(weight), bias, self.device, self.device_dtype)
        if self.levels is None or not rounded:
            return DenseLinear(columns(weight).contiguous(), bias)
        return Int8Linear(weight, bias, self.levels, columns)

    def _is_rounded(self, name: str) -> bool:
        """Whether a tensor is a matrix to be rounded to 8 bits."""
        config = self.config
        # Transforms of an odd size have no second column that is always zero.
        possible = config.hidden_size % 2 == config.intermediate_size % 2 == 0
        if self.device_dtype is not None or self.kind == "f32":
            return False
        if not possible or len(self.weights.shape(name)) != 2:
            return False
        return self.kind == "q8" or self.weights.blocks(name) is not None
