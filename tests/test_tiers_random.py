"""Random interleavings of all that can happen to spans, against a plain table of what was written."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiering import MODEL, span

from minikv.cache.tiers import cold_file
from minikv.cache.tiers.cold import ColdTier
from minikv.cache.tiers.span import owner_key
from minikv.cache.tiers.tiers import Tiers
from minikv.cache.tiers.warm import WarmTier

PWRITE = os.pwrite
SIZE = span().nbytes
SPANS = [span(str(n % 5), n, lengths=(1 + n % 6, n % 4), seed=n) for n in range(20)]


class World:
    """Tiers beside what they should hold. safe: until a file is damaged nothing that has an owner may be
    missing."""

    def __init__(self, folder: Path, background: bool):
        self.path = folder / "kv.cold"
        self.background = background
        self.start()

    def start(self):
        self.is_full = False
        self.tiers = Tiers(WarmTier(5 * SIZE), ColdTier(self.path, 12 * SIZE), self.background)
        self.held: dict = {}
        self.pins: dict = {}
        self.safe = True

    def pick(self, number):
        handles = list(self.held)
        return handles[number % len(handles)] if handles else None

    def write(self, number):
        one = SPANS[number % len(SPANS)]
        if (handle := self.tiers.write(one)) is not None:
            assert handle not in self.held
            self.held[handle] = one

    def read(self, number):
        if (handle := self.pick(number)) is not None:
            self.verify(handle)

    def verify(self, handle):
        found = self.tiers.read(handle)
        if found is None:
            assert not self.safe, "a span is missing"
            del self.held[handle]
            self.pins.pop(handle, None)
        else:
            assert found == self.held[handle], "rows are wrong"

    def fetch(self, number):
        if (handle := self.pick(number)) is not None:
            self.tiers.fetch(handle)

    def pin(self, number):
        if (handle := self.pick(number)) is not None:
            self.tiers.pin(handle)
            self.pins[handle] = self.pins.get(handle, 0) + 1

    def unpin(self, number):
        if self.pins:
            handle = list(self.pins)[number % len(self.pins)]
            self.tiers.unpin(handle)
            self.pins[handle] -= 1
            if not self.pins[handle]:
                del self.pins[handle]

    def drop(self, number):
        if (handle := self.pick(number)) is not None and handle not in self.pins:
            self.tiers.drop(handle)
            del self.held[handle]
            assert self.tiers.read(handle) is None

    def release(self, number):
        if (handle := self.pick(number)) is not None and handle not in self.pins:
            self.tiers.release(handle)
            del self.held[handle]

    def find(self, number):
        key = owner_key(str(number % 5))
        for handle in self.tiers.find(key, MODEL):
            if handle in self.held:
                self.tiers.release(handle)  # they are owned once here
                continue
            found = self.tiers.read(handle)
            assert found is None or (found in SPANS and found.owner.key == key), "rows are wrong"
            if found is not None:
                self.held[handle] = found

    def flush(self, number):
        self.tiers.flush()

    def flip(self, number):
        """Damage one byte of the file behind the tiers' back."""
        self.tiers.check()  # all that is on its way has arrived
        size = self.path.stat().st_size
        with self.path.open("r+b") as file:
            file.seek(number % size)
            byte = file.read(1)[0]
            file.seek(number % size)
            file.write(bytes([byte ^ 1 << number % 8]))
        self.safe = False

    def full(self, number):
        """The disk is full for a while, which loses nothing."""
        self.is_full = not self.is_full

    def pwrite(self, descriptor, data, offset):
        if self.is_full:
            PWRITE(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(descriptor, data, offset)

    def crash(self, number):
        """The process ends at any moment, with any part of the file written."""
        self.tiers.close()
        os.truncate(self.path, number % (self.path.stat().st_size + 1))
        if self.path.stat().st_size < 16 or self.path.read_bytes()[:16] != b"minikv cold\n\1\0\0\0":
            self.path.unlink()  # a damaged beginning is refused when it is opened
        self.start()

    def check(self):
        assert self.tiers.warm.nbytes <= self.tiers.warm.limit
        assert self.tiers.nbytes <= self.tiers.limit
        self.tiers.check()
        assert sum(file.stat().st_size for file in self.path.parent.iterdir()) <= self.tiers.cold.limit


KINDS = ["write"] * 5 + ["read", "read", "fetch", "pin", "unpin", "drop", "release", "find", "flush"]
steps = st.lists(
    st.tuples(st.sampled_from([*KINDS, "full", "flip", "crash"]), st.integers(0, 1 << 20)),
    min_size=40,
    max_size=150,
)


@pytest.mark.parametrize("background", [False, True])
@given(steps)
@settings(max_examples=60)
def test_whatever_happens_rows_are_right_or_missed_and_ceilings_hold(background, steps):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = World(Path(folder), background)
        patch.setattr(cold_file.os, "pwrite", world.pwrite)
        for kind, number in steps:
            getattr(world, kind)(number)
            if number % 2 or not background:  # else the next step may meet what is on its way
                world.check()
        for handle in list(world.held):
            world.verify(handle)
        world.check()
        world.tiers.close()
