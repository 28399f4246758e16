"""The interface all weight files share, and the strict check of what they hold.

A tensor is loaded one at a time, so that at no moment two full float32 copies exist.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor

from minikv.errors import ModelError
from minikv.kernels.cpu.pack import StoredBlocks
from minikv.models.config import ModelConfig, expected_shapes
from minikv.models.embedding import Embedding

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Frequency tables that older checkpoints carry along; RoPE computes its own from the config.
_HARMLESS = re.compile(r"^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")


class WeightSource(Protocol):
    """An open model file or set of files. Names are the canonical Hugging Face ones."""

    path: str

    def names(self) -> list[str]:
        """Every tensor in the files; those with no canonical name keep their own."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as [out, in] or [size]."""
        ...

    def stored_dtype(self, name: str) -> str:
        """How the tensor is stored, such as `bfloat16` or `Q4_1`."""
        ...

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """This tensor as `dtype` in fresh contiguous memory."""
        ...

    def blocks(self, name: str) -> StoredBlocks | None:
        """A matrix as the file quantised it, if it is stored as blocks; None for plain numbers."""
        ...

    def sample(self, name: str) -> bytes:
        """A few stored bytes from both ends of the tensor, for the fingerprint."""
        ...

    def embedding(self) -> Embedding:
        """The token table, kept in its stored form."""
        ...

    def close(self) -> None:
        """Release the files; tensors that were loaded stay valid."""
        ...


def check_weights(source: WeightSource, config: ModelConfig) -> None:
    """Compare names and shapes in both directions, before any tensor is loaded.

    Raises ModelError naming the first tensor that is missing, misshaped or not of the model.
    """
    expected = dict(expected_shapes(config))
    found = set(source.names())
    if config.tied_embeddings and HEAD in found:
        # Some tied checkpoints store the table twice. The copy is never read, but one of another
        # shape would mean that the config describes a different model.
        expected[HEAD] = expected[EMBEDDING]
    missing = [name for name in expected if name not in found]
    if missing:
        hint = " (tie_word_embeddings is false)" if missing == [HEAD] else ""
        raise ModelError(
            f"{source.path} lacks the tensor {missing[0]}{_more(missing)}, which its config requires{hint}."
        )
    extra = sorted(name for name in found - expected.keys() if not _HARMLESS.match(name))
    if extra:
        raise ModelError(
            f"{source.path} holds the tensor {extra[0]}{_more(extra)}, which its config does not describe."
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.path} holds {name} of shape {list(source.shape(name))}, "
                f"but its config requires {list(shape)}."
            )


def fingerprint(source: WeightSource, config: ModelConfig) -> str:
    """sha256 (hex) over the config and each tensor's name, shape, type and sampled bytes.

    The same for the same model wherever it lies; costs a few file pages per tensor.
    """
    digest = hashlib.sha256(repr(sorted(asdict(config).items())).encode())
    for name in sorted(source.names()):
        digest.update(f"{name} {source.shape(name)} {source.stored_dtype(name)}".encode())
        digest.update(source.sample(name))
    return digest.hexdigest()


def dominant_dtype(dtypes: Mapping[str, int]) -> str:
    """The type most values are stored in, from values per type."""
    return max(dtypes, key=lambda name: dtypes[name])


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
