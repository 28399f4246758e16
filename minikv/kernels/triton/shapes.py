"""How the kernels are cut into blocks, without triton itself.

Chosen from what compiles without spilling registers for sm_80, sm_89 and sm_90
(`benchmarks/compile_kernels.py`); which is fastest only a device can say.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZES = (16, 32)
LARGEST_HEAD_DIM = 256

SPLIT = 256
"""Entries of a lane that one program reads for one new row. The same whatever the batch is, so that a
sequence's sums are taken in the same order alone and in company."""

FEW_ROWS = 64
"""New rows of a sequence up to which there are too few tiles to keep a device busy over a long lane."""

CHUNK_SPLIT = 1024
"""Entries that one program reads for a tile of these."""

ROWS = 16
"""Rows that are written, copied or replaced by one program."""

MERGED = 16
"""Splits that are merged at a time."""


@dataclass(frozen=True)
class Shape:
    """Query rows and entries of a tile, and how Triton is to compile for it."""

    rows: int
    entries: int
    warps: int
    stages: int


def padded(size: int) -> int:
    """The least power of two that holds `size`, 16 at least: what a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


def float32_shape(group: int) -> Shape:
    """The tile of any number of new rows where products are taken in float32, without the matrix unit."""
    return Shape(padded(group), 16, 8, 1)


def decode_shape(head_dim: int, group: int, int8: bool) -> Shape:
    """The tile of one new row: the query heads of a KV head are its rows."""
    return Shape(padded(group), 64 if padded(head_dim) <= (64 if int8 else 128) else 32, 4, 2)


def chunk_shape(head_dim: int, int8: bool) -> Shape:
    """The tile of several new rows: these times query heads of a KV head are its rows. Values that are
    turned from int8 into floats take registers of their own."""
    size = padded(head_dim)
    if size <= 64:
        return Shape(64, 64, 8, 2)
    if int8:
        return Shape(64, 32 if size == 128 else 16, 8, 2)
    return Shape(128 if size == 128 else 64, 32, 8, 2)
