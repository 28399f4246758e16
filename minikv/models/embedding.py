"""Token embedding tables in their stored form: only the rows that are looked up become float32."""

from __future__ import annotations

from typing import Protocol

import gguf
import numpy as np
import torch
from torch import Tensor

_Q8_GROUP = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])


class Embedding(Protocol):
    """A lookup table of one row per token id."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows for ids [T] int64: [T, hidden] float32, fresh memory."""
        ...


class DenseEmbedding:
    """A table held as one tensor [vocab, hidden], in any floating type, mapped or in memory."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows for ids [T] int64: [T, hidden] float32."""
        return self.weight[ids.to(self.weight.device)].to(ids.device, torch.float32)


class BlockEmbedding:
    """A table held as GGUF blocks: `blocks` [vocab, bytes per row] uint8 (or float rows)."""

    def __init__(self, blocks: np.ndarray, block_type: gguf.GGMLQuantizationType) -> None:
        self.blocks = blocks
        self.block_type = block_type
        self._q8 = blocks.view(_Q8_GROUP) if block_type == gguf.GGMLQuantizationType.Q8_0 else None

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows for ids [T] int64: [T, hidden] float32."""
        if self._q8 is not None:
            # The usual type of a token table; one row is wanted in every step.
            groups = self._q8[ids.cpu().numpy()]
            values = groups["codes"] * groups["scale"].astype(np.float32)[..., None]
            return torch.from_numpy(values.reshape(len(groups), 32 * groups.shape[-1])).to(ids.device)
        rows = self.blocks[ids.cpu().numpy()]
        if not len(rows):
            width = gguf.dequantize(self.blocks[:1], self.block_type).shape[-1]
            return torch.empty((0, width), device=ids.device)
        return torch.from_numpy(gguf.dequantize(rows, self.block_type)).to(ids.device)
