"""Forms in which a span holds its keys or its values.

exact    rows as the pool stores them, with their scales if it is an int8 pool
int8     a float32 scale and head_dim whole numbers per row
lowrank  per lane r directions [head_dim, r] float16, and of each row a scale and r whole numbers; keys
         as they were before they were rotated, as only these lie near few directions
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minikv.cache.pool import round_rows

_RANK_STEPS = 12  # by which a rank grows to head_dim at most, while the error is still too large

Turn = Callable[[Tensor, int, bool], Tensor]
"""Turns rows [n, head_dim] of the lane of that number to its positions, or back from there."""


class Reader:
    """Takes arrays off the front of a body."""

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The next array, in memory of its own."""
        size = math.prod(shape) * dtype.itemsize
        data = np.frombuffer(bytearray(self._body[self._at : self._at + size]), dtype=np.uint8)
        self._at += size
        return torch.from_numpy(data).view(dtype).view(shape)

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return self._at == self._body.nbytes


def pack(*tensors: Tensor | None) -> bytes:
    """The bytes of tensors, one after the other."""
    given = (tensor for tensor in tensors if tensor is not None)
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in given)


@dataclass(frozen=True)
class Part:
    """Keys or values of a span: stored [n, head_dim] in the KV dtype, scales [n] float32 if that is int8;
    lengths: rows of each lane. turn: of keys."""

    stored: Tensor
    scales: Tensor | None
    lengths: list[int]
    turn: Turn | None = None

    @property
    def floats(self) -> Tensor:
        """[n, head_dim] float32."""
        return floats_of(self.stored, self.scales)

    def error(self, rows: Tensor) -> float:
        """How far rows [n, head_dim] float32 are from these, in the worst lane."""
        lanes = zip(self.floats.split(self.lengths), rows.split(self.lengths), strict=True)
        return max(relative_error(own, other) for own, other in lanes)


def floats_of(stored: Tensor, scales: Tensor | None) -> Tensor:
    """Rows [n, head_dim] of a KV dtype as float32."""
    return stored.float() if scales is None else stored * scales[:, None]


def relative_error(rows: Tensor, found: Tensor) -> float:
    """The norm of what two tensors differ by, as a share of the first one's."""
    off, norm = float(torch.dist(rows.double(), found.double())), float(rows.double().norm())
    return 0.0 if off == 0 else off / norm if norm else torch.inf


def encode_int8(part: Part) -> bytes:
    """Form `int8`."""
    rows, scales = round_rows(part.floats, torch.int8)
    return pack(scales, rows)


def decode_int8(body: Reader, head_dim: int, lengths: list[int]) -> Tensor:
    """Rows [n, head_dim] float32 of form `int8`."""
    count = sum(lengths)
    scales = body.take(torch.float32, count)
    return body.take(torch.int8, count, head_dim) * scales[:, None]


def encode_lowrank(part: Part, most_error: float, most_bytes: int) -> bytes | None:
    """Form `lowrank` within an error and a number of bytes, or None if there is none such."""
    packed = b""
    for lane, rows in enumerate(part.floats.split(part.lengths)):
        factors = _encode_lane(part, lane, rows, most_error, most_bytes - len(packed))
        if factors is None:
            return None
        packed += factors
    return packed


def decode_lowrank(body: Reader, head_dim: int, lengths: list[int], turn: Turn | None) -> Tensor:
    """Rows [n, head_dim] float32 of form `lowrank`."""
    lanes = []
    for lane, count in enumerate(lengths):
        rank = int(body.take(torch.int16, 1))
        basis = body.take(torch.float16, head_dim, rank)
        scales = body.take(torch.float32, count)
        rows = _product(body.take(torch.int8, count, rank), scales, basis)
        lanes.append(rows if turn is None else turn(rows, lane, False))
    return torch.cat(lanes)


def _encode_lane(part: Part, lane: int, rows: Tensor, most_error: float, most_bytes: int) -> bytes | None:
    """The factors of one lane's rows [n, head_dim], at the least rank that is found to do.

    The energy of the directions left out bounds the error from below; rounding the factors adds to it, so
    that the rank is raised until the rows themselves are near enough.
    """
    if not len(rows):
        return pack(torch.zeros(1, dtype=torch.int16))
    if not bool(rows.isfinite().all()):
        return None
    plain = rows if part.turn is None else part.turn(rows, lane, True)
    energies, directions = torch.linalg.eigh(plain.double().T @ plain.double())
    left_out = energies.clamp(min=0).cumsum(0).flip(0)  # by the r largest: left_out[r]
    dim = rows.shape[1]
    least = max(1, int((left_out > most_error**2 * left_out[0]).sum()))
    for rank in (*range(least, dim, -(-dim // _RANK_STEPS)), dim):
        if 2 + 2 * dim * rank + len(rows) * (4 + rank) > most_bytes:
            return None
        basis = directions[:, dim - rank :].float().half()
        numbers, scales = round_rows(plain @ basis.float(), torch.int8)
        found = _product(numbers, scales, basis)
        found = found if part.turn is None else part.turn(found, lane, False)
        if relative_error(rows, floats_of(*round_rows(found, part.stored.dtype))) <= most_error:
            return pack(torch.tensor([rank], dtype=torch.int16), basis, scales, numbers)
    return None


def _product(numbers: Tensor, scales: Tensor | None, basis: Tensor) -> Tensor:
    return floats_of(numbers, scales) @ basis.float().T
