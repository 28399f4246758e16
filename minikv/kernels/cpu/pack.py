"""Weights packed for the compiled kernels: groups of eight output rows side by side.

`matmul.h` describes the layouts. GGUF's Q4_0, Q4_1 and Q8_0 go in without a second rounding:
scale, minimum and codes are the file's own (Q4_0 is Q4_1 with minimum = -8 scale, which is exact).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minikv.kernels.cpu.library import MatrixStruct

GROUP = 32  # inputs that share a scale
KINDS = {"q4": 0, "q8": 1, "f32": 2, "bf16": 3, "f16": 4}
_DENSE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


# GGUF types that are packed as they are: the number the library knows them by, and their kind.
BLOCK_TYPES = {"Q4_0": (0, "q4"), "Q4_1": (1, "q4"), "Q8_0": (2, "q8")}
_GROUP_BYTES = {"q4": 160, "q8": 272}  # eight outputs, 32 inputs


class WeightArena:
    """Memory for packed weights, on huge pages where the system has them.

    A step reads all weights front to back; with small pages every 4 KB cost a walk of the page table.
    Memory is mapped in slabs and handed out front to back; it lives as long as a tensor uses it.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` bytes, aligned to a cache line, not initialised."""
        rounded = -(-size // _LINE) * _LINE
        if rounded > self._slab.shape[0]:
            self._slab = _map(max(rounded, _SLAB))
        taken, self._slab = self._slab[:size], self._slab[rounded:]
        return taken


def _take(arena: WeightArena | None, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8) if arena is None else arena.take(size)


def _store(arena: WeightArena | None, data: Tensor) -> Tensor:
    """`data`, of any strides, written there contiguously."""
    taken = _take(arena, data.numel() * data.element_size())
    return taken.view(data.dtype).view(data.shape).copy_(data)


_LINE = 64
_SLAB = 32 << 20


def _map(size: int) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix in a GGUF type: `data` [outputs, bytes per row] uint8, mapped from the file.

    `order` [outputs] int64 gives the stored row of each output, None if they are in order.
    """

    type: str
    data: np.ndarray
    order: Tensor | None = None


@dataclass(frozen=True)
class Codes:
    """A quantised matrix before packing: W = scale * code + minimum per group of 32 inputs.

    scales, minimums: [outputs, groups] float16 (minimums only for `q4`);
    codes: [outputs, groups, 32], uint8 below 16 for `q4`, int8 for `q8`.
    """

    kind: str
    scales: Tensor
    codes: Tensor
    minimums: Tensor | None = None


class PackedMatrix:
    """A packed weight [outputs, inputs] with its optional bias, and the struct that points at it."""

    def __init__(self, kind: str, outputs: int, inputs: int, data: Tensor, bias: Tensor | None):
        self.kind, self.outputs, self.inputs = kind, outputs, inputs
        self.data = data
        groups = -(-outputs // 8)
        self.bias = None if bias is None else torch.nn.functional.pad(bias, (0, groups * 8 - outputs))
        pointer = None if self.bias is None else self.bias.data_ptr()
        self.struct = MatrixStruct(KINDS[kind], outputs, inputs, groups, data.data_ptr(), pointer)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.data.nbytes

    def some(self, groups: Tensor) -> PackedMatrix:
        """The outputs of groups [k] int64, ascending, of eight each; neighbours are not copied."""
        first, last = int(groups[0]), int(groups[-1]) + 1
        which = slice(first, last) if last - first == len(groups) else groups
        outputs = 8 * len(groups) - max(0, 8 * last - self.outputs)
        bias = None if self.bias is None else self.bias.view(-1, 8)[which].flatten()[:outputs]
        data = self.data.reshape(self.struct.groups, -1)[which]
        return PackedMatrix(self.kind, outputs, self.inputs, data, bias)


def quantise(weight: Tensor, kind: str) -> Codes:
    """Round float32 [outputs, inputs] to `q4` (minimum and maximum of a group are exact) or `q8`
    (symmetric); inputs must be a multiple of 32."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    if kind == "q8":
        scales = (grouped.abs().amax(-1) / 127).half()
        steps = scales.float().clamp_min(1e-12).unsqueeze(-1)
        return Codes("q8", scales, (grouped / steps).round().clamp(-127, 127).to(torch.int8))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales, minimums = ((high - low) / 15).half(), low.half()
    steps = scales.float().clamp_min(1e-12).unsqueeze(-1)
    codes = ((grouped - minimums.float().unsqueeze(-1)) / steps).round().clamp(0, 15)
    return Codes("q4", scales, codes.to(torch.uint8), minimums)


def dequantise(codes: Codes) -> Tensor:
    """The float32 weight [outputs, inputs] that the codes stand for."""
    weight = codes.codes.float() * codes.scales.float().unsqueeze(-1)
    if codes.minimums is not None:
        weight = weight + codes.minimums.float().unsqueeze(-1)
    return weight.flatten(1)


def pack_blocks(
    library: ctypes.CDLL,
    parts: Sequence[StoredBlocks],
    inputs: int,
    bias: Tensor | None = None,
    arena: WeightArena | None = None,
) -> PackedMatrix:
    """Matrices of one of `BLOCK_TYPES` with the same inputs, one below the other, without rounding.

    All but the last must have a multiple of eight outputs.
    """
    number, kind = BLOCK_TYPES[parts[0].type]
    counts = [len(part.data) for part in parts]
    sizes = [-(-count // 8) * (inputs // GROUP) * _GROUP_BYTES[kind] for count in counts]
    data = _take(arena, sum(sizes))
    start = data.data_ptr()
    for part, count, size in zip(parts, counts, sizes, strict=True):
        order = None if part.order is None else part.order.to(torch.int32)
        blocks = np.ascontiguousarray(part.data)
        pointer = None if order is None else order.data_ptr()
        library.mkv_pack(number, blocks.ctypes.data, count, inputs, pointer, start)
        start += size
    return PackedMatrix(kind, sum(counts), inputs, data, bias)


def pack_codes(codes: Codes, bias: Tensor | None = None, arena: WeightArena | None = None) -> PackedMatrix:
    """Interleave the rows of a quantised matrix."""
    outputs, groups = codes.scales.shape
    parts = [_interleave(codes.scales)]
    if codes.kind == "q4":
        assert codes.minimums is not None
        parts.append(_interleave(codes.minimums))
        halves = codes.codes[..., :16] | (codes.codes[..., 16:] << 4)
        parts.append(_interleave(halves.view(outputs, groups, 4, 4)))
    else:
        parts.append(_interleave(codes.codes.view(torch.uint8).view(outputs, groups, 8, 4)))
    data = _store(arena, torch.cat(parts, dim=-1))
    return PackedMatrix(codes.kind, outputs, groups * GROUP, data, bias)


def pack_dense(
    weight: Tensor, kind: str, bias: Tensor | None = None, arena: WeightArena | None = None
) -> PackedMatrix:
    """Interleave the rows of an unquantised matrix as `f32`, `bf16` or `f16`."""
    outputs, inputs = weight.shape
    rows = _pad_rows(weight.to(_DENSE[kind]))
    data = _store(arena, rows.view(-1, 8, inputs).permute(0, 2, 1))
    return PackedMatrix(kind, outputs, inputs, data, bias)


def _pad_rows(rows: Tensor) -> Tensor:
    missing = -len(rows) % 8
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


def _interleave(values: Tensor) -> Tensor:
    """[outputs, groups, steps..., bytes] to bytes [outputs / 8, groups, steps * 8 * bytes]."""
    rows = _pad_rows(values)
    outputs, groups = rows.shape[:2]
    if rows.dim() == 2:
        return rows.view(-1, 8, groups).permute(0, 2, 1).contiguous().view(torch.uint8)
    steps, width = rows.shape[2:]
    mixed = rows.view(-1, 8, groups, steps, width).permute(0, 2, 3, 1, 4)
    return mixed.reshape(outputs // 8, groups, steps * 8 * width)
