"""A side stream on the CPU that is as late as a real one may be, and later.

A copy is made when somebody waits for it, or some time after, in any order; until then its target is spoilt.
What it reads it reads then: if that was overwritten or let go of meanwhile, the copy is spoilt too. A real
stream is in order, which the tests do not rely on.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from minikv.cache.copies import Copies, room_for

_SPOILT = 0xFF  # of every byte; a NaN of every floating type


class LateEvent:
    """The end of a copy of `sources` to `targets`."""

    def __init__(self, stream: LateStream, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.stream = stream
        # Nobody but who began the copy keeps alive what it reads.
        self.sources = [weakref.ref(source) for source in sources]
        self.targets = list(targets)
        self.polls = stream.random.randrange(6)
        self.made = self.seen = False
        for target in targets:
            bytes_of(target).fill_(_SPOILT)

    def make(self) -> None:
        """Let the copy happen."""
        if not self.made:
            self.made = True
            for source, target in zip(self.sources, self.targets, strict=True):
                if (alive := source()) is not None:
                    target.copy_(alive)
            self.read = [None if s() is None else bytes_of(s()).clone() for s in self.sources]

    def done(self) -> bool:
        """True after some questions; it was then made at the latest."""
        self.polls -= 1
        if self.polls > 0:
            return False
        self.make()
        self.end()
        return True

    def wait(self) -> None:
        """Make it."""
        self.make()
        self.end()

    def hold_compute(self) -> None:
        """What computes from here on sees the copy; the host is not told that it is done."""
        self.make()

    def end(self) -> None:
        """The copy is known to be done: until now it may have been reading."""
        if not self.seen:
            self.seen = True
            self.stream.num_ended += 1
            for source, before in zip(self.sources, self.read, strict=True):
                alive = source()
                assert alive is not None, "what a copy reads was let go of"
                assert torch.equal(bytes_of(alive), before), "what a copy reads was overwritten"


class LateStream:
    """See `SideStream`."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.num_ended = 0
        self.event = LateEvent

    def pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), _SPOILT, dtype=torch.uint8)

    def out(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> LateEvent:
        return self.event(self, sources, targets)

    def into(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], LateEvent]:
        targets = [torch.empty_like(source) for source in sources]
        return targets, self.event(self, sources, targets)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which it shares."""
    return tensor.reshape(-1).view(torch.uint8)


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def exercise(copies: Copies, rounds: int = 60, device: torch.device | str = "cpu", most: int = 40) -> int:
    """Send tensors both ways at random, overwriting what they were made from; how many were refused. Fails
    unless each arrives as it was when it was sent. most: numbers of the largest."""
    choose, waiting, refused = random.Random(1), [], 0
    for number in range(rounds):
        pool = numbers(choose.randrange(1, most), number)
        expected = pool.clone()
        if choose.random() < 0.5:
            pool = pool.to(device)
            arriving = copies.leave(room_for([pool.nbytes]), lambda kept=pool: [kept.clone()])
            pool.fill_(-1)  # the compute stream goes on
            if arriving is not None:
                waiting.append((arriving, expected))
            refused += arriving is None
        else:
            came = copies.come([pool])
            pool.fill_(-1)
            assert came is None or torch.equal(came[0].cpu(), expected), "computed with what had not come"
            refused += came is None
        if waiting and choose.random() < 0.5:
            arriving, expected = waiting.pop(choose.randrange(len(waiting)))
            assert torch.equal(arriving.take()[0], expected), "took what had not arrived"
    for arriving, expected in waiting:
        assert torch.equal(arriving.take()[0], expected), "took what had not arrived"
    while copies.num_flying:
        copies.sweep()
    assert copies._ring.in_use == 0
    return refused
