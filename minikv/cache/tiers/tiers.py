"""The tiers below the page pool as one: warm in memory, cold in a file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from minikv.cache.tiers.base import Handle, index_of
from minikv.cache.tiers.cold import ColdTier
from minikv.cache.tiers.span import Span
from minikv.cache.tiers.warm import WarmTier
from minikv.config import TierConfig

_AHEAD = 3 / 4  # of the warm tier, above which spans are saved before their room is needed


@dataclass
class Counters:
    """What moved since the start.

    warm_hits, cold_hits: reads that found a span there. misses: those that found none. demotions,
    demoted_bytes: spans that went to cold. promotions, promoted_bytes: spans that were read from cold.
    refused: writes that found no room anywhere.
    """

    warm_hits: int = 0
    cold_hits: int = 0
    misses: int = 0
    demotions: int = 0
    demoted_bytes: int = 0
    promotions: int = 0
    promoted_bytes: int = 0
    refused: int = 0


@dataclass
class _Place:
    """Where a span is: in warm, in cold, or in both. saving, reading: it is on its way from one to the other.
    owners: who wrote or found it and has not released it."""

    handle: Handle
    owners: int = 1
    warm: Handle | None = None
    cold: Handle | None = None
    saving: Future[Handle | None] | None = None
    reading: Future[Span | None] | None = None
    pins: int = 0


class _Inline:
    """Does at once what is to be done."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    def shutdown(self) -> None:
        pass


class Tiers:
    """Spans in a warm and a cold tier, either of which may be missing. Used by one thread.

    With `background`, another thread does all that touches the file, one thing after the other; a read of
    what is on its way waits for it or takes the copy in memory.

    Which copy counts: a span leaves warm only when cold has it, or when it has no owner and cold no room.

        write --> warm, unsaved --> saving: pinned there until cold has it       --> in both --> in cold
        read  --> reading: room is reserved in warm until cold has answered      --> in both
        drop  --> neither, once nothing of it is on its way
    """

    def __init__(
        self, warm: WarmTier | None = None, cold: ColdTier | None = None, background: bool = False
    ) -> None:
        assert warm is not None or cold is not None, "there is no tier"
        # A tier without room is one that takes nothing.
        self.warm = WarmTier(0) if warm is None else warm
        self.cold = cold
        self.counters = Counters()
        self._worker = ThreadPoolExecutor(1, "minikv-cold") if background else _Inline()
        self._places: dict[Handle, _Place] = {}
        self._of_key: dict[tuple[bytes, bytes], dict[Handle, _Place]] = {}
        self._of_warm: dict[Handle, _Place] = {}
        self._of_cold: dict[Handle, _Place] = {}
        self._saving: list[_Place] = []  # the oldest first
        self._stuck: set[Handle] = set()  # what cold had no room for when it was last asked
        self._next = 0

    @classmethod
    def of(cls, config: TierConfig, background: bool = True, taken: int = 0) -> Tiers | None:
        """The tiers that a configuration asks for, None if it asks for none. taken: bytes of the warm tier
        that are in use for its copies. Raises ConfigError when the file cannot be had."""
        if config.warm_bytes is None and config.cold_file is None:
            return None
        warm = None if config.warm_bytes is None else WarmTier(config.warm_bytes - taken)
        cold = None if config.cold_file is None else ColdTier(*config.cold_file)
        return cls(warm, cold, background and cold is not None)

    @property
    def limit(self) -> int:
        """The ceilings together."""
        return self.warm.limit + (self.cold.limit if self.cold is not None else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of both tiers."""
        return self.warm.nbytes + (self.cold.nbytes if self.cold is not None else 0)

    # Spans

    def write(self, span: Span, make_way: Callable[[], bool] | None = None) -> Handle | None:
        """Keep a span, in warm if it can be, and else in cold; None if there is no room in either, not even
        after `make_way` has given up something for it, as often as it can."""
        place = self._new_place(span)
        while not self._put(place, span):
            if make_way is None or not make_way():
                self.counters.refused += 1
                return None
        self._add(place)
        return place.handle

    def _put(self, place: _Place, span: Span) -> bool:
        if self._room_in_warm(span.nbytes):
            self._put_warm(place, span, clean=False)
            if self.warm.nbytes > _AHEAD * self.warm.limit:
                self._save_oldest()
        else:
            self._saved(
                place, self._in_cold(ColdTier.write, span).result() if self.cold is not None else None
            )
        return place.warm is not None or place.cold is not None

    def read(self, handle: Handle) -> Span | None:
        """The span; None if it is lost or was dropped. What comes from cold stays in warm as well if clean
        spans make room for it."""
        self._settle()
        place = self._places.get(handle)
        if place is not None and place.warm is not None:
            self.counters.warm_hits += 1
            return self.warm.read(place.warm)
        span = None if place is None else self._read_cold(place)
        if span is None:
            self.counters.misses += 1
            return None
        self.counters.cold_hits += 1
        return span

    def at_hand(self, handle: Handle) -> Span | None:
        """The span if it is in warm, which is then the most recently used."""
        place = self._places.get(handle)
        return None if place is None or place.warm is None else self.warm.read(place.warm)

    def fetch(self, handle: Handle) -> None:
        """Begin to read a span that is in cold alone, if there is room in warm; `read` then waits for it."""
        self._settle()
        place = self._places.get(handle)
        if place is None or place.warm is not None or place.reading is not None:
            return
        if self.warm.reserve(handle.nbytes):
            self._take_evicted()
            place.reading = self._in_cold(ColdTier.read, place.cold)

    def find(self, key: bytes, fingerprint: bytes) -> list[Handle]:
        """All spans of a key and a fingerprint, of this run and of earlier ones. The caller is an owner of
        them from here on, until `release`."""
        self._settle(wait=True)
        of_cold = self._in_cold(ColdTier.find, key, fingerprint).result() if self.cold is not None else []
        for place in list(self._of_key.get((key, fingerprint), {}).values()):
            self._find_again(place, of_cold)
        for cold in of_cold:
            if cold not in self._of_cold:
                place = self._new_place(cold)
                self._add(place)
                self._of_cold[cold] = place
                place.cold = cold
        return list(self._of_key.get((key, fingerprint), {}))

    def hold(self, handle: Handle) -> bool:
        """Be one more owner of a span that has one, until `release`; False if it is lost."""
        place = self._places.get(handle)
        if place is None:
            return False
        assert place.owners, "a span was held that has no owner"
        place.owners += 1
        return True

    def _find_again(self, place: _Place, of_cold: list[Handle]) -> None:
        """One owner more, of a span of this run. Cold knows one owner at most: this."""
        if place.cold in of_cold:
            if place.owners:
                self._in_cold(ColdTier.release, place.cold)
        elif place.warm is None:
            self._lose(place)  # its record turned out to be damaged
            return
        else:
            # Its record made room for others while it had no owner: memory has the only copy.
            self._leave_cold(place)
            self.warm.clean(place.warm, False)
        place.owners += 1

    def release(self, handle: Handle) -> None:
        """Give up a span, which can be found again as long as nothing else needs its room."""
        place = self._places.get(handle)
        if place is None:
            return
        assert place.owners, "a span was released too often"
        place.owners -= 1
        if place.owners:
            return
        assert not place.pins, "a pinned span was given up"
        self._settle(wait=place.saving is not None)
        if place.cold is not None:
            self._in_cold(ColdTier.release, place.cold)
        if place.warm is None:
            self._lose(place)
        else:
            self.warm.read(place.warm)  # what is given up last goes last
        self._stuck.clear()

    def pin(self, handle: Handle) -> None:
        """Keep a span, and in warm if it is there, until `unpin` has been called as often."""
        place = self._places.get(handle)
        if place is None:
            return
        place.pins += 1
        if place.pins == 1 and place.warm is not None:
            self.warm.pin(place.warm)

    def unpin(self, handle: Handle) -> None:
        """Take back one `pin`."""
        place = self._places.get(handle)
        if place is None:
            return
        place.pins -= 1
        assert place.pins >= 0, "a span was unpinned too often"
        if not place.pins and place.warm is not None:
            self.warm.unpin(place.warm)

    def drop(self, handle: Handle) -> None:
        """Forget a span that is not pinned, for all its owners."""
        place = self._places.get(handle)
        if place is None:
            return
        assert not place.pins, "a pinned span was dropped"
        self._settle(wait=place.saving is not None)
        if place.cold is not None:
            self._in_cold(ColdTier.drop, place.cold)
        self._lose(place)
        self._stuck.clear()

    def flush(self) -> bool:
        """Save to cold all that is not there yet and not pinned; whether that is now so."""
        while self._save_oldest():
            pass
        self._settle(wait=True)
        return not any(place.cold is None for place in self._places.values())

    # From warm to cold

    def _room_in_warm(self, nbytes: int) -> bool:
        """Room for a span, for which others are saved if need be; False if there cannot be any."""
        if nbytes > self.warm.limit:
            return False
        while not self.warm.make_room(nbytes):
            self._save_oldest()
            if not self._saving:
                return self._give_up_unowned(nbytes)
            self._settle_first()
        self._take_evicted()
        return True

    def _give_up_unowned(self, nbytes: int) -> bool:
        """Let spans go that cold has no room for and that nobody owns."""
        for warm in self.warm.unsaved():
            if not self._of_warm[warm].owners:
                self.warm.clean(warm)
        found = self.warm.make_room(nbytes)
        self._take_evicted()
        return found

    def _save_oldest(self) -> bool:
        """Begin to save the span that was not used for longest; False if there is none to save."""
        if self.cold is None:
            return False
        for warm in self.warm.unsaved():
            place = self._of_warm[warm]
            if place.handle not in self._stuck:
                # Pinned until cold has it: nobody may take the place of what is being read.
                self.warm.pin(warm)
                place.saving = self._in_cold(ColdTier.write, self.warm.peek(warm))
                self._saving.append(place)
                return True
        return False

    def _settle(self, wait: bool = False) -> None:
        """Take note of what has been saved; with `wait`, of all that is to be."""
        while self._saving and (wait or self._future(self._saving[0]).done()):
            self._settle_first()

    def _settle_first(self) -> None:
        place = self._saving.pop(0)
        cold = self._future(place).result()
        place.saving = None
        assert place.warm is not None, "a span left warm while it was saved"
        self.warm.unpin(place.warm)
        self._saved(place, cold)
        if cold is None:
            self._stuck.add(place.handle)
        else:
            self.warm.clean(place.warm)

    def _future(self, place: _Place) -> Future[Handle | None]:
        assert place.saving is not None, "nothing is being saved"
        return place.saving

    def _saved(self, place: _Place, cold: Handle | None) -> None:
        if cold is None:
            return
        place.cold = cold
        self._of_cold[cold] = place
        if not place.owners:
            self._in_cold(ColdTier.release, cold)
        self.counters.demotions += 1
        self.counters.demoted_bytes += cold.nbytes

    # From cold to warm

    def _read_cold(self, place: _Place) -> Span | None:
        span = self._arrived(place) if place.reading else self._in_cold(ColdTier.read, place.cold).result()
        if span is None:
            self._lose(place)
            return None
        self.counters.promotions += 1
        self.counters.promoted_bytes += span.nbytes
        if self.warm.make_room(span.nbytes):
            self._put_warm(place, span, clean=True)
            self._take_evicted()
        return span

    def _arrived(self, place: _Place) -> Span | None:
        """What `fetch` has asked for, whose room is then free for it."""
        if place.reading is None:
            return None
        span = place.reading.result()
        place.reading = None
        self.warm.unreserve(place.handle.nbytes)
        return span

    # Places

    def _in_cold(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._worker.submit(work, self.cold, *args)

    def _new_place(self, of: Span | Handle) -> _Place:
        self._next += 1
        if isinstance(of, Span):
            return _Place(Handle.of(self._next, of.outline))
        return _Place(Handle(self._next, of.owner, of.fingerprint, of.nbytes))

    def _add(self, place: _Place) -> None:
        self._places[place.handle] = place
        self._of_key.setdefault(place.handle.index, {})[place.handle] = place

    def _put_warm(self, place: _Place, span: Span, clean: bool) -> None:
        place.warm = self.warm.write(span, clean)
        assert place.warm is not None, "the caller must make room"
        self._of_warm[place.warm] = place
        if place.pins:
            self.warm.pin(place.warm)

    def _take_evicted(self) -> None:
        for warm in self.warm.evicted:
            place = self._of_warm.pop(warm)
            place.warm = None
            assert not place.owners or place.cold is not None, "a span left warm that was nowhere else"
            if not place.owners:
                self._lose(place)
        self.warm.evicted.clear()

    def _lose(self, place: _Place) -> None:
        """Forget all that is known of a span."""
        self._arrived(place)
        del self._places[place.handle]
        of_key = self._of_key[place.handle.index]
        del of_key[place.handle]
        if not of_key:
            del self._of_key[place.handle.index]
        self._stuck.discard(place.handle)
        self._leave_cold(place)
        if place.warm is not None:
            del self._of_warm[place.warm]
            self.warm.drop(place.warm)

    def _leave_cold(self, place: _Place) -> None:
        if place.cold is not None:
            del self._of_cold[place.cold]
            place.cold = None

    # The whole

    def report(self) -> dict[str, int]:
        """Bytes and spans of each tier, and all counters, by name."""
        sizes = {"warm_bytes": self.warm.nbytes, "warm_spans": len(self.warm)}
        if self.cold is None:
            return sizes | asdict(self.counters)
        of_file = {f"cold_{name}": count for name, count in asdict(self.cold.counters).items()}
        cold = {"cold_bytes": self.cold.nbytes, "cold_spans": len(self.cold)}
        return sizes | cold | asdict(self.counters) | of_file

    def check(self) -> None:
        """Re-derive every count, when all that is on its way has arrived."""
        self._settle(wait=True)
        self.warm.check()
        if self.cold is not None:
            self._in_cold(ColdTier.check).result()
        places = self._places.values()
        assert self._of_warm == {p.warm: p for p in places if p.warm is not None}, "a span in warm is lost"
        assert self._of_cold == {p.cold: p for p in places if p.cold is not None}, "a span in cold is lost"
        assert index_of(self._places) == self._of_key, "a span is not found by its key"
        assert len(self._of_warm) == len(self.warm), "warm holds what nobody knows of"
        unsaved = set(self.warm.unsaved())
        for handle, place in self._places.items():
            assert handle == place.handle, "a span goes by another's handle"
            assert place.warm is not None or place.cold is not None, "a span is nowhere"
            clean = place.warm is not None and not place.pins and place.warm not in unsaved
            assert not (clean and place.owners) or place.cold is not None, (
                "a span may go that is nowhere else"
            )

    def close(self) -> None:
        """Finish what is on its way, and close both tiers; what is in warm alone is gone."""
        self._settle(wait=True)
        self._worker.shutdown()
        self.warm.close()
        if self.cold is not None:
            self.cold.close()
