"""Threads that work on the layers of one compression side by side.

Most operators of a compression are short, and those of one layer wait for each other: torch's own threads,
which meet at the end of every operator, take longer than one does. Layers know nothing of each other, so each
is worked on by one thread from end to end, in which torch has no others. What comes out is then the same to
the bit on any number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier, Thread
from types import TracebackType
from typing import TypeVar

import torch

_IN_FLIGHT = 512 << 20
_PARTS = 4  # what is made of a layer's keys and values takes some times as much memory as they do

Given = TypeVar("Given")
Made = TypeVar("Made")


def crew_size(threads: int, layer_bytes: int) -> int:
    """How many layers, whose keys and values take so many bytes in float32, to work on at once."""
    fitting = _IN_FLIGHT // max(1, _PARTS * layer_bytes) - 1  # and one that waits
    return max(1, min(threads, fitting))


def _have_one_thread() -> None:
    """Let torch have one thread in the calling one, whatever new threads start with."""
    torch.get_num_threads()  # makes it start with that now, and not when it first computes
    torch.set_num_threads(1)


class Crew:
    """So many threads, for as long as it is entered. A crew of one is the calling thread, with all that torch
    has; a larger one takes the calling thread's own from it, until it is left. Other threads keep theirs.

    The calling thread alone reads and writes pages: it gives out what it has read, and takes what was made
    of it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool: ThreadPoolExecutor | None = None
        self._threads_before = 1

    def __enter__(self) -> Crew:
        if self.size > 1:
            self._threads_before = torch.get_num_threads()
            try:
                self._start()
            except BaseException:
                self._leave()
                raise
        return self

    def _start(self) -> None:
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self.size, "minikv", _have_one_thread)
        there = Barrier(self.size + 1)
        try:
            for _ in range(self.size):
                self._pool.submit(there.wait)
            there.wait()
        except BaseException:
            there.abort()
            raise
        # Threads that are new to torch start with the number of whoever set it last, which is not to be ours.
        setter = Thread(target=torch.set_num_threads, args=(self._threads_before,))
        setter.start()
        setter.join()

    def _leave(self) -> None:
        try:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
        finally:
            self._pool = None
            torch.set_num_threads(self._threads_before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._leave()

    def map(
        self, work: Callable[[Given], Made], given: Iterable[Given], *, ahead: bool = True
    ) -> Iterator[Made]:
        """What `work` makes of each, in order. `given` is asked, in the calling thread, for no more than one
        beside those that are worked on; without `ahead`, not before what came of the last was used."""
        if self._pool is None or not ahead:
            yield from map(work, given)
            return
        work = torch.inference_mode()(work)  # which is a mode of a thread
        waiting: deque[Future[Made]] = deque()
        for one in given:
            waiting.append(self._pool.submit(work, one))
            if len(waiting) > self.size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
