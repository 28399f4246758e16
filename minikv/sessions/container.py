"""The file of a session: a safetensors file with a version, and checksums over every byte of it.

    length of the header, 8 bytes | header, JSON | tensors, one after another

The header says where each tensor lies, and in its metadata which format this is, in which version, and what
the session belongs to. `checksum` is the sha256 of the length and the header, with zeros in its own place;
`data_checksum` that of the tensors. A header is small and is checked before anything it says is believed,
so that a file cannot make its reader allocate, or read for long, for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

FORMAT = "minikv-session"
VERSION = "1"

_LARGEST_HEADER = 1 << 20
_BLOCK = 1 << 20
_UNKNOWN = "0" * 64  # in the place of a checksum
_BEGINNING = b'{"__metadata__":{"format":"' + FORMAT.encode() + b'"'
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Unusable(Exception):
    """Why a file cannot be loaded, as a clause that goes on after its name: `is empty`."""


FOREIGN = "is not a session saved by minikv"


def damaged(what: str) -> Unusable:
    """That a file is not as it was written."""
    return Unusable(f"is damaged: {what}")


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write, in parts along its first axis that are made when their turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[Tensor]

    @classmethod
    def whole(cls, tensor: Tensor) -> Outgoing:
        """One that is there already."""
        return cls(tensor.dtype, tuple(tensor.shape), [tensor])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Placed:
    """A tensor in a file; `start` counts bytes from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one place along the first axis."""
        return prod(self.shape[1:]) * self.dtype.itemsize


def write_container(file: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, Outgoing]) -> None:
    """Write a whole file to one that is empty."""
    header = _header(metadata, tensors, _UNKNOWN, _UNKNOWN)
    file.write(header)
    digest = hashlib.sha256()
    for name, tensor in _in_order(tensors).items():
        written = 0
        for part in tensor.parts:
            data = _bytes_of(part)
            digest.update(data)
            file.write(data)
            written += len(data)
        assert written == tensor.nbytes, f"the parts of {name} are not what was announced"
    header = _header(metadata, tensors, _UNKNOWN, digest.hexdigest())
    file.seek(0)
    file.write(_header(metadata, tensors, hashlib.sha256(header).hexdigest(), digest.hexdigest()))


def _in_order(tensors: Mapping[str, Outgoing]) -> dict[str, Outgoing]:
    """Wide types first, so that each tensor lies at a multiple of its type's size."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _header(metadata: Mapping[str, str], tensors: Mapping[str, Outgoing], checksum: str, data: str) -> bytes:
    own = {"format": FORMAT, "format_version": VERSION, "checksum": checksum, "data_checksum": data}
    body: dict[str, Any] = {"__metadata__": {**own, **metadata}}
    start = 0
    for name, tensor in _in_order(tensors).items():
        offsets = [start, start := start + tensor.nbytes]
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body[name] = entry
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= _LARGEST_HEADER
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def is_session_file(path: Path) -> bool:
    """Whether a file begins as a session does. Raises OSError."""
    with _open_regular(path) as file:
        return _begins_well(file.read(8 + len(_BEGINNING)))


def _begins_well(data: bytes) -> bool:
    return data[8:].startswith(_BEGINNING)


def _open_regular(path: Path) -> FileIO:
    """Open a file to read; Unusable for what is none, without waiting for the other end of a pipe."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return FileIO(handle, "rb")
    os.close(handle)
    raise Unusable("is a directory" if stat.S_ISDIR(mode) else "is not a regular file")


class Container:
    """A file that is open to be read; a context manager. metadata, tensors: what its header says, which is
    checked. `check_data` has to be called before any tensor is believed.

    Raises OSError and Unusable.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, _open_regular(path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            header = self._read_header()
            body = _parsed(header)
            self.metadata = _metadata(body)
            self._check_header(header)
            self.tensors = self._placed(body, len(header))
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> bytes:
        """The header with its length before it."""
        if not self._size:
            raise Unusable("is empty")
        if not _begins_well(bytes(self._bytes(0, min(self._size, 8 + len(_BEGINNING))))):
            raise Unusable(FOREIGN)
        (length,) = struct.unpack("<Q", self._bytes(0, 8))
        if length > _LARGEST_HEADER:
            raise damaged("its header is too long")
        if 8 + length > self._size:
            raise damaged("it ends too early")
        return bytes(self._bytes(0, 8 + length))

    def _check_header(self, header: bytes) -> None:
        version = self.metadata.get("format_version")
        if version is None:
            raise damaged("its header cannot be read")
        if version != VERSION:
            raise Unusable(
                f"has version {version[:20]!r} of the session format, and this minikv reads version {VERSION}"
            )
        own = self.metadata.get("checksum", "")
        blank = header.replace(f'"checksum":"{own}"'.encode(), f'"checksum":"{_UNKNOWN}"'.encode(), 1)
        if hashlib.sha256(blank).hexdigest() != own:
            raise damaged("its checksum does not fit")

    def _placed(self, body: Mapping[str, Any], offset: int) -> dict[str, Placed]:
        placed = {name: _entry(entry, offset) for name, entry in body.items() if name != "__metadata__"}
        end = offset
        for tensor, stop in sorted(placed.values(), key=lambda pair: (pair[0].start, pair[1])):
            if tensor.start != end or stop - tensor.start != tensor.nbytes:
                raise damaged("its tensors do not lie side by side")
            end = stop
        if end != self._size:
            raise damaged("it ends too early" if end > self._size else "there is something behind its end")
        return {name: tensor for name, (tensor, _) in placed.items()}

    def check_data(self) -> None:
        """Unusable unless all tensors are as they were written."""
        digest = hashlib.sha256()
        start = min((tensor.start for tensor in self.tensors.values()), default=self._size)
        for place in range(start, self._size, _BLOCK):
            digest.update(self._bytes(place, min(_BLOCK, self._size - place)))
        if digest.hexdigest() != self.metadata.get("data_checksum"):
            raise damaged("its checksum does not fit")

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Places [start, stop) along the first axis of a tensor."""
        tensor = self.tensors[name]
        data = self._bytes(tensor.start + start * tensor.row_bytes, (stop - start) * tensor.row_bytes)
        shape = (stop - start, *tensor.shape[1:])
        if not data:
            return torch.empty(shape, dtype=tensor.dtype)
        return torch.frombuffer(data, dtype=tensor.dtype).view(shape)

    def _bytes(self, start: int, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        self._file.seek(start)
        while done < count:
            read = self._file.readinto(view[done:])
            if not read:
                raise damaged("it ends too early")
            done += read
        return data

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        body = json.loads(header[8:])
    except (ValueError, RecursionError):
        raise damaged("its header cannot be read") from None
    return body  # an object, as it begins with a brace


def _metadata(body: Mapping[str, Any]) -> dict[str, str]:
    metadata = body["__metadata__"]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged("its header cannot be read")
    return metadata


def _entry(entry: Any, offset: int) -> tuple[Placed, int]:
    """A tensor of the header, and where it ends."""
    try:
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise damaged("its header cannot be read") from None
    if not shape or len(shape) > 4 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
        raise damaged("its header cannot be read")
    if type(start) is not int or type(stop) is not int:
        raise damaged("its header cannot be read")
    return Placed(dtype, shape, start + offset), stop + offset
