"""Which lanes of a batch are given to FlashInfer, and as which requests; numbers on the host alone.

A lane is a request with one KV head, whose query heads are those of its group. FlashInfer knows no log
masses: it gets a lane from the first page on after which there are none, whole if there are none at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from minikv.kernels.batch import Batch
from minikv.kernels.triton import shapes

TAIL = 1024
"""Entries without masses, new ones included, that every lane of a sequence has at its end for these to be
worth a kernel of their own; otherwise Triton takes the lanes whole."""

MOST_SHAPES = 4
"""Sets of lengths, among the layers of a step, that are planned for. Lanes that were cut to another length in
every layer would need a plan for each, which takes longer than it saves."""


@dataclass(frozen=True)
class Requests:
    """Lanes of one layer, or of several with the same lengths, as R requests: sequence by sequence, each
    with its KV heads in order."""

    counts: np.ndarray  # [R] int64, rows of each, no more than it has entries
    rows: np.ndarray  # [counts.sum()] int64, where they are in a batch's queries [T * kv_heads, group, D]
    pages: np.ndarray  # [R] int64, how many are read of each, one at least
    last: np.ndarray  # [R] int64, entries on the last of them
    places: np.ndarray  # [pages.sum()] int64, where their ids are in the tables [S, kv_heads, P] of a layer

    @property
    def row_starts(self) -> np.ndarray:
        """[R + 1] int32, where the rows of each begin."""
        return offsets(self.counts)

    @property
    def page_starts(self) -> np.ndarray:
        """[R + 1] int32, where the pages of each begin."""
        return offsets(self.pages)


@dataclass
class Share:
    """Sequences whose rows FlashInfer attends alike."""

    sequences: np.ndarray  # [n]
    decodes: bool  # whether each has one new row
    joined: bool  # whether Triton reads the beginnings of the lanes, so that there are two results to merge
    split: bool  # whether lanes may be split among programs
    requests: list[Requests] = field(default_factory=list)
    by_layer: list[int] = field(default_factory=list)  # which of these each layer has


@dataclass(frozen=True)
class Division:
    """What runs where: whole sequences on Triton, sequences of whose lanes Triton reads the first `limits`
    [S, layers, kv_heads] entries, and the shares of FlashInfer."""

    triton: np.ndarray
    begun: np.ndarray
    limits: np.ndarray
    shares: list[Share]


def offsets(counts: np.ndarray) -> np.ndarray:
    """[n + 1] int32, the sums of the counts before each."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def ordinals(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def divide(batch: Batch) -> Division:
    """Divide a batch's sequences between FlashInfer and Triton."""
    page_size, counts = batch.pool.page_size, np.diff(batch.row_starts)
    past = batch.past_lengths.numpy()
    first = -(-_mass_ends(batch, past) // page_size) * page_size
    whole = ~first.any(axis=(1, 2))
    length = past + counts[:, None, None] - first
    begun = ~whole & (length.min(axis=(1, 2)) >= TAIL)
    shares = []
    kinds = (counts == 1, (counts > 1) & (counts <= shapes.FEW_ROWS), counts > shapes.FEW_ROWS)
    for (index, kind), joined in product(enumerate(kinds), (False, True)):
        chosen = np.flatnonzero(kind & (begun if joined else whole))
        chosen = chosen[_shaped(first[chosen], length[chosen])]
        if len(chosen):
            shares.append(_share(batch, chosen, first, length, joined, split=index < 2))
    taken = np.concatenate([np.empty(0, dtype=int), *(share.sequences for share in shares)])
    triton = np.setdiff1d(np.arange(batch.num_sequences), taken)
    return Division(triton, np.intersect1d(taken, np.flatnonzero(begun)), first, shares)


def _mass_ends(batch: Batch, past: np.ndarray) -> np.ndarray:
    """From which entry on none of a lane has a log mass [S, layers, kv_heads]."""
    ends = past if batch.mass_ends is None else batch.mass_ends.numpy()
    return ends * np.array(batch.has_mass, dtype=np.int64)[:, None, None]


def _shaped(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Which sequences can be planned for together, [n] bool: all, or else those whose layers are alike."""
    lanes = np.concatenate((first, length), axis=2)
    alike = (lanes == lanes[:, :1]).all(axis=(1, 2))
    shapes_of_layers = np.unique(lanes.transpose(1, 0, 2).reshape(lanes.shape[1], -1), axis=0)
    return np.ones_like(alike) if len(shapes_of_layers) <= MOST_SHAPES else alike


def _share(
    batch: Batch, chosen: np.ndarray, first: np.ndarray, length: np.ndarray, joined: bool, split: bool
) -> Share:
    counts = np.diff(batch.row_starts)[chosen]
    share = Share(chosen, bool((counts == 1).all()), joined, split)
    known: dict[bytes, int] = {}
    for layer in range(first.shape[1]):
        lanes = first[chosen, layer].reshape(-1), length[chosen, layer].reshape(-1)
        key = lanes[0].tobytes() + lanes[1].tobytes()
        if key not in known:
            known[key] = len(share.requests)
            share.requests.append(_requests(batch, chosen, *lanes))
        share.by_layer.append(known[key])
    return share


def _requests(batch: Batch, chosen: np.ndarray, first: np.ndarray, length: np.ndarray) -> Requests:
    page_size, kv_heads, width = batch.pool.page_size, *batch.lane_pages.shape[2:]
    starts, heads = np.array(batch.row_starts), np.tile(np.arange(kv_heads), len(chosen))
    counts = np.repeat(np.diff(starts)[chosen], kv_heads)
    # Masses may end on the page of the first new row. Rows on it see nothing of the pages after, and
    # FlashInfer masks wrongly where a request has more rows than entries.
    blind = np.maximum(counts - length, 0)
    counts = counts - blind
    row = np.repeat(np.repeat(starts[chosen], kv_heads) + blind, counts) + ordinals(counts)
    pages = -(-length // page_size)
    begin = (np.repeat(chosen, kv_heads) * kv_heads + heads) * width + first // page_size
    return Requests(
        counts,
        row * kv_heads + np.repeat(heads, counts),
        pages,
        length - (pages - 1) * page_size,
        np.repeat(begin, pages) + ordinals(pages),
    )
