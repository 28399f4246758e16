"""Weights of a Hugging Face directory: one safetensors file, or shards listed by an index.

Files are memory mapped; a tensor is copied only when it is loaded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minikv.errors import ModelError
from minikv.models.embedding import DenseEmbedding
from minikv.models.fields import shorten
from minikv.models.weights import EMBEDDING, HEAD, dominant_dtype

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PLAIN_NAME = re.compile(r"^\w[\w.-]*\.safetensors$")
_SAMPLE = 16  # values read from each end of a tensor for the fingerprint


class SafetensorsWeights:
    """The tensors of a model directory, by their names in the files.

    Raises ModelError when a file is missing, damaged, outside the directory, or of a type that
    is not plain floating point.
    """

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        listed = _read_index(directory) if not (directory / SINGLE_FILE).exists() else None
        for file_name in [SINGLE_FILE] if listed is None else sorted(set(listed.values())):
            self._add_file(directory / file_name)
        for name, file_name in (listed or {}).items():
            if self._file_of.get(name) != file_name:
                raise ModelError(
                    f"{directory / file_name} lacks the tensor {name}, which {INDEX_FILE} says it holds."
                )

    def _add_file(self, path: Path) -> None:
        handle = open_safetensors(path)
        self._files[path.name] = handle
        for name in handle.keys():  # noqa: SIM118 (the handle is no dict)
            if name in self._file_of:
                raise ModelError(
                    f"{self.path} holds the tensor {name} twice, in {self._file_of[name]} and {path.name}."
                )
            view = handle.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise ModelError(
                    f"{path} stores {name} as {view.get_dtype()}, but only {', '.join(_DTYPES)} can be read."
                )
            self._file_of[name] = path.name
            self._types[name] = _DTYPES[view.get_dtype()]
            self._shapes[name] = tuple(view.get_shape())

    def names(self) -> list[str]:
        """Every tensor in the files."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as [out, in] or [size]."""
        return self._shapes[name]

    def stored_dtype(self, name: str) -> str:
        """`float32`, `bfloat16`, ..."""
        return self._types[name]

    @property
    def dtype(self) -> str:
        """The type most values are stored in."""
        counts: Counter[str] = Counter()
        for name, shape in self._shapes.items():
            counts[self._types[name]] += prod(shape)
        return dominant_dtype(counts)

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """This tensor as `dtype` in fresh contiguous memory."""
        return self._mapped(name).to(dtype, copy=True).contiguous()

    def blocks(self, name: str) -> None:
        """None: no quantised types are read from safetensors."""

    def sample(self, name: str) -> bytes:
        """A few stored bytes from both ends of the tensor."""
        flat = self._mapped(name).flatten()
        ends = torch.cat((flat[:_SAMPLE], flat[-_SAMPLE:]))
        return ends.view(torch.uint8).numpy().tobytes()

    def embedding(self) -> DenseEmbedding:
        """The token table, mapped from its file."""
        return DenseEmbedding(self._mapped(EMBEDDING))

    def head_differs(self) -> bool:
        """Whether the file holds an output head of other values than the token table."""
        if HEAD not in self._file_of or self._shapes[HEAD] != self._shapes.get(EMBEDDING):
            return False
        table, head = self._mapped(EMBEDDING), self._mapped(HEAD)
        return table.dtype != head.dtype or not torch.equal(table, head)

    def close(self) -> None:
        """Close the files; mapped tables that were handed out stay valid."""
        self._files.clear()

    def _mapped(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)


def open_safetensors(path: Path) -> Any:
    """The open handle of a safetensors file; ModelError when it is missing or damaged."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelError(f"The weight file {path} is missing; fetch the model again.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"The weight file {path} is damaged or incomplete ({_first_line(error)}); fetch the model again."
        ) from error


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name to shard file name. Shards must lie in the directory itself."""
    path = directory / INDEX_FILE
    index = read_json(path)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{path} lacks weight_map, which must list the shard of every tensor.")
    for name, file_name in listed.items():
        if not isinstance(file_name, str) or not _PLAIN_NAME.match(file_name):
            raise ModelError(
                f"{path} places {name} in {shorten(file_name)}, which is not a plain file name beside it."
            )
    return listed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({_first_line(error)}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {shorten(value)}.")
    return value


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
