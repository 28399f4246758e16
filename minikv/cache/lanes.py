"""Lane tables: which pages hold the entries of each (sequence, layer, KV head).

Bookkeeping is numpy on the host, vectorised over the lanes of a sequence; tensors of entries are
touched only through the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minikv.cache.area import Areas, Asked
from minikv.cache.entries import Entries, Places
from minikv.cache.integrity import check_lanes
from minikv.cache.merged import Merged
from minikv.cache.pool import PagePool

if TYPE_CHECKING:
    from minikv.cache.policies.base import Rows


class LaneStore:
    """Lanes of at most `max_seqs` sequences over one page pool.

    pages: [max_seqs, layers, kv_heads, max_pages] int32, 0 where nothing is held.
    num_pages, lengths: [max_seqs, layers, kv_heads] int32, pages held and entries stored.
    has_mass: [max_seqs] bool, whether an entry of the sequence has a log mass other than zero.
    mass_ends: [max_seqs, layers, kv_heads] int32, from which entry on none of a lane has one.
    num_tokens: [max_seqs] int64, logical length of each sequence, whatever is stored of it.

    Who owns a page: the pool's free list, or exactly one place of `pages`.

        pool.allocate --> reserve / fork / rewrite(fresh) / insert --> a lane of an open sequence
        a lane        --> truncate / rewrite / replace / close     --> pool.free, in the same call

    or exactly one place of the area of a sequence (`area`), which is given up whenever its lanes change
    other than by `append`.

    An entry stands for one token unless `replace` or `insert` has put it there; how many it then stands
    for is kept here on the host, as kernels need the log mass alone.
    """

    def __init__(self, pool: PagePool, max_seqs: int, num_layers: int, num_kv_heads: int, max_entries: int):
        self.pool = pool
        self.max_seqs = max_seqs
        self.lane_shape = (num_layers, num_kv_heads)
        self.num_lanes = num_layers * num_kv_heads
        self.max_pages = -(-max_entries // pool.page_size)
        self.pages = np.zeros((max_seqs, *self.lane_shape, self.max_pages), dtype=np.int32)
        self.num_pages = np.zeros((max_seqs, *self.lane_shape), dtype=np.int32)
        self.lengths = np.zeros((max_seqs, *self.lane_shape), dtype=np.int32)
        self.has_mass = np.zeros(max_seqs, dtype=bool)
        self.mass_ends = np.zeros((max_seqs, *self.lane_shape), dtype=np.int32)
        self.num_tokens = np.zeros(max_seqs, dtype=np.int64)
        self._merged: list[Merged | None] = [None] * max_seqs
        self._open = np.zeros(max_seqs, dtype=bool)
        # Entries that every lane of a sequence has room for on the pages that it holds, at least: a
        # number to look at in each step where counting over all lanes would take its time.
        self._room = [0] * max_seqs
        self.areas = Areas(pool, max_seqs, self.lane_shape)

    # Sequences

    @property
    def num_free_seqs(self) -> int:
        """Sequences that can still be opened."""
        return self.max_seqs - int(self._open.sum())

    def open(self) -> int:
        """A new sequence with empty lanes. The caller checks `num_free_seqs` first."""
        assert not self._open.all(), "the caller must check num_free_seqs"
        seq = int(np.argmin(self._open))
        self._open[seq] = True
        return seq

    def close(self, seq: int) -> None:
        """Free every page of the sequence and the sequence itself."""
        assert self._open[seq], "the sequence is not open"
        self.release_area(seq)
        self._shrink(seq, np.zeros(self.lane_shape, dtype=np.int32))
        self.has_mass[seq] = False
        for numbers in (self.lengths, self.mass_ends, self.num_tokens):
            numbers[seq] = 0
        self._merged[seq] = None
        self._open[seq] = False

    def fork(self, source: int) -> int | None:
        """A copy of a sequence on pages of its own, without its area, or None when sequences or pages are
        short. What the copying raises is raised, and there is no copy."""
        if (area := self.areas[source]) is not None:
            area.reset()
        counts = -(-self.lengths[source] // self.pool.page_size)
        if not self.num_free_seqs or int(counts.sum()) > self.pool.num_free:
            return None
        seq = self.open()
        self._grow(seq, counts)
        held = np.arange(self.max_pages) < counts[..., None]
        try:
            self.pool.copy_pages(self.pages[source][held], self.pages[seq][held])
        except (MemoryError, RuntimeError):
            self.close(seq)
            raise
        for known in (self.lengths, self.has_mass, self.mass_ends, self.num_tokens):
            known[seq] = known[source]
        self._merged[seq] = self._merged[source]
        return seq

    # Room for new entries

    def pages_for(self, num_entries: int) -> int:
        """Pages that a sequence of `num_entries` uncompressed tokens takes over all its lanes."""
        return -(-num_entries // self.pool.page_size) * self.num_lanes

    def pages_missing(self, seq: int, count: int) -> int:
        """Pages that `reserve(seq, count)` would take from the pool."""
        return int(self._missing(seq, count).sum()) + self.areas.missing(seq)

    def reserve(self, seq: int, count: int) -> bool:
        """Make room for `count` more entries in every lane, and for an area that was asked for; False,
        changing nothing, if the pool is short."""
        if count <= self._room[seq]:
            return True
        missing = self._missing(seq, count)
        if int(missing.sum()) + self.areas.missing(seq) > self.pool.num_free:
            return False
        self.areas.take(seq)
        self._grow(seq, missing)
        self._room[seq] = int((self.num_pages[seq] * self.pool.page_size - self.lengths[seq]).min())
        return True

    def next_slots(self, seq: int, count: int) -> np.ndarray:
        """Pool rows [layers, kv_heads, count] int64 of the next `count` entries, which must be reserved."""
        entry = self.lengths[seq][..., None] + np.arange(count)
        return self._slots_of(seq, entry)

    def append(self, seq: int, count: int) -> None:
        """Count `count` written entries into every lane."""
        self.lengths[seq] += count
        self.num_tokens[seq] += count
        self._room[seq] -= count
        assert self._room[seq] >= 0, "append without reserve"

    def set_aside(self, seq: int, num_tokens: int) -> None:
        """Count the first `num_tokens` tokens, whole pages, as kept elsewhere: the lanes hold none of them,
        on pages that stay for what comes next."""
        assert num_tokens % self.pool.page_size == 0, "what is set aside fills whole pages"
        self.num_tokens[seq] = num_tokens
        self.lengths[seq] = 0
        self._room[seq] = int(self.num_pages[seq].min()) * self.pool.page_size

    def num_aside(self, seq: int) -> int:
        """Tokens that are kept elsewhere, of a sequence whose lanes hold all others."""
        return int(self.num_tokens[seq] - self.lengths[seq].max())

    def _missing(self, seq: int, count: int) -> np.ndarray:
        wanted = -(-(self.lengths[seq] + count) // self.pool.page_size)
        return np.maximum(wanted - self.num_pages[seq], 0)

    def _slots_of(self, seq: int, entry: np.ndarray) -> np.ndarray:
        page_size = self.pool.page_size
        page = np.take_along_axis(self.pages[seq], entry // page_size, axis=-1).astype(np.int64)
        return page * page_size + entry % page_size

    def _grow(self, seq: int, missing: np.ndarray) -> None:
        total = int(missing.sum())
        if not total:
            return
        # Ascending ids dealt out lane by lane: what one lane gets at once lies together.
        place = np.arange(self.max_pages)
        held = self.num_pages[seq][..., None]
        taken = (place >= held) & (place < held + missing[..., None])
        assert int(taken.sum()) == total, "a lane outgrew its table"
        self.pages[seq][taken] = self.pool.allocate(total)
        self.num_pages[seq] += missing.astype(np.int32)

    def _shrink(self, seq: int, keep: np.ndarray) -> None:
        """Give back all pages of each lane past its first `keep` [layers, kv_heads]."""
        place = np.arange(self.max_pages)
        dropped = (place >= keep[..., None]) & (place < self.num_pages[seq][..., None])
        self._room[seq] = 0
        ids = self.pages[seq][dropped].astype(np.int64)
        self.pages[seq][dropped] = 0
        self.num_pages[seq] = np.minimum(self.num_pages[seq], keep)
        self.pool.free(ids)

    # Areas

    def ask_area(self, seq: int, per_lane: int, shared: bool = False, spare: int = 0) -> None:
        """Have the next `reserve` give a sequence an area of so many pages in each lane, 0 for none; shared:
        by all layers, with as many pages to `spare`."""
        if self.areas.ask(seq, Asked(per_lane, shared, spare)):
            self._room[seq] = 0

    def has_area(self, seq: int) -> bool:
        """Whether a sequence has an area, or is to get one."""
        return seq in self.areas

    def release_area(self, seq: int) -> None:
        """Give up a sequence's area, and one that it was to get; its lanes are what they were before."""
        self.areas.release(seq)

    def take_area(self, seq: int) -> bool:
        """Give a sequence the area that was asked for now; False, changing nothing, if the pool is short."""
        if self.areas.missing(seq) > self.pool.num_free:
            return False
        self.areas.take(seq)
        return True

    # Reading and rewriting what is stored

    def slots(self, seq: int) -> tuple[Tensor, Tensor]:
        """Pool rows [layers, kv_heads, n] int64 of all entries and which of them exist (bool, same
        shape); n is the longest lane. Places past a lane's end point into page 0 or its last page."""
        longest = int(self.lengths[seq].max())
        entry = np.broadcast_to(np.arange(longest), (*self.lane_shape, longest))
        valid = entry < self.lengths[seq][..., None]
        return torch.from_numpy(self._slots_of(seq, entry)), torch.from_numpy(valid)

    def positions(self, seq: int) -> Tensor:
        """Logical positions [layers, kv_heads, n] int32 of all entries, -1 past a lane's end."""
        slots, valid = self.slots(seq)
        _, positions = self.pool.masses_and_positions(slots)
        return positions.masked_fill(~valid, -1)

    def positions_of(self, seq: int, layer: int) -> Tensor:
        """`positions` of one layer: [kv_heads, n] int32, n the longest of its lanes."""
        longest = int(self.lengths[seq, layer].max())
        place = torch.arange(longest).expand(self.lane_shape[1], -1)
        held = place < torch.from_numpy(self.lengths[seq, layer])[:, None]
        _, positions = self.pool.masses_and_positions(self._layer_slots(seq, layer, place))
        return positions.masked_fill(~held, -1)

    def counts(self, seq: int, layer: int | None = None) -> Tensor:
        """Tokens that each entry stands for: [layers, kv_heads, n] int64, or [kv_heads, n] of one layer; n
        is the longest of these lanes, 0 past a lane's end."""
        lengths = self.lengths[seq] if layer is None else self.lengths[seq, layer]
        held = np.arange(int(lengths.max())) < lengths[..., None]
        merged = self._merged[seq]
        return torch.from_numpy(held.astype(np.int64) if merged is None else merged.of(held, layer))

    def num_merged(self, seq: int) -> int:
        """Entries that stand for more than one token."""
        merged = self._merged[seq]
        return 0 if merged is None else merged.many

    def merged_end(self, seq: int) -> int:
        """Position after the last token that has gone into another entry, 0 if none has."""
        merged = self._merged[seq]
        return 0 if merged is None else merged.end

    def can_truncate(self, seq: int, position: int) -> bool:
        """Whether no entry that would stay holds anything of tokens from `position` on."""
        merged = self._merged[seq]
        return merged is None or position >= merged.end

    def truncate(self, seq: int, position: int) -> None:
        """Drop every entry of logical position `position` or later; freed pages return at once.

        Entries of a lane ascend by position, so this only shortens lanes. The caller checks
        `can_truncate` first.
        """
        assert self.can_truncate(seq, position), "a merged entry holds tokens on both sides"
        self.release_area(seq)
        positions = self.positions(seq)
        kept = ((positions >= 0) & (positions < position)).sum(dim=-1).numpy().astype(np.int32)
        self.lengths[seq] = kept
        self.num_tokens[seq] = min(position, int(self.num_tokens[seq]))
        self._shrink(seq, -(-kept // self.pool.page_size))
        if (merged := self._merged[seq]) is not None:
            self._merged[seq] = merged.shortened(kept)
        self._look_for_mass(seq)

    def rewrite(self, seq: int, keep: Tensor, fresh: bool = False) -> None:
        """Keep a subset of each lane's entries, in order, and free every page no longer needed.

        keep: [layers, kv_heads, n] bool over the entries as `slots` lists them; lanes may keep
        different numbers. In place the kept rows move to the front of the lane's own pages; with
        `fresh` they move to newly allocated pages (consecutive where the pool has runs), which
        must be free in number: a shortage raises nothing and falls back to in place.
        """
        self.release_area(seq)
        source, valid = self.slots(seq)
        if keep.shape != source.shape:
            raise ValueError(f"keep must have shape {tuple(source.shape)}, not {tuple(keep.shape)}.")
        keep = keep & valid
        counts = keep.sum(dim=-1).numpy().astype(np.int32)
        held = -(-counts // self.pool.page_size)
        old_pages = None
        if fresh and int(held.sum()) <= self.pool.num_free:
            old_pages = self.pages[seq][np.arange(self.max_pages) < self.num_pages[seq][..., None]]
            self.pages[seq] = 0
            self.num_pages[seq] = 0
            self._grow(seq, held)
        self._move(seq, source, keep, counts)
        if (merged := self._merged[seq]) is not None:
            self._merged[seq] = merged.kept(keep.numpy())
        self.lengths[seq] = counts
        self._room[seq] = 0
        self._look_for_mass(seq)
        if old_pages is not None:
            self.pool.free(old_pages.astype(np.int64))
        else:
            self._shrink(seq, held)

    def _move(self, seq: int, source: Tensor, keep: Tensor, counts: np.ndarray) -> None:
        """Copy kept entries to the first `counts` places of each lane, one layer at a time so that
        the rows in flight stay bounded."""
        longest = int(counts.max())
        entry = np.broadcast_to(np.arange(longest), (*self.lane_shape, longest))
        target = torch.from_numpy(self._slots_of(seq, entry))
        taken = torch.from_numpy(entry < counts[..., None])
        for layer in range(self.lane_shape[0]):
            self.pool.move_rows(source[layer][keep[layer]], target[layer][taken[layer]])

    def replace(
        self, seq: int, rows_of: Callable[[int], tuple[Rows, Tensor]], end: int, beside: int = 0
    ) -> None:
        """Put other rows in the place of all that the lanes hold, in place and layer by layer; pages no
        longer needed are free when a layer is done.

        rows_of: gives of a layer the rows, fewer in each lane than it holds or as many, and for each an
            entry of the lane [kv_heads, m] int64 that it may equal. It is asked when all layers before are
            done; if it raises, those stay replaced and the others as they were.
        end: position after the last token of which anything has gone into another entry.
        beside: rows of a shared area that count as the first entries of each lane; the pages that it has to
            spare must do for what lanes get beyond those that they hold.
        """
        if beside:
            self._shrink(seq, -(-self.lengths[seq] // self.pool.page_size))
            self.areas.release_spare(seq)
        else:
            self.release_area(seq)
        merged = (self._merged[seq] or Merged.none(self.lane_shape)).until(end)
        self._merged[seq] = merged
        self.has_mass[seq] = True
        for layer in range(self.lane_shape[0]):
            rows, source = rows_of(layer)
            held = rows.positions >= 0
            lengths = held.sum(dim=1).numpy().astype(np.int32)
            assert (lengths <= self.lengths[seq, layer] + beside).all(), "a lane got more entries than it had"
            self._write_layer(seq, layer, rows, self._layer_slots(seq, layer, source, beside), held)
            self._note_masses(seq, layer, rows.log_mass[held], held)
            self.lengths[seq, layer] = lengths
            merged = merged.with_layer(layer, rows.counts.numpy(), held.numpy())
            self._merged[seq] = merged
            pages = self.num_pages[seq].copy()
            pages[layer] = -(-lengths // self.pool.page_size)
            self._shrink(seq, pages)
        self.has_mass[seq] = self.mass_ends[seq].any()
        self.release_area(seq)

    def _write_layer(self, seq: int, layer: int, rows: Rows, equal: Tensor, held: Tensor) -> None:
        wanted = -(-held.sum(dim=1).numpy() // self.pool.page_size)
        missing = np.zeros(self.lane_shape, dtype=np.int32)
        missing[layer] = np.maximum(wanted - self.num_pages[seq, layer], 0)
        self._grow(seq, missing)
        target = self._layer_slots(seq, layer, torch.arange(held.shape[1]).expand(held.shape))[held]
        self.pool.replace_rows(target, rows.keys[held], rows.values[held], equal[held])
        self.pool.write_entries(target, rows.positions[held], rows.log_mass[held])

    def table(self, seq: int, layer: int, beside: int = 0) -> Tensor:
        """Pages of one layer's lanes [kv_heads, n] int64, as many as the longest fills, behind those of the
        first `beside` rows of a shared area, which are whole pages."""
        size, longest = self.pool.page_size, int(self.lengths[seq, layer].max())
        pages = self.pages[seq, layer, :, : -(-longest // size)]
        if beside:
            area = self.areas[seq]
            assert area is not None and area.shared, "rows beside a lane are those of a shared area"
            assert beside % size == 0, "rows beside a lane fill whole pages"
            pages = np.concatenate((area.pages[layer, :, : beside // size], pages), axis=1)
        return torch.from_numpy(pages.astype(np.int64))

    def _layer_slots(self, seq: int, layer: int, entry: Tensor, beside: int = 0) -> Tensor:
        """Pool rows of entries [kv_heads, n] of one layer; the first `beside` are those of a shared area."""
        size = self.pool.page_size
        pages = self.table(seq, layer, beside) if beside else torch.from_numpy(self.pages[seq, layer]).long()
        return pages.gather(1, entry // size) * size + entry % size

    def take(self, seq: int, layer: int, chosen: Tensor) -> Entries:
        """Copies of the entries of one layer that `chosen` [kv_heads, n] bool says, n the longest of its
        lanes; the lanes keep them."""
        places = self.places(seq, layer, chosen)
        return Entries(self.pool.stored(places.slots), places.counts, places.lengths)

    def places(self, seq: int, layer: int, chosen: Tensor) -> Places:
        """Where the entries of one layer are that `chosen` [kv_heads, n] bool says, n the longest of its
        lanes."""
        held = torch.arange(chosen.shape[1]) < torch.from_numpy(self.lengths[seq, layer])[:, None]
        chosen = chosen & held
        slots = self._layer_slots(seq, layer, torch.arange(chosen.shape[1]).expand(chosen.shape))
        counts = self.counts(seq, layer)[:, : chosen.shape[1]]
        return Places(slots[chosen], counts[chosen].int(), chosen.sum(dim=1))

    def insert(
        self,
        seq: int,
        added: np.ndarray,
        entries_of: Callable[[int], Entries],
        num_tokens: int = 0,
        merged_end: int = 0,
    ) -> bool:
        """Put entries among those of the lanes, ascending by position, layer by layer; False, changing
        nothing, if the pool is short.

        added: [layers, kv_heads], how many each lane gets. entries_of: gives them for a layer that gets any,
            all its lanes in order, at positions that the lane does not hold. It is asked when all layers
            before are done; if it raises, those stay as they are then and the others as they were.
        num_tokens: logical length of the sequence, if that is more than it was. merged_end: position after
            the last token that has gone into another entry of these.
        """
        self.release_area(seq)
        held = self.num_pages[seq].copy()
        wanted = -(-(self.lengths[seq] + added) // self.pool.page_size)
        missing = np.maximum(wanted - held, 0)
        if int(missing.sum()) > self.pool.num_free:
            return False
        self._grow(seq, missing)
        self._room[seq] = 0
        self.num_tokens[seq] = max(num_tokens, int(self.num_tokens[seq]))
        if merged_end:
            self._merged[seq] = (self._merged[seq] or Merged.none(self.lane_shape)).until(merged_end)
        try:
            for layer in np.flatnonzero(added.any(axis=1)).tolist():
                self._insert_layer(seq, layer, entries_of(layer), added[layer])
        finally:
            # What was taken for layers that got nothing after all goes back.
            self._shrink(seq, np.maximum(held, -(-self.lengths[seq] // self.pool.page_size)))
        return True

    def _insert_layer(self, seq: int, layer: int, entries: Entries, added: np.ndarray) -> None:
        assert entries.lengths.tolist() == added.tolist(), "a layer got other entries than were announced"
        old = self.take(
            seq, layer, torch.ones(len(added), int(self.lengths[seq, layer].max()), dtype=torch.bool)
        )
        rows, heads = old.rows.and_then(entries.rows), torch.arange(len(added))
        lane = torch.cat((heads.repeat_interleave(old.lengths), heads.repeat_interleave(entries.lengths)))
        order = torch.from_numpy(np.lexsort((rows.positions.numpy(), lane.numpy())))
        rows, lane = rows.at(order), lane[order]
        rises = rows.positions[1:] > rows.positions[:-1]
        assert bool(rises[lane[1:] == lane[:-1]].all()), "a lane holds an entry at that position"
        lengths = old.lengths + entries.lengths
        place = torch.arange(int(lengths.max())).expand(len(added), -1)
        held = place < lengths[:, None]
        self.pool.put(self._layer_slots(seq, layer, place)[held], rows)
        self.lengths[seq, layer] = lengths.numpy()
        self._note_masses(seq, layer, rows.log_mass, held)
        flat = torch.cat((old.counts, entries.counts))[order]
        if (merged := self._merged[seq]) is not None or bool((flat > 1).any()):
            counts = torch.zeros(held.shape, dtype=torch.int32)
            counts[held] = flat
            merged = merged or Merged.none(self.lane_shape)
            self._merged[seq] = merged.with_layer(layer, counts.numpy(), held.numpy())

    def _look_for_mass(self, seq: int) -> None:
        """Find out which entries of a sequence that had log masses still have any."""
        if not self.has_mass[seq]:
            return
        slots, valid = self.slots(seq)
        self.has_mass[seq] = False
        for layer, held in enumerate(valid):
            log_mass, _ = self.pool.masses_and_positions(slots[layer][held])
            self._note_masses(seq, layer, log_mass, held)

    def _note_masses(self, seq: int, layer: int, log_mass: Tensor, held: Tensor) -> None:
        """Take in the log masses of all entries of a layer's lanes; held: [kv_heads, n], which exist."""
        heavy = torch.zeros(held.shape, dtype=torch.int32)
        heavy[held] = (log_mass != 0).int()
        # Entries up to the last that has a mass are those with one at their place or after it.
        self.mass_ends[seq, layer] = (heavy.flip(1).cumsum(1) > 0).sum(dim=1).numpy()
        self.has_mass[seq] |= bool(heavy.any())

    # Counting

    def pages_of(self, seq: int) -> int:
        """Pages that the sequence holds, those of its area among them."""
        area = self.areas[seq]
        return int(self.num_pages[seq].sum()) + (0 if area is None else len(area.ids))

    def bytes_of(self, seq: int) -> int:
        """Bytes of the pages that the sequence holds."""
        return self.pages_of(seq) * self.pool.page_bytes

    def check(self) -> None:
        """Re-derive every count; an AssertionError names the first that is wrong."""
        check_lanes(self, self._open, self._merged)
