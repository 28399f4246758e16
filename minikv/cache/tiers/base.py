"""What all tiers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from minikv.cache.tiers.span import Header, Owner, Span

T = TypeVar("T")


@dataclass(frozen=True)
class Handle:
    """What a tier gives for a span: a number that it uses once, and what is known without reading.

    nbytes: bytes of the record."""

    number: int
    owner: Owner
    fingerprint: bytes
    nbytes: int

    @classmethod
    def of(cls, number: int, header: Header) -> Handle:
        """The handle of a span with that header."""
        return cls(number, header.owner, header.fingerprint, header.span_bytes)

    @property
    def index(self) -> tuple[bytes, bytes]:
        """What a span is found by: the key and the fingerprint."""
        return self.owner.key, self.fingerprint


def index_of(held: Mapping[Handle, T]) -> dict[tuple[bytes, bytes], dict[Handle, T]]:
    """What a tier holds, by what it is found by."""
    index: dict[tuple[bytes, bytes], dict[Handle, T]] = {}
    for handle, what in held.items():
        index.setdefault(handle.index, {})[handle] = what
    return index


class Tier(Protocol):
    """Spans under a ceiling in bytes. Nothing here raises for want of room or for a fault of a disk."""

    limit: int

    def write(self, span: Span) -> Handle | None:
        """Keep a span; None, and nothing changed, if there is no room for it."""
        ...

    def read(self, handle: Handle) -> Span | None:
        """The span as it was written, every byte; None if it is not there any more."""
        ...

    def pin(self, handle: Handle) -> None:
        """Keep a span where it is until `unpin` has been called as often."""
        ...

    def unpin(self, handle: Handle) -> None:
        """Take back one `pin`."""
        ...

    def drop(self, handle: Handle) -> None:
        """Forget a span that is not pinned. One that is not there is forgotten already."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes taken; at most `limit`, at any time."""
        ...

    def check(self) -> None:
        """Re-derive every count; an AssertionError names the first that is wrong."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
