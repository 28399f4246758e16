"""The page pool: one set of tensors for all layers, and the only owner of free pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minikv.cache.copies import Arriving, Copies, room_for
from minikv.cache.entries import Stored
from minikv.cache.mapped import DeviceZeros, MappedZeros
from minikv.errors import ConfigError

if TYPE_CHECKING:
    from minikv.kernels.backend import EntryKernels

RETURN_BYTES = 4 << 20
"""Free pages in a row that are worth giving back to the system."""

HOST = torch.device("cpu")

POSITION_BYTES = LOG_MASS_BYTES = SCALE_BYTES = 4


def page_bytes(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes one page costs: keys, values, their scales if int8, log masses and positions."""
    scales = 2 * SCALE_BYTES if dtype == torch.int8 else 0
    return page_size * (2 * head_dim * dtype.itemsize + scales + LOG_MASS_BYTES + POSITION_BYTES)


def round_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows [n, head_dim] in a KV dtype, with a scale each [n] for int8 (127 stands for the largest
    magnitude)."""
    if dtype != torch.int8:
        return rows.to(dtype), None
    scales = rows.abs().amax(-1).float() / 127
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(-1)
    return (rows / steps).round().to(torch.int8), scales


class PagePool:
    """`num_pages` pages of `page_size` entries of one KV head each.

    keys: [num_pages + 1, page_size, head_dim], or [num_pages + 1, head_dim, page_size] with
    `keys_transposed`, as the backend wants them; values: [num_pages + 1, page_size, head_dim];
    both in the KV dtype. int8 entries have a scale each: key_scales, value_scales
    [num_pages + 1, page_size] float32, None for other dtypes.
    log_mass: [num_pages + 1, page_size] float32; positions: the same shape, int32.

    Page 0 is never handed out and stays zero: tables point to it where they hold nothing, so a
    padded gather reads finite numbers. The tensors are as large as the ceiling from the start,
    but the system backs a page with memory only when it is first written, and gets the memory of long
    runs of freed pages back.

    scratch: whether there is one page more, behind all others, that may be written to and that nobody reads;
    its id is `scratch` then, which is None otherwise.
    kernels: a backend's own way to rewrite entries, if it has one. device: where the tensors are; ids,
    slots and rows come and go on the host all the same.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        poison: bool = False,
        keys_transposed: bool = False,
        kernels: EntryKernels | None = None,
        device: torch.device | str = "cpu",
        scratch: bool = False,
    ):
        entries = (num_pages + 1 + scratch, page_size)
        key_page = (head_dim, page_size) if keys_transposed else (page_size, head_dim)
        scaled = dtype == torch.int8
        self.device = torch.device(device)
        try:
            keys = self._zeros((entries[0], *key_page), dtype)
            values = self._zeros((*entries, head_dim), dtype)
            scales = [self._zeros(entries, torch.float32) for _ in range(2 * scaled)]
            masses, positions = self._zeros(entries, torch.float32), self._zeros(entries, torch.int32)
            self._free = np.ones(num_pages + 1, dtype=bool)
            self._used_before = np.zeros(num_pages + 1, dtype=bool)
        except (MemoryError, OSError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
            total = num_pages * page_bytes(page_size, head_dim, dtype)
            raise ConfigError(
                f"The KV pool of {total:,} bytes could not be allocated; ask for less with kv_hot."
            ) from error
        self._mapped = [keys, values, *scales, masses, positions]
        self.keys, self.values = keys.tensor, values.tensor
        self.key_scales = scales[0].tensor if scaled else None
        self.value_scales = scales[1].tensor if scaled else None
        self.log_mass, self.positions = masses.tensor, positions.tensor
        self.num_pages = num_pages
        self.scratch = num_pages + 1 if scratch else None
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.keys_transposed = keys_transposed
        self.poison = poison
        self.kernels = kernels
        self._free[0] = False
        self.num_free = num_pages
        self._lowest = 1
        self._freed_bytes = 0
        self.copies: Copies | None = None  # to be set by who has a side stream for them

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> MappedZeros | DeviceZeros:
        if self.device.type == "cpu":
            return MappedZeros(shape, dtype)
        return DeviceZeros(shape, dtype, self.device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return page_bytes(self.page_size, self.head_dim, self.dtype)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the pages that have an owner."""
        return (self.num_pages - self.num_free) * self.page_bytes

    def allocate(self, count: int) -> np.ndarray:
        """`count` page ids, ascending, the lowest free ones, so that runs of consecutive pages come
        up where they exist. The caller checks `num_free` first and owns the pages from here on."""
        assert count <= self.num_free, "the caller must check num_free"
        if count == 0:
            return np.empty(0, dtype=np.int64)
        ids = self._lowest + np.flatnonzero(self._free[self._lowest :])[:count]
        self._free[ids] = False
        self.num_free -= count
        self._lowest = int(ids[-1]) + 1
        # Stale rows of an earlier owner could hold a NaN; a masked NaN would still poison a sum.
        stale = ids[self._used_before[ids]]
        if len(stale):
            self._fill(stale, 0.0)
        self._used_before[ids] = True
        return ids

    def free(self, ids: np.ndarray) -> None:
        """Take pages back from their owner; nobody may read them afterwards."""
        assert not self._free[ids].any() and (ids > 0).all(), "a page was freed twice"
        self._free[ids] = True
        self.num_free += len(ids)
        if not len(ids):
            return
        self._lowest = min(self._lowest, int(ids.min()))
        if self.poison:
            self._fill(ids, float("nan"))
        self._freed_bytes += len(ids) * self.page_bytes
        if self._freed_bytes >= RETURN_BYTES:
            self._return_memory()

    def _return_memory(self) -> None:
        """Give the memory of long runs of free pages back to the system."""
        self._freed_bytes = 0
        least = -(-RETURN_BYTES // self.page_bytes)
        edges = np.flatnonzero(np.diff(self._free & self._used_before, prepend=False, append=False))
        for start, stop in edges.reshape(-1, 2).tolist():
            if stop - start < least:
                continue
            zeros = [mapped.discard(start, stop) for mapped in self._mapped]
            self._used_before[max(first for first, _ in zeros) : min(last for _, last in zeros)] = False

    def _fill(self, ids: np.ndarray, number: float) -> None:
        index = torch.from_numpy(ids).to(self.device)
        for tensor in (mapped.tensor for mapped in self._mapped):
            # Whole numbers cannot be poisoned with a NaN; their scales are.
            tensor[index] = number if tensor.is_floating_point() or number == 0 else -1

    def write_rows(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Scatter rows [..., head_dim], rounded to the KV dtype, to slots [...] (page id * page_size +
        place in the page)."""
        flat = slots.reshape(-1)
        keys, key_scales = round_rows(keys.reshape(-1, self.head_dim), self.dtype)
        values, value_scales = round_rows(values.reshape(-1, self.head_dim), self.dtype)
        self.put_rows(flat, keys, values, key_scales, value_scales)

    def rounded(self, rows: Tensor) -> Tensor:
        """Rows [..., head_dim] as they come back from the pool, in their own dtype."""
        if rows.dtype == self.dtype:
            return rows
        stored, scales = round_rows(rows, self.dtype)
        return stored.to(rows.dtype) if scales is None else stored.to(rows.dtype) * scales.unsqueeze(-1)

    def put_rows(
        self,
        flat: Tensor,
        keys: Tensor,
        values: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
    ) -> None:
        """Set rows [n, head_dim] in the KV dtype, and their scales [n] if that is int8, at slots [n]: what
        `take_rows` gave."""
        flat, keys, values = (tensor.to(self.device) for tensor in (flat, keys, values))
        if self.keys_transposed:
            self.keys[flat // self.page_size, :, flat % self.page_size] = keys
        else:
            self.keys.view(-1, self.head_dim).index_copy_(0, flat, keys)
        self.values.view(-1, self.head_dim).index_copy_(0, flat, values)
        if self.key_scales is not None and self.value_scales is not None:
            assert key_scales is not None and value_scales is not None
            self.key_scales.view(-1)[flat] = key_scales.to(self.device)
            self.value_scales.view(-1)[flat] = value_scales.to(self.device)

    def write_entries(self, slots: Tensor, positions: Tensor, log_mass: Tensor | float = 0.0) -> None:
        """Set position and log mass of the entries at slots [...]; both broadcast to it."""
        flat = slots.reshape(-1).to(self.device)
        logical = positions.to(torch.int32).expand(slots.shape).reshape(-1)
        self.positions.view(-1)[flat] = logical.to(self.device)
        if isinstance(log_mass, Tensor):
            log_mass = log_mass.expand(slots.shape).reshape(-1).to(self.device)
        self.log_mass.view(-1)[flat] = log_mass

    def read_rows(self, slots: Tensor, device: torch.device = HOST) -> tuple[Tensor, Tensor]:
        """Gather keys and values [..., head_dim] of slots [...] into fresh memory, in the KV dtype, or
        float32 if that is int8, on a device which is the host or the pool's own."""
        shape = (*slots.shape, self.head_dim)
        keys, values, *scales = (t.to(device) for t in self._rows_at(slots.reshape(-1).to(self.device)))
        if scales:
            keys, values = (t * scale.unsqueeze(-1) for t, scale in zip((keys, values), scales, strict=True))
        return keys.view(shape), values.view(shape)

    def take_rows(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values [n, head_dim] at slots [n] as they are stored, and their scales [n] if the KV dtype
        is int8."""
        keys, values, *scales = (tensor.cpu() for tensor in self._rows_at(flat.to(self.device)))
        key_scales, value_scales = scales or (None, None)
        return keys, values, key_scales, value_scales

    def _rows_at(self, flat: Tensor) -> list[Tensor]:
        """What `take_rows` gives, on the device, for slots [n] that are there: two tensors or four."""
        if self.keys_transposed:
            keys = self.keys[flat // self.page_size, :, flat % self.page_size]
        else:
            keys = self.keys.view(-1, self.head_dim).index_select(0, flat)
        taken = [keys, self.values.view(-1, self.head_dim).index_select(0, flat)]
        if self.key_scales is not None and self.value_scales is not None:
            taken += [self.key_scales.view(-1)[flat], self.value_scales.view(-1)[flat]]
        return taken

    def replace_rows(self, target: Tensor, keys: Tensor, values: Tensor, source: Tensor) -> None:
        """Write rows [n, head_dim] to slots [n]. A key or a value that is the one at its `source` slot [n]
        stays so bit for bit; rounding it again to int8 could change its last bit. `target` may overlap
        `source`."""
        if self.kernels is not None:
            self.kernels.replace(self, target, keys, values, source)
            return
        stored, key_scales = round_rows(keys, self.dtype)
        weights, value_scales = round_rows(values, self.dtype)
        if key_scales is not None and value_scales is not None:
            old_keys, old_values, old_key_scales, old_value_scales = self.take_rows(source)
            assert old_key_scales is not None and old_value_scales is not None
            same = (old_keys * old_key_scales.unsqueeze(-1) == keys).all(-1)
            stored[same], key_scales[same] = old_keys[same], old_key_scales[same]
            same = (old_values * old_value_scales.unsqueeze(-1) == values).all(-1)
            weights[same], value_scales[same] = old_values[same], old_value_scales[same]
        self.put_rows(target, stored, weights, key_scales, value_scales)

    def stored(self, slots: Tensor) -> Stored:
        """Copies of whole entries at slots [n], as they are."""
        taken = self.take_rows(slots)
        return Stored(*taken, *self.masses_and_positions(slots))

    def leaving(self, slots: Tensor) -> Arriving | None:
        """Begin to copy whole entries at slots [n], as they are now, to the host beside the computation:
        keys, values, scales of both if the KV dtype is int8, log masses and positions. None where there is
        no way or no room, and only `stored` can."""
        if self.copies is None:
            return None
        flat, count = slots.to(self.device), len(slots)
        rows = [count * self.head_dim * self.dtype.itemsize] * 2
        numbers = [4 * count] * (4 if self.dtype == torch.int8 else 2)
        mass, positions = self.log_mass.view(-1), self.positions.view(-1)
        return self.copies.leave(
            room_for(rows + numbers), lambda: [*self._rows_at(flat), mass[flat], positions[flat]]
        )

    def masses_and_positions(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Log masses (float32) and positions (int32) of the entries at slots [...]."""
        slots = slots.to(self.device)
        return self.log_mass.view(-1)[slots].cpu(), self.positions.view(-1)[slots].cpu()

    def put(self, slots: Tensor, rows: Stored) -> None:
        """Write whole entries to slots [n], as they are."""
        if self.copies is not None:
            slots, rows = self._sent(self.copies, slots, rows)
        self.put_rows(slots, rows.keys, rows.values, rows.key_scales, rows.value_scales)
        self.write_entries(slots, rows.positions, rows.log_mass)

    def _sent(self, copies: Copies, slots: Tensor, rows: Stored) -> tuple[Tensor, Stored]:
        """Slots and rows on the device, if there is room for copies beside the computation."""
        sent = copies.come([slots, *(tensor for tensor in rows if tensor is not None)])
        if sent is None:
            return slots, rows
        there = iter(sent[1:])
        return sent[0], Stored(*(None if tensor is None else next(there) for tensor in rows))  # type: ignore[arg-type]

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy whole entries from slots to slots, bit for bit; the sets may overlap."""
        if self.kernels is not None:
            self.kernels.move(self, source, target)
        else:
            self.put(target, self.stored(source))

    def read_pages(
        self, ids: Tensor, out: Tensor | None = None, device: torch.device = HOST
    ) -> tuple[Tensor, Tensor]:
        """Gather whole pages: keys and values [len(ids) * page_size, head_dim], as `read_rows`, on a device
        which is the host or the pool's own.

        Float pages are gathered into `out` [2, len(ids) * page_size * head_dim] of their dtype, if given
        and if their layout is the rows' own.
        """
        if self.keys_transposed or self.dtype == torch.int8:
            keys = self._rows_of(self.keys, ids, self.key_scales, self.keys_transposed)
            return keys.to(device), self._rows_of(self.values, ids, self.value_scales).to(device)
        width = self.page_size * self.head_dim
        if self.device.type != "cpu":
            ids = ids.to(self.device)
            rows = (t.view(-1, width).index_select(0, ids).to(device) for t in (self.keys, self.values))
            keys, values = (t.view(-1, self.head_dim) for t in rows)
            return keys, values
        if out is None:
            out = self.keys.new_empty(2, len(ids) * width)
        torch.index_select(self.keys.view(-1, width), 0, ids, out=out[0].view(-1, width))
        torch.index_select(self.values.view(-1, width), 0, ids, out=out[1].view(-1, width))
        return out[0].view(-1, self.head_dim), out[1].view(-1, self.head_dim)

    def _rows_of(self, pages: Tensor, ids: Tensor, scales: Tensor | None, transposed: bool = False) -> Tensor:
        ids = ids.to(self.device)
        taken = pages.view(len(pages), -1).index_select(0, ids)
        if transposed:
            taken = taken.view(-1, self.head_dim, self.page_size).transpose(1, 2)
        rows = taken.reshape(-1, self.head_dim)
        return rows if scales is None else rows * scales.index_select(0, ids).view(-1, 1)

    def copy_pages(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole pages with everything in them."""
        src, dst = (torch.from_numpy(ids).to(self.device) for ids in (source, target))
        for tensor in (mapped.tensor for mapped in self._mapped):
            tensor[dst] = tensor[src]

    def check(self, owned: np.ndarray) -> None:
        """Fail unless the owned page ids (each once) and the free ones are exactly all pages."""
        assert len(np.unique(owned)) == len(owned), "a page has two owners"
        assert not len(owned) or owned.min() > 0, "page 0 has an owner"
        assert not self._free[owned].any(), "an owned page is on the free list"
        assert int(self._free.sum()) == self.num_free, "the free count is wrong"
        assert len(owned) + self.num_free == self.num_pages, "pages are lost"
        assert not self._free[: self._lowest].any(), "a free page lies below the search start"
        assert not self.keys[0].any() and not self.values[0].any(), "page 0 was written"
