"""The decoder on the compiled backend: packed weights, and all layers in one call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.kernels.batch import Batch
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LayerStruct, ModelStruct
from minikv.kernels.cpu.pack import (
    BLOCK_TYPES,
    GROUP,
    PackedMatrix,
    WeightArena,
    pack_blocks,
    pack_codes,
    pack_dense,
    quantise,
)
from minikv.models.config import ModelConfig
from minikv.models.rope import Rope
from minikv.models.weights import WeightSource


@dataclass
class _Layer:
    """Owns what one LayerStruct points at."""

    norms: list[Tensor | None]
    matrices: list[PackedMatrix]


class PackedDecoder:
    """Packed weights and the forward pass over a batch; the same interface as `Decoder`.

    weights_kind: `auto` keeps what the file has (types that the kernels cannot read become q8, or
    stay 16 bit if they are), `q4`, `q8`, `bf16` and `f32` convert. A matrix whose inputs are no
    multiple of 32 cannot be quantised and stays float32.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightSource, backend: CpuBackend, weights_kind: str = "auto"
    ):
        self.config = config
        self.backend = backend
        self.rope = Rope(config.rope, config.head_dim)
        self.embedding = weights.embedding()
        loader = _Loader(config, weights, backend.library, weights_kind)
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self.norm = weights.load("model.norm.weight")
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        self.head = loader.matrix(head)
        structs = (LayerStruct * config.num_layers)(*(_struct(layer) for layer in self._layers))
        self._model = ModelStruct(
            config.hidden_size,
            config.intermediate_size,
            config.num_query_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_layers,
            config.rms_norm_eps,
            ctypes.cast(structs, ctypes.POINTER(LayerStruct)),
        )
        self._structs = structs

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return self.head.nbytes + sum(m.nbytes for layer in self._layers for m in layer.matrices)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logit_rows), vocab] float32; keys and values of all rows are written."""
        hidden = self.hidden_states(batch)
        if not batch.logit_rows.shape[0]:
            return hidden.new_empty(0, self.config.vocab_size)
        logits, batch.likeliest = self._head(hidden, batch.logit_rows)
        return logits

    def hidden_states(self, batch: Batch) -> Tensor:
        """Last hidden states [T, hidden] float32 of every row, before the last norm."""
        hidden = self.embedding.lookup(batch.token_ids)
        table = self.rope.table(int(batch.positions.numpy().max()))
        batch.angles_by_position = table is not None
        batch.cos, batch.sin = table or self.rope.cos_sin(batch.positions, batch.rope_lengths)
        config = self.config
        batch.make_room_for_captures(config.num_layers, config.num_query_heads, config.head_dim)
        self.backend.plan(batch)
        self.backend.layers(self._model, batch, hidden, 0, self.config.num_layers)
        return hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits [n, vocab] float32 of the rows [n] int64 of what `hidden_states` gave."""
        if not rows.shape[0]:
            return hidden.new_empty(0, self.config.vocab_size)
        return self._head(hidden, rows)[0]

    def some_logits(self, hidden: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """The columns ids [k] int64, ascending, of `logits`, in the same bits, without the others."""
        groups = torch.unique_consecutive(ids // 8)
        if not len(groups) or not len(rows):
            return hidden.new_empty(len(rows), len(ids))
        part = self.head.some(groups)
        found = self._head(hidden, rows, part)[0]
        if part.outputs == len(ids):
            return found
        return found[:, torch.searchsorted(groups, ids // 8) * 8 + ids % 8]

    def _head(self, hidden: Tensor, rows: Tensor, head: PackedMatrix | None = None) -> tuple[Tensor, Tensor]:
        return self.backend.logits(head or self.head, hidden, rows, self.norm, self.config.rms_norm_eps)

    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer's attention: [hidden, query_heads * head_dim] float32."""
        output = self._layers[layer].matrices[1]
        columns = self.backend.linear(output, torch.eye(output.inputs))
        return (columns if output.bias is None else columns - output.bias[: output.outputs]).t()


class _Loader:
    def __init__(self, config: ModelConfig, weights: WeightSource, library: ctypes.CDLL, kind: str):
        self.config, self.weights, self.library, self.kind = config, weights, library, kind
        self.arena = WeightArena()

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}"

        def name(part: str) -> str:
            return f"{prefix}.{part}"

        def vector(part: str) -> Tensor:
            return self.weights.load(name(f"{part}.weight"))

        qkv = [name(f"self_attn.{part}_proj") for part in ("q", "k", "v")]
        mlp = {part: name(f"mlp.{part}_proj") for part in ("gate", "up", "down")}
        qk_norms = (
            [vector("self_attn.q_norm"), vector("self_attn.k_norm")] if config.qk_norm else [None, None]
        )
        gate, up = self.matched((mlp["gate"],), (mlp["up"],), bias=config.mlp_bias)
        return _Layer(
            norms=[vector("input_layernorm"), *qk_norms, vector("post_attention_layernorm")],
            matrices=[
                self.joined(*qkv, bias=config.qkv_bias),
                self.joined(name("self_attn.o_proj"), bias=config.output_bias),
                gate,
                up,
                self.joined(mlp["down"], bias=config.mlp_bias),
            ],
        )

    def matrix(self, name: str) -> PackedMatrix:
        """One weight by its full name."""
        return self._pack([name], None, self._kind_for([name]))

    def joined(self, *modules: str, bias: bool) -> PackedMatrix:
        """The weights of several modules with the same inputs as one matrix."""
        return self.matched(modules, bias=bias)[0]

    def matched(self, *groups: tuple[str, ...], bias: bool) -> list[PackedMatrix]:
        """A matrix per group of modules, all of one kind: they share their quantised inputs."""
        names = [[f"{module}.weight" for module in modules] for modules in groups]
        kind = self._kind_for([n for group in names for n in group])
        biases = [
            torch.cat([self.weights.load(f"{module}.bias") for module in modules]) if bias else None
            for modules in groups
        ]
        return [self._pack(group, b, kind) for group, b in zip(names, biases, strict=True)]

    def _kind_for(self, names: list[str]) -> str:
        if self.weights.shape(names[0])[1] % GROUP:
            return "f32"
        if self.kind != "auto":
            return self.kind
        kinds = {KEPT.get(self.weights.stored_dtype(name), "q8") for name in names}
        return kinds.pop() if len(kinds) == 1 else "q8"

    def _pack(self, names: list[str], bias: Tensor | None, kind: str) -> PackedMatrix:
        if kind not in ("q4", "q8"):
            return pack_dense(self._load(names), kind, bias, self.arena)
        stored = [self.weights.blocks(name) for name in names]
        blocks = [b for b in stored if b is not None and BLOCK_TYPES.get(b.type, (0, ""))[1] == kind]
        same_type = len({b.type for b in blocks}) == 1
        whole_groups = all(len(b.data) % 8 == 0 for b in blocks[:-1])
        if len(blocks) == len(names) and same_type and whole_groups:
            inputs = self.weights.shape(names[0])[1]
            return pack_blocks(self.library, blocks, inputs, bias, self.arena)
        codes = quantise(self._load(names), kind)
        return pack_codes(codes, bias, self.arena)

    def _load(self, names: list[str]) -> Tensor:
        """Weights one below the other; one alone, such as a large head, is not copied."""
        loaded = [self.weights.load(name) for name in names]
        return loaded[0] if len(loaded) == 1 else torch.cat(loaded)


# What `auto` makes of a stored type; all others become q8.
KEPT = {
    "Q4_0": "q4",
    "Q4_1": "q4",
    "Q8_0": "q8",
    "float32": "f32",
    "F32": "f32",
    "bfloat16": "bf16",
    "BF16": "bf16",
    "float16": "f16",
    "F16": "f16",
}


def _struct(layer: _Layer) -> LayerStruct:
    pointers = [None if norm is None else norm.data_ptr() for norm in layer.norms]
    return LayerStruct(*pointers, *(matrix.struct for matrix in layer.matrices))
