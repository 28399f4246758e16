"""How many tokens the entries of a sequence stand for, once some of them have been merged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Merged:
    """Bookkeeping of one sequence; never written to, so that forks may share it.

    counts: [layers, kv_heads, m] int32, tokens of the first m entries of each lane; those after them, and
    places past a lane's end, count 1. end: position after the last token that went into another entry.
    """

    counts: np.ndarray
    end: int = 0

    @classmethod
    def none(cls, lane_shape: tuple[int, int]) -> Merged:
        """Nothing merged yet."""
        return cls(np.ones((*lane_shape, 0), dtype=np.int32))

    @property
    def many(self) -> int:
        """Entries that stand for more than one token."""
        return int((self.counts > 1).sum())

    def of(self, held: np.ndarray, layer: int | None = None) -> np.ndarray:
        """Counts as int64, in the shape of `held` [layers, kv_heads, n] or [kv_heads, n] bool, and 0 where
        that is false."""
        counts = self.counts if layer is None else self.counts[layer]
        found = np.ones(held.shape, dtype=np.int64)
        known = min(held.shape[-1], counts.shape[-1])
        found[..., :known] = counts[..., :known]
        return found * held

    def until(self, end: int) -> Merged:
        """With tokens up to `end` merged."""
        return replace(self, end=max(self.end, end))

    def with_layer(self, layer: int, counts: np.ndarray, held: np.ndarray) -> Merged:
        """With other entries in one layer: counts [kv_heads, m], where `held` is true."""
        width = max(self.counts.shape[-1], counts.shape[-1])
        every = np.ones((*self.counts.shape[:2], width), dtype=np.int32)
        every[..., : self.counts.shape[-1]] = self.counts
        every[layer] = 1
        every[layer, :, : counts.shape[-1]][held] = counts[held]
        return replace(self, counts=_trimmed(every))

    def kept(self, keep: np.ndarray) -> Merged:
        """Of the entries that `keep` [layers, kv_heads, n] bool says, moved to the front."""
        order = np.argsort(~keep, axis=-1, kind="stable")
        counts = np.take_along_axis(self.of(keep), order, axis=-1)
        return replace(self, counts=_trimmed(np.maximum(counts, 1).astype(np.int32)))

    def shortened(self, lengths: np.ndarray) -> Merged:
        """Of the first `lengths` [layers, kv_heads] entries of each lane."""
        beyond = np.arange(self.counts.shape[-1]) >= lengths[..., None]
        return replace(self, counts=_trimmed(np.where(beyond, np.int32(1), self.counts)))


def _trimmed(counts: np.ndarray) -> np.ndarray:
    """Without the places at the end that count 1 in every lane."""
    used = np.flatnonzero((counts > 1).any(axis=(0, 1)))
    return counts[..., : int(used[-1]) + 1 if len(used) else 0]
