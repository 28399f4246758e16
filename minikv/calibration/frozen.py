"""A model in plain torch, for losses that its answers decide: nothing of it is learned, and what it attends
to may be.

    token ids --> hidden --each layer: queries, keys, values --Attend--> hidden --> logits of every row
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.config import format_size
from minikv.errors import ModelError
from minikv.kernels.reference import rotate
from minikv.memory import available_bytes
from minikv.models.config import ModelConfig
from minikv.models.rope import Rope
from minikv.models.sources import open_model, resolve_model
from minikv.models.weights import EMBEDDING, HEAD, WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""What a layer's rows attend to: its index, rotated queries [rows, query_heads, head_dim], rotated keys and
values [rows, kv_heads, head_dim], to attended [rows, query_heads, head_dim]."""

_BYTES = 4  # of a weight


class Frozen:
    """All weights as float32, whatever the file has, so that gradients lose nothing in between."""

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        self.config = config
        self._rope = Rope(config.rope, config.head_dim)
        head = EMBEDDING if config.tied_embeddings else HEAD
        self._weights = {name: weights.load(name) for name in weights.names()}
        self._head = self._weights[head]

    @classmethod
    def open(
        cls, model: str | os.PathLike[str], *, revision: str | None = None, offline: bool = False
    ) -> Frozen:
        """Of a model by name or path. ModelError where memory is short for it."""
        opened = open_model(resolve_model(os.fspath(model), revision=revision, offline=offline))
        try:
            needed, free = _BYTES * opened.config.num_parameters(), available_bytes()
            if needed > free:
                raise ModelError(
                    f"Learning from the logits of {opened.name} needs {format_size(needed)} for its weights, "
                    f"and {format_size(free)} are free; learn from attention alone, with --logits 0."
                )
            return cls(opened.config, opened.weights)
        finally:
            opened.weights.close()

    def logits(self, ids: list[int], start: int, attend: Attend) -> Tensor:
        """Logits [rows, vocab] float32 of tokens at positions from `start` on."""
        config, rows = self.config, len(ids)
        positions = torch.arange(start, start + rows)
        cos, sin = self._rope.cos_sin(positions, torch.full((rows,), start + rows))
        hidden = self._weights[EMBEDDING][torch.tensor(ids)]
        for index in range(config.num_layers):
            normed = self._normalised(hidden, self._of(index, "input_layernorm.weight"))
            q, k, v = (self._heads(index, part, normed) for part in "qkv")
            attended = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            hidden = hidden + self._linear(index, "self_attn.o_proj", attended.flatten(1))
            normed = self._normalised(hidden, self._of(index, "post_attention_layernorm.weight"))
            gate, up = (self._linear(index, f"mlp.{part}_proj", normed) for part in ("gate", "up"))
            hidden = hidden + self._linear(index, "mlp.down_proj", F.silu(gate) * up)
        return F.linear(self._normalised(hidden, self._weights["model.norm.weight"]), self._head)

    def _of(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}"]

    def _linear(self, layer: int, module: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"model.layers.{layer}.{module}.bias")
        return F.linear(x, self._of(layer, f"{module}.weight"), bias)

    def _heads(self, layer: int, part: str, normed: Tensor) -> Tensor:
        """Queries, keys or values, by head and not rotated."""
        heads = self._linear(layer, f"self_attn.{part}_proj", normed).unflatten(1, (-1, self.config.head_dim))
        if self.config.qk_norm and part != "v":
            return self._normalised(heads, self._of(layer, f"self_attn.{part}_norm.weight"))
        return heads

    def _normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * weight
