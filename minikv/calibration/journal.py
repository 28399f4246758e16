"""What a calibration has measured so far, on disk, so that a killed run loses one measurement at most.

One JSON object a line: first the settings of the run, then a line per measurement. Numbers are stored
as the bytes of their float32, so that a resumed run ends with the same bits as one that was not stopped.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.errors import ConfigError, RequestError, shown

_BEGINNINGS = (b'{"settings": ', b'{"key": ')  # of lines that are written here


class Journal:
    """An append-only file of measurements by key, such as `trial 3 1`. A context manager.

    A file of the same settings is gone on with; a torn last line is cut off, and so are settings without
    a measurement. Raises ConfigError when the file is of another run or damaged (unless `fresh`, which
    then drops it) or in use by another run, RequestError when it cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, fresh: bool = False):
        self.path = path
        self._settings = json.loads(json.dumps(dict(settings)))
        self.entries: dict[str, dict[str, Any]] = {}
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._lock()
            whole = self._read(fresh)
            self._file.truncate(whole)
            if not whole:
                self._write({"settings": self._settings})
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from None
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return  # Windows has no such lock
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another run is writing {self.path}; wait until it ends.") from None
        except OSError:
            return  # a file system without locks

    def _read(self, fresh: bool) -> int:
        """Take over what the file holds; the bytes of its whole lines, 0 to begin anew."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        torn = data[len(whole) :]
        try:
            if not any(torn.startswith(start) or start.startswith(torn) for start in _BEGINNINGS):
                raise ValueError("what would be cut off is not of a run")
            if not whole:
                return 0
            first, *lines = (json.loads(line) for line in whole.splitlines())
            settings = first["settings"]
            entries = {line.pop("key"): line for line in lines}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if fresh:
                return 0
            raise ConfigError(
                f"{self.path} is damaged; delete it or give --overwrite to begin anew."
            ) from None
        if settings != self._settings:
            if fresh or not entries:
                return 0
            raise ConfigError(self._difference(settings))
        self.entries = entries
        return len(whole)

    def _difference(self, found: Any) -> str:
        found = found if isinstance(found, dict) else {}
        name = next(
            name for name in {**self._settings, **found} if found.get(name) != self._settings.get(name)
        )
        return (
            f"{self.path} is of an unfinished run with {name} {shown(found.get(name))}, not "
            f"{shown(self._settings.get(name))}; repeat that run, or give --overwrite to begin anew."
        )

    def add(self, key: str, entry: Mapping[str, Any]) -> None:
        """Note a measurement; it is with the operating system on return. RequestError when that fails."""
        try:
            self._write({"key": key, **entry})
        except OSError as error:
            raise self._unwritable(error) from None
        self.entries[key] = dict(entry)

    def _write(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[self._file.write(data) or 0 :]

    def _unwritable(self, error: OSError) -> RequestError:
        return RequestError(f"Cannot write {self.path}: {(error.strerror or str(error)).lower()}.")

    def remove(self) -> None:
        """Delete the file, whose results now stand elsewhere."""
        self._file.close()
        os.unlink(self.path)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def pack(numbers: Tensor) -> str:
    """A float32 tensor as text."""
    return base64.b64encode(numbers.float().contiguous().numpy().astype("<f4").tobytes()).decode()


def unpack(text: str) -> Tensor:
    """The numbers of `pack`, flat."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32))
