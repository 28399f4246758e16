"""Opening a GGUF file: metadata, tensor table, and one sentence for every way it can be broken."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from minikv.errors import ModelError
from minikv.models.fields import Fields

_HEADER = 12  # bytes before the items of an array: item type and count
_BROKEN = (ValueError, IndexError, KeyError, OverflowError, MemoryError, TypeError, struct.error)


class _Reader(gguf.GGUFReader):
    """GGUFReader that refuses to read past the end of the file and reads arrays at once.

    The base class clips such reads, which turns a damaged length into an endless loop, and makes
    several numpy views per array item: seconds for a vocabulary.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        order = self.byte_order if override_order is None else override_order
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, raw_count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, count = GGUFValueType(int(raw_item[0])), int(raw_count[0])
        types = [GGUFValueType.ARRAY, item]
        if item in self.gguf_scalar_to_np:
            items = self._get(orig_offs + _HEADER, self.gguf_scalar_to_np[item], count)
            return _HEADER + items.nbytes, [raw_item, raw_count, items], [2], types
        if item != GGUFValueType.STRING:
            raise ValueError("array of arrays")
        offset, parts = orig_offs + _HEADER, [raw_item, raw_count]
        buffer: Any = self.data
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", buffer, offset)
            parts.append(np.frombuffer(buffer, np.uint8, size, offset + 8))
            offset += 8 + size
        return offset - orig_offs, parts, list(range(2, len(parts))), types


class GGUFFile:
    """A memory-mapped GGUF file.

    `metadata` maps keys to plain values; `tensors` maps llama.cpp names to the reader's tensors
    (`data` [rows, bytes per row], `tensor_type`, `shape` in reversed order). Raises ModelError
    for a file that cannot be read, is not GGUF, is cut short, split, or of a foreign byte order,
    and for tensor types that cannot be dequantised.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        if reader.byte_order != "I":
            raise ModelError(f"{path} has the byte order of another machine; convert it for this one.")
        try:
            self.metadata: Mapping[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except _BROKEN as error:
            raise ModelError(f"{path} has unreadable metadata ({error}); fetch it again.") from error
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._mapping = reader.data.base
        if Fields(self.metadata, str(path)).integer("split.count", 0, least=0) > 1:
            raise ModelError(f"{path} is one part of a split GGUF; merge the parts into one file first.")
        if not self.tensors:
            raise ModelError(f"{path} holds no tensors, only metadata; a whole model file is needed.")
        for kind in {tensor.tensor_type for tensor in reader.tensors}:
            if not can_dequantise(kind):
                name = next(tensor.name for tensor in reader.tensors if tensor.tensor_type == kind)
                raise ModelError(f"{path} stores {name} as {kind.name}, a type that cannot be dequantised.")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in row-major order, [out, in] or [size]."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def forget_pages(self) -> None:
        """Give the memory of what was read back to the system; what is read again comes from the file."""
        if isinstance(self._mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)


def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can turn this type into float32."""
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return True
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _open(path: Path) -> _Reader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    if magic != b"GGUF":
        what = "is empty" if not magic else "is not a GGUF file"
        raise ModelError(f"{path} {what}; a GGUF file begins with the letters GGUF.")
    try:
        return _Reader(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    except _BROKEN as error:
        raise ModelError(f"{path} is a damaged or incomplete GGUF file ({error}); fetch it again.") from error
