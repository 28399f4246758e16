"""The warm tier: spans in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minikv.cache.tiers.base import Handle
from minikv.cache.tiers.span import Span


@dataclass
class _Held:
    span: Span
    clean: bool
    pins: int = 0


class WarmTier:
    """Spans under a hard ceiling of `limit` bytes.

    A span is clean when it can be had elsewhere or need not be: a write that needs room evicts clean spans,
    the least recently used first, unless they are pinned. All others stay until they are dropped.

        write --> held, not clean --> clean(handle) --> evicted by a later write, or
                                  --> drop(handle)      given up by its owner
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.evicted: list[Handle] = []
        self._held: dict[Handle, _Held] = {}  # least recently used first
        self._nbytes = self._reserved = self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all records, and those that are reserved."""
        return self._nbytes + self._reserved

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._held

    def __len__(self) -> int:
        return len(self._held)

    def write(self, span: Span, clean: bool = False) -> Handle | None:
        """Keep a span; None if clean spans do not make room enough. What had to go is in `evicted`, for the
        caller to take."""
        if not self.make_room(span.nbytes):
            return None
        self._next += 1
        handle = Handle.of(self._next, span.outline)
        self._held[handle] = _Held(span, clean)
        self._nbytes += span.nbytes
        return handle

    def make_room(self, nbytes: int) -> bool:
        """Evict clean spans until `nbytes` more fit; False, evicting none, if they do not then either."""
        excess = self.nbytes + nbytes - self.limit
        leaving = []
        for handle, held in self._held.items():
            if excess <= 0:
                break
            if held.clean and not held.pins:
                leaving.append(handle)
                excess -= handle.nbytes
        if excess > 0:
            return False
        for handle in leaving:
            self.drop(handle)
        self.evicted += leaving
        return True

    def reserve(self, nbytes: int) -> bool:
        """Hold room for a span that is on its way here; False, evicting none, if there is not enough."""
        fits = self.make_room(nbytes)
        self._reserved += nbytes * fits
        return fits

    def unreserve(self, nbytes: int) -> None:
        """Give back room that `reserve` held."""
        self._reserved -= nbytes
        assert self._reserved >= 0, "more was given back than reserved"

    def read(self, handle: Handle) -> Span | None:
        """The span, which is then the most recently used."""
        held = self._held.pop(handle, None)
        if held is None:
            return None
        self._held[handle] = held
        return held.span

    def peek(self, handle: Handle) -> Span:
        """A span that is here, without using it."""
        return self._held[handle].span

    def clean(self, handle: Handle, clean: bool = True) -> None:
        """Let a span be evicted from here on: it is persisted below, or nobody's any more; or not again."""
        self._held[handle].clean = clean

    def unsaved(self) -> Iterator[Handle]:
        """Spans that are neither clean nor pinned, the least recently used first."""
        return (handle for handle, held in list(self._held.items()) if not held.clean and not held.pins)

    def pin(self, handle: Handle) -> None:
        """Keep a span until `unpin` has been called as often."""
        self._held[handle].pins += 1

    def unpin(self, handle: Handle) -> None:
        """Take back one `pin`."""
        self._held[handle].pins -= 1
        assert self._held[handle].pins >= 0, "a span was unpinned too often"

    def drop(self, handle: Handle) -> None:
        """Forget a span that is not pinned."""
        held = self._held.get(handle)
        if held is None:
            return
        assert not held.pins, "a pinned span was dropped"
        del self._held[handle]
        self._nbytes -= handle.nbytes

    def check(self) -> None:
        """Re-derive every count and verify every record."""
        assert sum(held.span.nbytes for held in self._held.values()) == self._nbytes, "bytes are lost"
        assert self.nbytes <= self.limit, "the warm tier is over its ceiling"
        for handle, held in self._held.items():
            assert held.pins >= 0, "a span was unpinned too often"
            assert handle == Handle.of(handle.number, held.span.outline), "a span is another's"
            held.span.verify()

    def close(self) -> None:
        """Forget everything."""
        self._held.clear()
        self._nbytes = self._reserved = 0
