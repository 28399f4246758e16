"""Results on disk: whole lines of JSON that a later run goes on from, and the settings they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from minikv.errors import ConfigError, RequestError, shown

RESULTS, SETTINGS = "results.jsonl", "settings.json"
_BEGINNING = b'{"task": '  # of every line of results
_SETTING = "evaluation"  # that all settings hold
MEASURES = ("exact", "token_accuracy", "nll", "kl", "top1")


@dataclass(frozen=True)
class Record:
    """One answer under one policy and budget; None where a measure does not apply.

    budget: as in `CacheConfig`, None for policy `full`. seed: of the sample. turn: of the
    conversation, from 1. kv_bytes, full_bytes: pages held after compression, and those of the full
    cache. compress_s: seconds of the compression. The other measures are those of `Measures`.
    """

    task: str
    format: str
    policy: str
    budget: float | int | str | None
    length: int
    seed: int
    depth: float | None
    agnostic: bool
    turn: int
    exact: bool | None = None
    token_accuracy: float | None = None
    nll: float | None = None
    kl: float | None = None
    top1: float | None = None
    kv_bytes: int = 0
    full_bytes: int = 0
    compress_s: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What no two records share."""
        return (self.policy, repr(self.budget), *self.question)

    @property
    def question(self) -> tuple[Any, ...]:
        """What was asked: the same for every policy and budget."""
        asked = (self.task, self.format, self.length, self.seed, self.depth)
        return (*asked, self.agnostic, self.turn)


class ResultsFile:
    """`results.jsonl` and `settings.json` in a folder, which is made if need be. A context manager.

    records: those of earlier runs, and those written. A torn last line is cut off. Raises RequestError
    when the folder cannot be written or another run is writing there, ConfigError when it holds
    something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / RESULTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise _unwritable(folder, error) from None
        try:
            _lock(self._file.fileno(), folder)
            self.records = self._read()
        except OSError as error:
            self._file.close()
            raise _unwritable(folder, error) from None
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> list[Record]:
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        records = [self._record(number, line) for number, line in enumerate(whole.splitlines(), 1)]
        torn = data[len(whole) :]
        if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
            raise self._foreign(len(records) + 1)
        if torn:
            self._file.truncate(len(whole))
        return records

    def _record(self, number: int, line: bytes) -> Record:
        try:
            return Record(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise self._foreign(number) from None

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"Line {number} of {self.path} was not written by minikv eval; give another folder."
        )

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Say what decides the figures, before anything is written: ConfigError when the folder holds
        results of other settings."""
        path = self.folder / SETTINGS
        if not self.records:
            if not _replaceable(path):
                raise ConfigError(f"{path} was not written by minikv eval; give another folder.")
            replace_file(path, (json.dumps(dict(settings), indent=2) + "\n").encode())
            return
        try:
            earlier = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            raise ConfigError(
                f"{path} cannot be read, so results of other settings could be mixed; give another folder."
            ) from None
        for name in {**settings, **earlier}:
            if settings.get(name) != earlier.get(name):
                raise ConfigError(
                    f"{self.folder} holds results with {name} {shown(earlier.get(name))}, not "
                    f"{shown(settings.get(name))}; give another folder, or the same settings."
                )

    def write(self, records: list[Record]) -> None:
        """Append records; they are with the operating system on return. RequestError when that fails,
        and the file then holds whole lines as before."""
        lines = [json.dumps(asdict(record), allow_nan=False) + "\n" for record in records]
        data, size = "".join(lines).encode(), os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)
            raise _unwritable(self.folder, error) from None
        self.records += records

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _unwritable(folder: Path, error: OSError) -> RequestError:
    return RequestError(f"Cannot write {folder}: {(error.strerror or str(error)).lower()}.")


def _lock(descriptor: int, folder: Path) -> None:
    """Take the folder for this process until it ends. RequestError when another one has it."""
    try:
        import fcntl
    except ImportError:
        return  # Windows has no such lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(f"Another run is writing {folder}; wait until it ends.") from None
    except OSError:
        return  # a file system without locks


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all. RequestError when that fails."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RequestError(f"Cannot write {path}: {(error.strerror or str(error)).lower()}.") from None


def _replaceable(path: Path) -> bool:
    """Whether nothing is lost if the settings are written there: no file, or settings of a run."""
    try:
        return _SETTING in dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, RecursionError):
        return False
