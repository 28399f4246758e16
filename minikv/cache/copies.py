"""Copies between a pool on a device and host memory, beside the computation.

    leave   pool --compute stream--> staging --side stream--> ring --host, when it is there--> its own memory
    come    host memory --host--> ring --side stream--> staging --compute stream, which waits for it--> pool

The ring is pinned host memory, which a device copies to and from by itself. A copy that is under way holds
its place in the ring and the tensors that it reads and writes until its event says that it is done. Where the
ring has no place, there is no such copy, and the caller copies as if there were no ring.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

_ALIGNED = 64  # bytes; every type may begin there
_MOST = 256 << 20
_SHARE = 4  # of a warm tier, at least so many times the ring


class Event(Protocol):
    """The end of a copy."""

    def done(self) -> bool:
        """Whether it has come; does not wait."""
        ...

    def wait(self) -> None:
        """Wait for it."""
        ...

    def hold_compute(self) -> None:
        """Let what the compute stream is given from here on wait for it."""
        ...


class SideStream(Protocol):
    """Where copies of one device go on beside its compute stream, in the order in which they were begun."""

    def pinned(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 of host memory that the device reaches by itself. RuntimeError if there is none."""
        ...

    def out(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        """Begin to copy tensors of the device to pinned ones of the same shapes, once all that the compute
        stream was given before is done."""
        ...

    def into(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Begin to copy pinned tensors to new ones on the device."""
        ...


@dataclass(eq=False)
class Place:
    """Bytes start:stop of a ring."""

    start: int
    stop: int


class Ring:
    """Places in a stretch of `size` bytes, handed out in turn and given back in any order. Nothing is taken
    that lies behind the oldest place in use: so the free bytes need no list."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: list[Place] = []  # the oldest first
        self._next = 0

    def take(self, nbytes: int) -> Place | None:
        """A place of at least `nbytes`, at least 1; None if there is none now."""
        length = -(-nbytes // _ALIGNED) * _ALIGNED
        start, end = self._next, self.size
        if not self._places:
            start = 0
        elif start <= (oldest := self._places[0].start):
            end = oldest
        elif start + length > end:
            start, end = 0, oldest
        if start + length > end:
            return None
        place = Place(start, start + length)
        self._places.append(place)
        self._next = place.stop
        return place

    def give_back(self, place: Place) -> None:
        """Let go of a place."""
        self._places.remove(place)

    @property
    def in_use(self) -> int:
        """Places that were not given back."""
        return len(self._places)


@dataclass(eq=False)
class _Flight:
    """A copy that is under way, and all that it must not lose before it is done."""

    event: Event
    place: Place
    held: list[Tensor]
    landed: weakref.ref[Arriving] | None = None


class Arriving:
    """Tensors on their way to the host."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.flight: _Flight | None = None
        self.tensors: list[Tensor] = []  # in the ring as long as there is a flight, then in their own memory

    def take(self) -> list[Tensor]:
        """The tensors, once they are there. May be called by any thread."""
        self._copies.land(self)
        return self.tensors


class Copies:
    """The copies of one pool, begun by one thread.

    num_begun: those that went beside the computation. num_refused: those that found no place in the ring.
    """

    def __init__(self, stream: SideStream, nbytes: int) -> None:
        self.nbytes = nbytes
        self.num_begun = self.num_refused = 0
        self._stream = stream
        self._memory = stream.pinned(nbytes)
        self._ring = Ring(nbytes)
        self._flights: list[_Flight] = []
        self._lock = threading.RLock()

    def leave(self, nbytes: int, gather: Callable[[], list[Tensor]]) -> Arriving | None:
        """Begin to copy to the host what `gather` gives, tensors on the device of at most `nbytes` that
        nobody writes to; None, without asking it, if there is no place."""
        with self._lock:
            place = self._place(nbytes)
            return None if place is None else self._kept(place, lambda: self._leave(place, gather()))

    def _leave(self, place: Place, sources: list[Tensor]) -> Arriving:
        arriving = Arriving(self)
        arriving.tensors = self._views(place, sources)
        event = self._stream.out(sources, arriving.tensors)
        arriving.flight = _Flight(event, place, [*sources], weakref.ref(arriving))
        self._flights.append(arriving.flight)
        return arriving

    def come(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Copies on the device of tensors of the host, which all that is computed from here on may read; None
        if there is no place."""
        with self._lock:
            place = self._place(sum(_room(tensor) for tensor in tensors))
            return None if place is None else self._kept(place, lambda: self._come(place, tensors))

    def _come(self, place: Place, tensors: Sequence[Tensor]) -> list[Tensor]:
        sources = self._views(place, tensors)
        for source, tensor in zip(sources, tensors, strict=True):
            source.copy_(tensor)
        targets, event = self._stream.into(sources)
        event.hold_compute()
        self._flights.append(_Flight(event, place, [*sources, *targets]))
        return targets

    def _kept(self, place: Place, begin: Callable[[], _T]) -> _T:
        """What `begin` gives; if it raises, there is no copy, and the place is given back."""
        try:
            return begin()
        except BaseException:
            self._ring.give_back(place)
            raise

    def sweep(self) -> None:
        """Let go of what copies that are done have held."""
        with self._lock:
            for flight in [flight for flight in self._flights if flight.event.done()]:
                self._end(flight)

    def land(self, arriving: Arriving) -> None:
        """See that what is arriving is in memory of its own."""
        with self._lock:
            flight = arriving.flight
            if flight is not None:
                flight.event.wait()
                self._end(flight)

    def report(self) -> dict[str, int]:
        """Bytes of the ring and counters, by name."""
        return {
            "pinned_bytes": self.nbytes,
            "copies_beside": self.num_begun,
            "copies_refused": self.num_refused,
        }

    @property
    def num_flying(self) -> int:
        """Copies that nobody has seen the end of."""
        return len(self._flights)

    def _place(self, nbytes: int) -> Place | None:
        self.sweep()
        place = self._ring.take(max(nbytes, 1))
        self.num_begun += place is not None
        self.num_refused += place is None
        return place

    def _end(self, flight: _Flight) -> None:
        arriving = None if flight.landed is None else flight.landed()
        if arriving is not None:
            arriving.tensors = [tensor.clone() for tensor in arriving.tensors]
            arriving.flight = None
        self._flights.remove(flight)
        self._ring.give_back(flight.place)

    def _views(self, place: Place, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in a place of the ring, of the types and shapes of others."""
        at, views = place.start, []
        for tensor in like:
            raw = self._memory[at : at + tensor.nbytes]
            views.append(raw.view(tensor.dtype).view(tensor.shape))
            at += _room(tensor)
        assert at <= place.stop, "more is copied than was said"
        return views


def room_for(nbytes: Sequence[int]) -> int:
    """Bytes of the ring that tensors of so many bytes each take."""
    return sum(-(-count // _ALIGNED) * _ALIGNED for count in nbytes)


def _room(tensor: Tensor) -> int:
    return room_for([tensor.nbytes])


class _CudaEvent:
    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def hold_compute(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaStream:
    """A stream of a CUDA device. See `SideStream`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """See `SideStream.pinned`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def out(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        """See `SideStream.out`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        return _CudaEvent(self._stream.record_event(), self._device)

    def into(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """See `SideStream.into`."""
        # Made on the side stream, so that their memory is none that computation may still be reading.
        with torch.cuda.stream(self._stream):
            targets = [source.to(self._device, non_blocking=True) for source in sources]
        for target in targets:
            target.record_stream(torch.cuda.current_stream(self._device))
        return targets, _CudaEvent(self._stream.record_event(), self._device)


def copies_for(device: torch.device, warm_bytes: int | None) -> Copies | None:
    """Copies beside the computation for a pool on a CUDA device with a warm tier below, a part of whose bytes
    the ring takes; None for others, and, with a log line, where no memory can be pinned."""
    if device.type != "cuda" or warm_bytes is None:
        return None
    nbytes = min(_MOST, warm_bytes // _SHARE) // _ALIGNED * _ALIGNED
    if not nbytes:
        return None
    try:
        return Copies(CudaStream(device), nbytes)
    except (MemoryError, RuntimeError) as error:
        _LOG.warning("No host memory can be pinned, so copies wait for the computation: %s", error)
        return None
