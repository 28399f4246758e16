"""The KV lanes of a sequence as tensors of a file: rows as they are stored, in the order of the lanes.

    lanes.lengths       [layers, kv_heads] int32, entries of each lane; E in all
    lanes.positions     [E] int32
    lanes.keys, .values [E, head_dim] in the KV dtype, keys rotated to their positions
    lanes.key_scales, .value_scales   [E] float32, if that is int8
    lanes.log_mass      [E] float32, if any is not zero
    lanes.counts        [E] int32, tokens that each entry stands for, if any stands for more than one

Neither the size of a page nor the way a backend lays it out shows in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minikv.cache.entries import Entries, Stored
from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.sessions.container import Container, Outgoing, Unusable, damaged

UNFIT = "its parts do not fit together"
_ROWS_AT_ONCE = 1 << 16


def lane_tensors(store: LaneStore, seq: int) -> dict[str, Outgoing]:
    """What is to be written of a sequence; keys and values are read from the pool when their turn comes, a
    layer at a time."""
    pool, (slots, valid) = store.pool, store.slots(seq)
    held = slots[valid]

    def rows(which: int) -> Outgoing:
        layers = (pool.take_rows(slots[i][valid[i]])[which] for i in range(len(slots)))
        return Outgoing(pool.dtype, (len(held), pool.head_dim), layers)  # type: ignore[arg-type]

    log_mass, positions = pool.masses_and_positions(held)
    small = {"lengths": torch.from_numpy(store.lengths[seq].copy()), "positions": positions}
    if pool.key_scales is not None and pool.value_scales is not None:
        small["key_scales"] = pool.key_scales.view(-1)[held.to(pool.device)].cpu()
        small["value_scales"] = pool.value_scales.view(-1)[held.to(pool.device)].cpu()
    if store.has_mass[seq]:
        small["log_mass"] = log_mass
    if store.num_merged(seq):
        small["counts"] = store.counts(seq)[valid].int()
    tensors = {name: Outgoing.whole(tensor) for name, tensor in small.items()}
    return {f"lanes.{n}": t for n, t in {**tensors, "keys": rows(0), "values": rows(1)}.items()}


@dataclass(frozen=True)
class SavedLanes:
    """Lanes in a file, checked. lengths: [layers, kv_heads] int32."""

    file: Container
    lengths: np.ndarray
    num_tokens: int
    merged_end: int

    def num_pages(self, page_size: int) -> int:
        """Pages of that size that they take."""
        return int((-(-self.lengths // page_size)).sum())

    def fill(self, store: LaneStore, seq: int) -> None:
        """Put them into an empty sequence; the caller sees to the pages."""
        ends = self.lengths.sum(axis=1).cumsum()

        def entries_of(layer: int) -> Entries:
            stop, count = int(ends[layer]), int(self.lengths[layer].sum())
            return self._entries(stop - count, stop, torch.from_numpy(self.lengths[layer]).long())

        enough = store.insert(seq, self.lengths, entries_of, self.num_tokens, self.merged_end)
        assert enough, "the caller must have made room"

    def _entries(self, start: int, stop: int, lengths: Tensor) -> Entries:
        def read(name: str, otherwise: Tensor | None = None) -> Tensor | None:
            there = f"lanes.{name}" in self.file.tensors
            return self.file.read_rows(f"lanes.{name}", start, stop) if there else otherwise

        keys, values, positions = read("keys"), read("values"), read("positions")
        log_mass = read("log_mass", torch.zeros(stop - start))
        counts = read("counts", torch.ones(stop - start, dtype=torch.int32))
        assert keys is not None and values is not None and positions is not None
        assert log_mass is not None and counts is not None
        rows = Stored(keys, values, read("key_scales"), read("value_scales"), log_mass, positions)
        return Entries(rows, counts, lengths)


def lane_shapes(pool: PagePool, total: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of the tensors of `total` entries, whether or not they are all there."""
    rows = (pool.dtype, (total, pool.head_dim))
    shapes = {"keys": rows, "values": rows, "positions": (torch.int32, (total,))}
    shapes |= dict.fromkeys(("log_mass", "key_scales", "value_scales"), (torch.float32, (total,)))
    return {f"lanes.{name}": shape for name, shape in shapes.items()} | {
        "lanes.counts": (torch.int32, (total,))
    }


def read_lengths(file: Container, store: LaneStore, num_tokens: int) -> np.ndarray:
    """Entries of each lane [layers, kv_heads] int32, which no tensor is larger or smaller than. Reads
    nothing but these few numbers; Unusable if the sizes cannot be."""
    placed = file.tensors["lanes.lengths"]
    if (placed.dtype, placed.shape) != (torch.int32, store.lane_shape):
        raise damaged(UNFIT)
    lengths = file.read("lanes.lengths").numpy()
    if lengths.min() < 0 or lengths.max() > num_tokens:
        raise damaged(UNFIT)
    shapes = lane_shapes(store.pool, int(lengths.sum()))
    wanted = {"lanes.keys", "lanes.values", "lanes.positions"}
    scales = {"lanes.key_scales", "lanes.value_scales"}
    wanted |= scales if store.pool.dtype == torch.int8 else set()
    given = {name for name in file.tensors if name.startswith("lanes.")} - {"lanes.lengths", "lanes.ids"}
    if not wanted <= given <= shapes.keys() or (given & scales) - wanted:
        raise damaged(UNFIT)
    for name in given:
        if (file.tensors[name].dtype, file.tensors[name].shape) != shapes[name]:
            raise damaged(UNFIT)
    return lengths


def check_lanes(file: Container, lengths: np.ndarray, num_tokens: int, merged_end: int) -> SavedLanes:
    """The lanes, once it is sure that they are lanes of `num_tokens` tokens; Unusable if they are not."""
    positions = file.read("lanes.positions")
    lane = torch.arange(lengths.size).repeat_interleave(torch.from_numpy(lengths.reshape(-1)).long())
    rises = (positions[1:] > positions[:-1]) | (lane[1:] != lane[:-1])
    inside = bool(((positions >= 0) & (positions < num_tokens)).all())
    if not (inside and bool(rises.all()) and 0 <= merged_end <= num_tokens):
        raise damaged(UNFIT)
    if "lanes.counts" in file.tensors:
        counts = file.read("lanes.counts").long()
        held = torch.zeros(lengths.size, dtype=torch.int64).index_add_(0, lane, counts)
        if (len(counts) and int(counts.min()) < 1) or int(held.max()) > num_tokens:
            raise damaged(UNFIT)
    for name in ("lanes.log_mass", "lanes.key_scales", "lanes.value_scales"):
        if name in file.tensors and not bool(file.read(name).isfinite().all()):
            raise Unusable("holds numbers that are not finite")
    for name in ("lanes.keys", "lanes.values"):
        for start in range(0, len(positions), _ROWS_AT_ONCE):
            rows = file.read_rows(name, start, min(start + _ROWS_AT_ONCE, len(positions)))
            if not bool(rows.isfinite().all()):
                raise Unusable("holds numbers that are not finite")
    return SavedLanes(file, lengths, num_tokens, merged_end)
