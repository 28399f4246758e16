"""Where the rows of a sequence that lie below the pool can be read in place.

    warm tier --at_hand--> spans --columns_of--> addresses, valid as long as `held` is kept

Nothing is copied and, between two passes, nothing is kept alive: a span may leave the warm tier meanwhile.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from minikv.cache.tiers.encode import columns_of, is_exact

if TYPE_CHECKING:
    from minikv.cache.tiers.below import Below
    from minikv.cache.tiers.span import Span

_COLUMNS = ("positions", "masses", "key_scales", "keys", "value_scales", "values")
SOURCE = np.dtype([("start", "i8"), ("end", "i8")] + [(name, "u8") for name in _COLUMNS])
"""Tokens [start, end) of a layer, lane after lane, and the addresses of their columns; 0 for one that is not
there."""


class Reach:
    """sources: [layers, parts] of SOURCE, the parts of `Below.whole`. at_hand: [layers] uint8, whether all of
    a layer can be read."""

    def __init__(self, below: Below, num_layers: int) -> None:
        self._below, self._layers = below, num_layers
        self._parts: list[tuple[int, int, list]] = []
        self._reset()

    def _reset(self) -> None:
        shape = (self._layers, len(self._parts))
        self.sources, self.at_hand = np.zeros(shape, SOURCE), np.zeros(self._layers, np.uint8)
        self._spans: list[list[weakref.ref[Span] | None]] = [[None] * shape[1] for _ in range(shape[0])]
        for index, (start, end, _) in enumerate(self._parts):
            self.sources["start"][:, index], self.sources["end"][:, index] = start, end

    def refresh(self) -> list[Span]:
        """Look again, and give what must be kept as long as addresses are used."""
        parts = self._below.whole_parts()
        if parts != self._parts:
            self._parts = parts
            self._reset()
        held: list[Span] = []
        for layer, known in enumerate(self._spans):
            there = True
            for index, ref in enumerate(known):
                span = None if ref is None else ref()
                if span is None:
                    span = self._find(layer, index)
                if span is None:
                    there = False
                else:
                    held.append(span)
            self.at_hand[layer] = there
        return held

    def _find(self, layer: int, index: int) -> Span | None:
        span = self._below.storage.tiers.at_hand(self._parts[index][2][layer])
        if span is None or not is_exact(span.header):
            return None
        self._spans[layer][index] = weakref.ref(span)
        body = np.frombuffer(span.body, np.uint8).ctypes.data
        source = self.sources[layer, index]
        for name, column in zip(_COLUMNS, columns_of(span.header), strict=True):
            source[name] = 0 if column is None else body + column.at
        return span
