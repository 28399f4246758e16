"""The record of a span: one header and one body, the same bytes in memory, in files and in sessions.

    header   format version, shapes, forms, owner, fingerprint, a digest of the body, a digest of all this
    body     lengths of the lanes, positions, log masses and counts where they say anything, keys, values

The digests are blake2b of 16 bytes. A CRC of 32 bits is four times as fast, but whoever looks for the next
whole record behind a damaged one tries many places, and rows that pass by accident would be read as
someone's; the digest also tells two spans apart wherever they lie.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import astuple, dataclass, field, replace

import torch

from minikv.models.config import RopeConfig

VERSION = 1
MAGIC = b"KVspan\r\n"
DIGEST_BYTES = KEY_BYTES = 16
FINGERPRINT_BYTES = 32
ALL_HEADS = -1
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
FORMS = ("exact", "int8", "lowrank")
RAW = "raw"  # of a body that holds no entries
_FORMS = (*FORMS, RAW)

_FIELDS = struct.Struct("<8sHBBBxHIIIIIiIdQ32s16s16s")
HEADER_BYTES = _FIELDS.size + DIGEST_BYTES


class SpanFault(ValueError):
    """Bytes that are not, or not any more, a span that this version can read."""


@dataclass(frozen=True)
class Owner:
    """Whose rows a span holds.

    key: 16 bytes that no two contents share, see `owner_key`. layer: of the model. head: of the layer's KV
    heads, or ALL_HEADS.
    """

    key: bytes
    layer: int
    head: int = ALL_HEADS


@dataclass(frozen=True)
class Header:
    """What a span says of itself.

    dtype: the KV dtype. key_form, value_form: of FORMS, or both RAW. head_dim, num_lanes, num_rows: shapes,
    rows of all lanes together. num_tokens: logical length of the sequence when the span was made;
    merged_end: position after the last token that had gone into another entry, 0 if none had.
    error: largest relative error of the keys or the values of a lane, in the Frobenius norm; 0 if exact.
    fingerprint: 32 bytes, see `fingerprint_of`. body_bytes, body_digest: of the body; the digest may be
    missing.
    """

    owner: Owner
    fingerprint: bytes
    dtype: torch.dtype
    key_form: str
    value_form: str
    head_dim: int
    num_lanes: int
    num_rows: int
    num_tokens: int
    merged_end: int
    error: float
    has_mass: bool
    has_counts: bool
    body_bytes: int
    body_digest: bytes = field(compare=False)

    def to_bytes(self) -> bytes:
        """HEADER_BYTES bytes, the last of them a digest of the others."""
        assert self.body_digest, "a record whose body has no digest"
        packed = _FIELDS.pack(
            MAGIC,
            VERSION,
            DTYPES.index(self.dtype),
            _FORMS.index(self.key_form),
            _FORMS.index(self.value_form),
            self.has_mass + 2 * self.has_counts,
            self.head_dim,
            self.num_lanes,
            self.num_rows,
            self.num_tokens,
            self.merged_end,
            self.owner.head,
            self.owner.layer,
            self.error,
            self.body_bytes,
            self.fingerprint,
            self.owner.key,
            self.body_digest,
        )
        return packed + digest(packed)

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """The header that `data` begins with; SpanFault unless it is whole and of this version."""
        if len(data) < HEADER_BYTES:
            raise SpanFault("A span's header is cut off.")
        packed = data[: _FIELDS.size]
        if digest(packed) != data[_FIELDS.size : HEADER_BYTES]:
            raise SpanFault("A span's header is damaged.")
        magic, version, dtype, key_form, value_form, flags, *rest = _FIELDS.unpack(packed)
        if magic != MAGIC or version != VERSION:
            raise SpanFault(f"A span has format {version}, and this version reads {VERSION}.")
        if dtype >= len(DTYPES) or max(key_form, value_form) >= len(_FORMS):
            raise SpanFault("A span is of a kind that this version does not know.")
        dim, lanes, rows, tokens, end, head, layer, error, size, fingerprint, key, body = rest
        return cls(
            owner=Owner(key, layer, head),
            fingerprint=fingerprint,
            dtype=DTYPES[dtype],
            key_form=_FORMS[key_form],
            value_form=_FORMS[value_form],
            head_dim=dim,
            num_lanes=lanes,
            num_rows=rows,
            num_tokens=tokens,
            merged_end=end,
            error=error,
            has_mass=bool(flags & 1),
            has_counts=bool(flags & 2),
            body_bytes=size,
            body_digest=body,
        )

    @property
    def span_bytes(self) -> int:
        """Bytes of header and body."""
        return HEADER_BYTES + self.body_bytes


@dataclass(frozen=True)
class Span:
    """A header and the body that belongs to it; neither is ever written to, but for the body's digest. That
    takes as long as some copies of the body, and is made when a record leaves the memory."""

    header: Header
    body: bytes

    @classmethod
    def of(cls, header: Header, body: bytes) -> Span:
        """A span of a body, with its size in the header."""
        return cls(replace(header, body_bytes=len(body), body_digest=b""), body)

    @property
    def outline(self) -> Header:
        """The header, of which the body's digest may not be known yet."""
        return self.header

    @property
    def owner(self) -> Owner:
        """Whose rows these are."""
        return self.outline.owner

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return self.outline.span_bytes

    def to_bytes(self) -> bytes:
        """The record."""
        return self.sealed().to_bytes() + self.body

    def sealed(self) -> Header:
        """The header with the digest of the body; any thread may ask for it."""
        if not self.header.body_digest:
            header = replace(self.header, body_digest=digest(self.body))
            object.__setattr__(self, "header", header)
        return self.header

    @classmethod
    def from_bytes(cls, data: bytes) -> Span:
        """The span that `data` is; SpanFault unless every byte is as it was written."""
        span = cls(Header.from_bytes(data), data[HEADER_BYTES:])
        span.verify()
        return span

    def verify(self) -> None:
        """SpanFault unless the body is the one that the header was made for, as far as it says."""
        made_for = self.header.body_digest
        if len(self.body) != self.header.body_bytes or (made_for and digest(self.body) != made_for):
            raise SpanFault("A span's body is damaged.")


def raw_span(owner: Owner, fingerprint: bytes, num_tokens: int, body: bytes) -> Span:
    """A span of a body that only its owner can read."""
    header = Header(
        owner=owner,
        fingerprint=fingerprint,
        dtype=DTYPES[0],
        key_form=RAW,
        value_form=RAW,
        head_dim=0,
        num_lanes=0,
        num_rows=0,
        num_tokens=num_tokens,
        merged_end=0,
        error=0.0,
        has_mass=False,
        has_counts=False,
        body_bytes=0,
        body_digest=b"",
    )
    return Span.of(header, body)


def digest(data: bytes) -> bytes:
    """16 bytes that tell `data` from anything else."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def owner_key(*parts: str | bytes) -> bytes:
    """The key of an owner from what makes it, such as a policy and the bytes of the token ids."""
    summary = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        summary.update(len(data).to_bytes(8, "little") + data)
    return summary.digest()


def fingerprint_of(model: str, dtype: torch.dtype, rope: RopeConfig) -> bytes:
    """What rows must share to be of use to each other: the model (what tells it from others), the KV dtype
    and the rotation. Pages do not matter."""
    text = repr((model, str(dtype), astuple(rope)))
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES).digest()
