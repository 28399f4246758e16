"""Weights of a GGUF file under their canonical names, dequantised one tensor at a time."""

from __future__ import annotations

import re
from collections import Counter

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from minikv.kernels.cpu.pack import StoredBlocks
from minikv.models.embedding import BlockEmbedding
from minikv.models.gguf_file import GGUFFile
from minikv.models.weights import EMBEDDING, HEAD, dominant_dtype

_ROPE_FACTORS = "rope_freqs.weight"  # part of the RoPE config, not a weight of the decoder
_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"^blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)$")
_BLOCK_VALUES = 1 << 18  # values dequantised at a time: temporaries stay in the processor's cache
_PLAIN = ("F64", "F32", "F16", "BF16")
_SAMPLE = 64  # bytes from each end of a tensor for the fingerprint


def canonical_name(name: str) -> str:
    """The Hugging Face name of a llama.cpp tensor; unknown names come back unchanged."""
    match = _LAYER_NAME.match(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def rope_factors(file: GGUFFile) -> tuple[float, ...] | None:
    """The stored divisors of the rotary frequencies, one per pair, None if the file has none."""
    if _ROPE_FACTORS not in file.tensors:
        return None
    tensor = file.tensors[_ROPE_FACTORS]
    return tuple(gguf.dequantize(tensor.data, tensor.tensor_type).ravel().tolist())


class GGUFWeights:
    """The tensors of an open GGUF file.

    `rotary_heads` gives, for files of the `llama` architecture, the (query, KV) head counts by
    which the rows of q and k are put back from interleaved to half-split rotary order; None for
    architectures that are stored half-split.
    """

    def __init__(self, file: GGUFFile, rotary_heads: tuple[int, int] | None) -> None:
        self.path = str(file.path)
        self._file = file
        self._rotary_heads = rotary_heads
        self._stored = {canonical_name(name): name for name in file.tensors if name != _ROPE_FACTORS}

    def names(self) -> list[str]:
        """Every tensor but the RoPE factors; tensors of other models keep their llama.cpp name."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as [out, in] or [size]."""
        return self._file.shape(self._stored[name])

    def stored_dtype(self, name: str) -> str:
        """The GGUF type, such as `Q4_1` or `F32`."""
        return self._file.tensors[self._stored[name]].tensor_type.name

    @property
    def dtype(self) -> str:
        """The type most values are stored in."""
        counts: Counter[str] = Counter()
        for name, stored in self._stored.items():
            counts[self.stored_dtype(name)] += self._file.tensors[stored].n_elements
        return dominant_dtype(counts)

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """This tensor dequantised to `dtype` in fresh contiguous memory."""
        tensor = self._file.tensors[self._stored[name]]
        shape = self.shape(name)
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        out = torch.empty((len(rows), shape[-1]), dtype=dtype)
        step = max(1, _BLOCK_VALUES // shape[-1])
        for start in range(0, len(rows), step):
            out[start : start + step] = _dequantise(rows[start : start + step], tensor.tensor_type)
        return _half_split(out.reshape(shape), self._heads_of(name))

    def blocks(self, name: str) -> StoredBlocks | None:
        """A matrix as the file quantised it; None for plain numbers."""
        tensor = self._file.tensors[self._stored[name]]
        if tensor.tensor_type.name in _PLAIN:
            return None
        heads = self._heads_of(name)
        order = None if heads is None else _half_split(torch.arange(self.shape(name)[0]), heads)
        return StoredBlocks(tensor.tensor_type.name, tensor.data, order)

    def sample(self, name: str) -> bytes:
        """A few stored bytes from both ends of the tensor."""
        flat = self._file.tensors[self._stored[name]].data.reshape(-1).view(np.uint8)
        return flat[:_SAMPLE].tobytes() + flat[-_SAMPLE:].tobytes()

    def embedding(self) -> BlockEmbedding:
        """The token table, mapped from the file."""
        tensor = self._file.tensors[self._stored[EMBEDDING]]
        return BlockEmbedding(tensor.data, tensor.tensor_type)

    def close(self) -> None:
        """The mapping ends with its last user, and an embedding may be one; what was read for packing
        leaves memory now."""
        self._file.forget_pages()

    def _heads_of(self, name: str) -> int | None:
        if self._rotary_heads is None:
            return None
        if ".q_proj." in name:
            return self._rotary_heads[0]
        return self._rotary_heads[1] if ".k_proj." in name else None


def _dequantise(rows: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    values = gguf.dequantize(rows, kind)
    # float32 rows come back as a read-only view of the file.
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _half_split(stored: Tensor, heads: int | None) -> Tensor:
    """Undo llama.cpp's row order: per head, rows 2i and 2i + 1 go to i and i + head_dim / 2."""
    if heads is None:
        return stored
    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape).contiguous()
