"""Spans of entries that are still on their way from a device.

entries of a pool --Copies.leave--> ring --whoever looks at header or body first waits--> a span
"""

from __future__ import annotations

import threading
from typing import Any

from minikv.cache.copies import Arriving
from minikv.cache.entries import Entries, Places, Stored
from minikv.cache.lanes import LaneStore
from minikv.cache.tiers.encode import Encoder
from minikv.cache.tiers.span import Header, Owner, Span


class LateSpan(Span):
    """A span whose size and owner are known, and whose rows are not there yet. To look at its header or its
    body is to wait for them; any thread may."""

    def __init__(self, outline: Header, encoder: Encoder, places: Places, arriving: Arriving) -> None:
        self._set("_outline", outline)
        self._set("_lock", threading.Lock())
        self._set("_rest", (encoder, places, arriving))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # a span is frozen

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there: until the rows have come, that is the header and the body.
        if name not in ("header", "body"):
            raise AttributeError(name)
        with self._lock:
            if self._rest is not None:
                self._finish(*self._rest)
        return self.__dict__[name]

    def _finish(self, encoder: Encoder, places: Places, arriving: Arriving) -> None:
        outline = self._outline
        entries = Entries(stored(arriving.take()), places.counts, places.lengths)
        span = encoder.encode(entries, outline.owner, outline.num_tokens, outline.merged_end)
        assert span.nbytes == outline.span_bytes, "a span is not as large as was said"
        self._set("header", span.header)
        self._set("body", span.body)
        self._set("_rest", None)

    @property
    def outline(self) -> Header:
        """See `Span.outline`."""
        return self._outline


def stored(tensors: list[Any]) -> Stored:
    """Entries from the tensors that `PagePool.leaving` gave."""
    if len(tensors) == len(Stored._fields):
        return Stored(*tensors)
    keys, values, log_mass, positions = tensors
    return Stored(keys, values, None, None, log_mass, positions)


def span_of(
    store: LaneStore,
    seq: int,
    places: Places,
    encoder: Encoder,
    owner: Owner,
    num_tokens: int,
    merged_end: int = 0,
) -> Span:
    """A span of entries of one layer of a sequence, as they are now; the arguments are those of
    `Encoder.encode`. It may be a late one where its size can be told without its rows: if they are exact and
    have no masses."""
    pool = store.pool
    if encoder.most_error == 0 and not store.has_mass[seq] and len(places):
        arriving = pool.leaving(places.slots)
        if arriving is not None:
            outline = encoder.outline(places, pool.dtype, pool.head_dim, owner, num_tokens, merged_end)
            return LateSpan(outline, encoder, places, arriving)
    entries = Entries(pool.stored(places.slots), places.counts, places.lengths)
    return encoder.encode(entries, owner, num_tokens, merged_end)
