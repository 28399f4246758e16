"""Write a file whole or not at all: beside the old one under another name, to the disk, then in its place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_ENDING = ".unfinished"


def replace_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a new file, and put that in the place of `path`, which readers of others find either
    as it was or as it is now, whenever the process ends. Raises OSError or what `write` raises, with the
    old file untouched and nothing left behind.

    A process that was killed leaves its unfinished file, which the next one to write here removes.
    """
    path = Path(os.path.realpath(path))
    _remove_leftovers(path)
    file, name = _new_file(path)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            # Still under its lock, so that nobody takes it for a leftover.
            os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def _new_file(path: Path) -> tuple[BinaryIO, str]:
    """An empty file beside `path`, locked for as long as it is open."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_ENDING)
        file = open(handle, "w+b")  # noqa: SIM115  (the caller closes it)
        _lock(handle)
        if os.fstat(handle).st_nlink:
            return file, name
        file.close()  # taken for a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    prefix = f".{path.name}."
    for name in os.listdir(path.parent):
        if not (name.startswith(prefix) and name.endswith(_ENDING)):
            continue
        with suppress(OSError), open(path.parent / name, "r+b") as file:
            if _lock(file.fileno()):
                os.unlink(path.parent / name)


def _lock(handle: int) -> bool:
    """Whether this process has the file to itself now; False as well where files cannot be locked."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Windows has no such lock, nor have some file systems
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk too. The file is whole without, so where it cannot be done, it is not."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
