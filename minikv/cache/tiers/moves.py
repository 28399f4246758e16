"""Between the lanes of a sequence and spans, one layer at a time.

lanes --> spans_of: copies --> Tiers.write; then the caller drops the entries with `rewrite`
Tiers.read --> put_back: pages are reserved, then filled --> lanes; spans stay with their owner
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from minikv.cache.entries import Entries
from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.encode import Encoder, lengths_of
from minikv.cache.tiers.late import span_of
from minikv.cache.tiers.span import ALL_HEADS, Owner, Span


def spans_of(
    store: LaneStore, seq: int, leaving: Tensor, key: bytes, encoder: Encoder, most_rows: int | None = None
) -> Iterator[Span]:
    """Spans of the entries that `leaving` [layers, kv_heads, n] bool says, over the entries as
    `LaneStore.slots` lists them: one of each layer that loses any, of all its heads.

    With `most_rows`, several of a layer where a lane loses more entries than that. The lanes keep the
    entries, and spans hold copies: nothing that is written to the pool from here on reaches them.
    """
    num_tokens, end = int(store.num_tokens[seq]), store.merged_end(seq)
    for layer in range(len(leaving)):
        width = int(store.lengths[seq, layer].max())
        for part in _parts(leaving[layer, :, :width], most_rows):
            places = store.places(seq, layer, part)
            yield span_of(store, seq, places, encoder, Owner(key, layer), num_tokens, end)


def _parts(chosen: Tensor, most_rows: int | None) -> Iterator[Tensor]:
    """The chosen entries [kv_heads, n], divided in their order; nothing if none are."""
    most = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
    size = most_rows or max(most, 1)
    number = chosen.cumsum(dim=1) - 1
    for part in range(-(-most // size)):
        yield chosen & (number // size == part)


def put_back(store: LaneStore, seq: int, spans: Sequence[Span], encoder: Encoder, num_tokens: int) -> bool:
    """Put the entries of spans among those of a sequence, ascending by position, masses and counts kept;
    False, changing nothing, if pages are short.

    spans: of any layers, of all heads or of one, in any order; the lanes hold none of their positions. They
    are decoded one layer at a time. num_tokens: logical length of the sequence, past all positions.
    """
    added = np.zeros(store.lane_shape, dtype=np.int32)
    of_layer: dict[int, list[Span]] = {}
    for span in spans:
        of_layer.setdefault(span.owner.layer, []).append(span)
        added[span.owner.layer, _heads(span)] += lengths_of(span).numpy()
    end = max((span.header.merged_end for span in spans), default=0)

    def entries_of(layer: int) -> Entries:
        entries = _layer(of_layer[layer], encoder, store.lane_shape[1])
        assert int(entries.rows.positions.max()) < num_tokens, "an entry lies past the sequence's end"
        return entries

    return store.insert(seq, added, entries_of, num_tokens, end)


def _heads(span: Span) -> slice:
    head = span.owner.head
    return slice(None) if head == ALL_HEADS else slice(head, head + 1)


def _layer(spans: list[Span], encoder: Encoder, heads: int) -> Entries:
    """The entries of spans of one layer, lane after lane."""
    decoded = [encoder.decode(span) for span in spans]
    numbers = torch.arange(heads)
    lane = torch.cat(
        [numbers[_heads(s)].repeat_interleave(e.lengths) for s, e in zip(spans, decoded, strict=True)]
    )
    rows = decoded[0].rows
    for entries in decoded[1:]:
        rows = rows.and_then(entries.rows)
    order = lane.argsort(stable=True)
    counts = torch.cat([entries.counts for entries in decoded])
    return Entries(rows.at(order), counts[order], lane.bincount(minlength=heads))
