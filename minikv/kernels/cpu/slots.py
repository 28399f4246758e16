"""What trees are measured by, by the compiled kernels: see `minikv.kernels.slots`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.cpu.library import LooksStruct, SlotsStruct
from minikv.kernels.slots import Looked, LookInput, SlotInput

if TYPE_CHECKING:
    from minikv.kernels.cpu.backend import CpuBackend

_SLOT = 64
_VECTOR = 8


@dataclass(frozen=True)
class CompiledSlots:
    """A `SlotKernels` on the threads of a backend, used by whoever uses that; with `single`, on the calling
    thread, by any number of them."""

    backend: CpuBackend
    single: bool = False

    def alone(self) -> CompiledSlots:
        """See `SlotKernels.alone`."""
        return CompiledSlots(self.backend, single=True)

    def look(self, given: LookInput) -> Looked:
        """See `SlotKernels.look`."""
        kv_heads, group, count, width = given.queries.shape
        entries, rows = given.keys.shape[1], len(given.pools)
        keys, values = _lanes(given.keys), _lanes(given.values)
        tensors = (
            keys,
            values,
            given.bias.contiguous(),
            given.positions.contiguous(),
            given.queries.contiguous(),
            given.at.contiguous(),
            torch.tensor(given.pools, dtype=torch.int32),
            None if given.wanted is None else given.wanted.contiguous(),
        )
        found = Looked(
            torch.empty(kv_heads, group, rows, entries),
            torch.empty(kv_heads, group, rows, width),
            torch.empty(kv_heads, group, count, 1),
            None if given.wanted is None else torch.empty(kv_heads, group, count),
            None if given.wanted is None else torch.empty(kv_heads, group, count, width),
        )
        out = (found.attention, found.outputs, found.normalisers, found.sums, found.means)
        sizes = (kv_heads, group, width, entries, count, rows, given.late, given.hiding)
        strides = (keys.stride(0), values.stride(0))
        pointers = (None if each is None else each.data_ptr() for each in (*tensors, *out))
        self.backend.run_slots(LooksStruct(*sizes, *strides, *pointers), self.single)
        return found

    def sums_of_slots(self, given: SlotInput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `SlotKernels.sums_of_slots`."""
        kv_heads, entries, width = given.keys.shape
        group, rows = given.attention.shape[1:3]
        slots, own = -(-entries // _SLOT), len(given.pools)
        lanes = -(-rows // _VECTOR) * _VECTOR
        origins = given.outputs.mean(dim=(1, 2))
        outputs = (given.outputs - origins[:, None, None]) @ given.roots
        weights = F.pad(given.weights, (0, lanes - rows))
        out = (
            torch.empty(kv_heads, slots, 2 * _SLOT - 1),
            torch.empty(kv_heads, slots, _SLOT),
            torch.empty(kv_heads, 2, slots, _SLOT - 1),
            torch.empty(kv_heads, 2, slots, _SLOT - 1),
        )
        keys, values = _lanes(given.keys), _lanes(given.values)
        tensors = (
            keys,
            values,
            given.counts.contiguous(),
            given.log_mass.contiguous(),
            given.positions.contiguous(),
            given.cos.contiguous(),
            given.sin.contiguous(),
            given.attention.contiguous(),
            weights,
            weights * (torch.arange(lanes) < own),
            torch.tensor(given.pools, dtype=torch.int32),
            given.queries.contiguous(),
            given.normalisers.contiguous(),
            origins.contiguous(),
            given.roots.contiguous(),
            F.pad(outputs.transpose(2, 3), (0, lanes - rows)).contiguous(),
            F.pad(outputs.square().sum(dim=3), (0, lanes - rows)),
            *out,
        )
        sizes = (kv_heads, group, width, entries, slots, rows, own, lanes, given.queries.shape[1] // group)
        strides = (*given.cos.shape, keys.stride(0), values.stride(0))
        back = 1 / given.attention_factor**2
        struct = SlotsStruct(*sizes, *strides, back, *(each.data_ptr() for each in tensors))
        self.backend.run_slots(struct, self.single)
        return out


def _lanes(rows: Tensor) -> Tensor:
    """Rows [kv_heads, n, head_dim], those of a lane one after the other."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
