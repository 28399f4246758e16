"""Tensors of zeros that take memory only where they are written, and can give it back."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor


class DeviceZeros:
    """A tensor of zeros on a device, which has its memory from the start and keeps it.

    Raises torch.OutOfMemoryError if the device has not so much.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.tensor: Tensor = torch.zeros(shape, dtype=dtype, device=device)

    def discard(self, start: int, stop: int) -> tuple[int, int]:
        """See `MappedZeros.discard`."""
        return start, start


class MappedZeros:
    """A tensor of zeros, of `shape` and `dtype`, in a mapping of its own.

    The system backs it with memory where it is first written. Where there are no such mappings, as on
    some systems, it is an ordinary lazy tensor that keeps its memory. Raises OSError or ValueError
    if the system refuses the size.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        size = math.prod(shape) * dtype.itemsize
        self._row_bytes = size // shape[0]
        self._area: mmap.mmap | None = None
        if hasattr(mmap, "MAP_ANONYMOUS") and hasattr(mmap, "MADV_DONTNEED"):
            self._area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Large pages, where the system has them: reading a long context walks all of this.
            with suppress(AttributeError, OSError):
                self._area.madvise(mmap.MADV_HUGEPAGE)
        raw = np.zeros(size, dtype=np.uint8) if self._area is None else self._area
        self.tensor: Tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)

    def discard(self, start: int, stop: int) -> tuple[int, int]:
        """Give the memory of tensor[start:stop], or most of it, back to the system.

        Returns the range of rows that read as zeros from now on, empty if none do; others keep what
        they held.
        """
        if self._area is None:
            return start, start
        page = mmap.PAGESIZE
        first = -(-start * self._row_bytes // page) * page
        last = stop * self._row_bytes // page * page
        if first >= last:
            return start, start
        try:
            self._area.madvise(mmap.MADV_DONTNEED, first, last - first)
        except OSError:
            return start, start
        return -(-first // self._row_bytes), last // self._row_bytes
