"""Lines from a pipe, read ahead by a thread: whoever writes slowly must not hold up what is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import Empty, Queue
from threading import Thread

from minikv.cli.batch_lines import InputLine

_MOST_AHEAD = 1000


class _End:
    """No more lines come."""


def feed(lines: Iterable[InputLine]) -> Iterator[InputLine | None]:
    """The lines in order, with None whenever the next one is not there yet.

    What reading raises is raised here.
    """
    arrived: Queue[InputLine | _End | Exception] = Queue(_MOST_AHEAD)

    def read() -> None:
        try:
            for line in lines:
                arrived.put(line)
            arrived.put(_End())
        except Exception as error:
            arrived.put(error)

    Thread(target=read, daemon=True).start()
    while True:
        try:
            item = arrived.get_nowait()
        except Empty:
            yield None
            continue
        if isinstance(item, _End):
            return
        if isinstance(item, Exception):
            raise item
        yield item
