"""Entries to spans and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minikv.cache.entries import Entries, Places, Stored
from minikv.cache.policies.trees.keys import rotated
from minikv.cache.pool import round_rows
from minikv.cache.tiers.forms import (
    Part,
    Reader,
    Turn,
    decode_int8,
    decode_lowrank,
    encode_int8,
    encode_lowrank,
    floats_of,
    pack,
)
from minikv.cache.tiers.span import FORMS, RAW, Header, Owner, Span

if TYPE_CHECKING:
    from minikv.models.rope import Rope


@dataclass(frozen=True)
class Encoder:
    """How the entries of a model become spans.

    fingerprint: of `fingerprint_of`. rope: the model's rotation; without it keys are never factored.
    most_error: relative error that keys and values of every lane may have, 0 for exact rows.
    forms: those that may be chosen besides `exact`.
    """

    fingerprint: bytes
    rope: Rope | None = None
    most_error: float = 0.0
    forms: Sequence[str] = FORMS

    def encode(self, entries: Entries, owner: Owner, num_tokens: int, merged_end: int = 0) -> Span:
        """A span of at least one entry, keys and values each in the form that takes the least bytes within
        the error. num_tokens: logical length of the sequence; merged_end: as in `LaneStore.merged_end`."""
        assert len(entries), "a span holds entries"
        rows, lengths = entries.rows, entries.lengths.tolist()
        turn = None if self.rope is None else turning(self.rope, rows.positions, lengths, num_tokens)
        key_forms = self.forms if turn is not None else [form for form in self.forms if form != "lowrank"]
        keys = self._cheapest(Part(rows.keys, rows.key_scales, lengths, turn), key_forms)
        values = self._cheapest(Part(rows.values, rows.value_scales, lengths), self.forms)
        has_mass, has_counts = bool((rows.log_mass != 0).any()), bool((entries.counts != 1).any())
        mass, counts = (rows.log_mass if has_mass else None), (entries.counts.int() if has_counts else None)
        body = pack(entries.lengths.int(), rows.positions, mass, counts) + keys.data + values.data
        places = Places(rows.positions, entries.counts, entries.lengths)
        header = self.outline(places, rows.keys.dtype, rows.keys.shape[1], owner, num_tokens, merged_end)
        forms = {"key_form": keys.form, "value_form": values.form, "error": max(keys.error, values.error)}
        return Span.of(replace(header, has_mass=has_mass, **forms), body)

    def outline(
        self,
        places: Places,
        dtype: torch.dtype,
        head_dim: int,
        owner: Owner,
        num_tokens: int,
        merged_end: int = 0,
    ) -> Header:
        """The header of a span of entries that need not be there yet, if their rows are exact and without
        masses: all but the digest of the body. dtype: the KV dtype."""
        rows, has_counts = len(places), bool((places.counts != 1).any())
        scales = 2 * 4 if dtype == torch.int8 else 0
        each = 4 + 4 * has_counts + 2 * head_dim * dtype.itemsize + scales
        return Header(
            owner=owner,
            fingerprint=self.fingerprint,
            dtype=dtype,
            key_form="exact",
            value_form="exact",
            head_dim=head_dim,
            num_lanes=len(places.lengths),
            num_rows=rows,
            num_tokens=num_tokens,
            merged_end=merged_end,
            error=0.0,
            has_mass=False,
            has_counts=has_counts,
            body_bytes=4 * len(places.lengths) + rows * each,
            body_digest=b"",
        )

    def decode(self, span: Span) -> Entries:
        """The entries of a span of this model: bit for bit those that were encoded, where a form is exact."""
        header = span.header
        assert header.fingerprint == self.fingerprint, "a span of another model"
        assert header.key_form != RAW, "a span that holds no entries"
        body, count = Reader(span.body), header.num_rows
        lengths = _lengths(body, header)
        positions = body.take(torch.int32, count)
        mass = body.take(torch.float32, count) if header.has_mass else torch.zeros(count)
        ones = torch.ones(count, dtype=torch.int32)
        counts = body.take(torch.int32, count) if header.has_counts else ones
        turn = None
        if header.key_form == "lowrank":
            assert self.rope is not None, "factored keys need the rotation"
            turn = turning(self.rope, positions, lengths.tolist(), header.num_tokens)
        keys, key_scales = _decode(body, header, header.key_form, lengths.tolist(), turn)
        values, value_scales = _decode(body, header, header.value_form, lengths.tolist(), None)
        assert body.done, "a span's body is longer than its header says"
        return Entries(Stored(keys, values, key_scales, value_scales, mass, positions), counts, lengths)

    def pick(self, span: Span, index: Tensor) -> Stored:
        """Some rows [n] int64 of a span of this model, in that order. Where both forms are exact, nothing
        else is read."""
        header = span.header
        if not is_exact(header):
            return self.decode(span).rows.at(index)
        assert header.fingerprint == self.fingerprint, "a span of another model"
        places = index.numpy()
        positions, mass, key_scales, keys, value_scales, values = (
            None if column is None else column.rows(span, places) for column in columns_of(header)
        )
        assert keys is not None and values is not None and positions is not None
        mass = torch.zeros(len(index)) if mass is None else mass
        return Stored(keys, values, key_scales, value_scales, mass, positions)

    def _cheapest(self, part: Part, forms: Sequence[str]) -> _Encoded:
        best = _Encoded("exact", pack(part.scales, part.stored), 0.0)
        if self.most_error <= 0:
            return best
        for form in forms:
            data = _encode(part, form, self.most_error, len(best.data) - 1)
            if data is None or len(data) >= len(best.data):
                continue
            dtype, dim = part.stored.dtype, part.stored.shape[1]
            found = _rows(Reader(data), form, dim, part.lengths, part.turn)
            error = part.error(floats_of(*round_rows(found, dtype)))
            if error <= self.most_error:
                best = _Encoded(form, data, error)
        return best


@dataclass(frozen=True)
class _Encoded:
    form: str
    data: bytes
    error: float


@dataclass(frozen=True)
class Column:
    """Where something of all rows lies in the body of a span whose forms are exact: `width` numbers of each
    row from byte `at` on; width 0 stands for single numbers."""

    at: int
    dtype: torch.dtype
    count: int
    width: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.count * max(1, self.width) * self.dtype.itemsize

    def rows(self, span: Span, places: np.ndarray) -> Tensor:
        """Those at some places [n]: [n] or [n, width]."""
        table = np.frombuffer(span.body, dtype=np.uint8, count=self.nbytes, offset=self.at)
        taken = torch.from_numpy(table.reshape(self.count, -1)[places]).view(self.dtype)
        return taken if self.width else taken[:, 0]


def is_exact(header: Header) -> bool:
    """Whether a span holds rows as they were in the pool."""
    return (header.key_form, header.value_form) == ("exact", "exact")


def columns_of(header: Header) -> list[Column | None]:
    """Of a span whose forms are exact: positions, log masses, scales of keys, keys, scales of values and
    values; None for what is not there, since all are alike."""
    scaled, at = header.dtype == torch.int8, 4 * header.num_lanes
    kinds = [(torch.int32, 0), (torch.float32, 0) if header.has_mass else None]
    kinds += [(torch.int32, 0) if header.has_counts else None]
    kinds += [(torch.float32, 0) if scaled else None, (header.dtype, header.head_dim)] * 2
    columns: list[Column | None] = []
    for kind in kinds:
        column = None if kind is None else Column(at, kind[0], header.num_rows, kind[1])
        columns.append(column)
        at += 0 if column is None else column.nbytes
    return columns[:2] + columns[3:]


def lengths_of(span: Span) -> Tensor:
    """Entries of each lane of a span: [lanes] int64."""
    return _lengths(Reader(span.body), span.header)


def _lengths(body: Reader, header: Header) -> Tensor:
    return body.take(torch.int32, header.num_lanes).long()


def turning(rope: Rope, positions: Tensor, lengths: list[int], num_tokens: int) -> Turn:
    """Turns rows of a lane to the positions [n] of its entries, or back."""
    lanes = positions.long().split(lengths)

    def turn(rows: Tensor, lane: int, back: bool) -> Tensor:
        return rotated(rope, rows[None], lanes[lane][None], num_tokens, back)[0]

    return turn


def _encode(part: Part, form: str, most_error: float, most_bytes: int) -> bytes | None:
    if form == "lowrank":
        return encode_lowrank(part, most_error, most_bytes)
    return encode_int8(part) if form == "int8" else None


def _decode(
    body: Reader, header: Header, form: str, lengths: list[int], turn: Turn | None
) -> tuple[Tensor, Tensor | None]:
    """Rows in the KV dtype [n, head_dim], and their scales if that is int8."""
    if form == "exact":
        scales = body.take(torch.float32, header.num_rows) if header.dtype == torch.int8 else None
        return body.take(header.dtype, header.num_rows, header.head_dim), scales
    return round_rows(_rows(body, form, header.head_dim, lengths, turn), header.dtype)


def _rows(body: Reader, form: str, head_dim: int, lengths: list[int], turn: Turn | None) -> Tensor:
    if form == "int8":
        return decode_int8(body, head_dim, lengths)
    return decode_lowrank(body, head_dim, lengths, turn)
