"""What is kept of the keys of a span beside the lanes' own rows: a few bits for each token.

    keys of a lane, last queries --basis_of--> Basis (own to each lane)
    key --encode--> head_dim / 4 whole numbers from 0 to 15 --pack--> an entry of the lane, muted
    entry --unpack--> codes --> estimated scores of single tokens, for any query

A lane's keys differ from token to token in few directions, and queries look at fewer still. The basis is that
of the principal components of keys, in the metric of the queries, so that the error of a *score* is least
for so many numbers; each has 4 bits. A quarter of head_dim components are a bit for each number of a key.

An entry has room for CELLS codes for each digit that its numbers can hold. A span of more tokens than that
gives neighbours one code together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 16
_CELLS = 8  # codes of an entry, for each digit of its numbers
_DIGITS = {torch.float32: 3, torch.float16: 3, torch.bfloat16: 2, torch.int8: 1}
_CLIP = 3.0  # standard deviations that the levels cover
_LEAST = 1e-4  # of the greatest eigenvalue of the metric, below which a direction counts as this much


def digits_of(dtype: torch.dtype) -> int:
    """Codes that one number of a KV dtype holds exactly."""
    return _DIGITS[dtype]


def cells_of(dtype: torch.dtype) -> int:
    """Codes that an entry holds."""
    return _CELLS * digits_of(dtype)


def cell_of(within: Tensor, tokens: Tensor, cells: int) -> Tensor:
    """The cell of a token at place `within` of a span of so many tokens: each has one of its own if there are
    enough, else cells are as even as can be."""
    used = tokens.clamp(max=cells)
    return ((within + 1) * used - 1) // tokens.clamp(min=1)


def first_of(cell: Tensor, tokens: Tensor, cells: int) -> Tensor:
    """The place in its span of the first token of a cell, or `tokens` for a cell that is not used."""
    used = tokens.clamp(max=cells)
    return torch.where(cell < used, cell * tokens // used.clamp(min=1), tokens)


@dataclass(frozen=True)
class Basis:
    """What codes mean, for the lanes of a layer or of all, in float16.

    mean: [..., head_dim], of the keys. decoder: [..., components, head_dim], what one level of each code adds
    to it. encoder: [..., components, head_dim], what is multiplied with a key to get levels.
    """

    mean: Tensor
    decoder: Tensor
    encoder: Tensor

    def __post_init__(self) -> None:
        assert self.decoder.dtype == self.mean.dtype == self.encoder.dtype == torch.float16

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return sum(part.nbytes for part in vars(self).values())

    def layer(self, index: int) -> Basis:
        """That of one layer of all."""
        return Basis(self.mean[index], self.decoder[index], self.encoder[index])

    @classmethod
    def stacked(cls, layers: list[Basis]) -> Basis:
        """Of all layers."""
        names = ("mean", "decoder", "encoder")
        return cls(**{name: torch.stack([getattr(one, name) for one in layers]) for name in names})

    def packed(self) -> Tensor:
        """All of it as one tensor [..., 1 + 2 * components, head_dim] float16."""
        return torch.cat((self.mean[..., None, :], self.decoder, self.encoder), dim=-2)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Basis:
        """The basis that `packed` gave."""
        size = packed.shape[-2] // 2
        mean, decoder, encoder = packed.split([1, size, size], dim=-2)
        return cls(mean[..., 0, :].contiguous(), decoder.contiguous(), encoder.contiguous())

    def rows(self) -> Tensor:
        """Mean and decoder as entries: [..., basis_entries, 2 * head_dim] float32."""
        rows = torch.cat((self.mean[..., None, :], self.decoder), dim=-2).float()
        rows = F.pad(rows, (0, 0, 0, 2 * basis_entries(rows.shape[-1]) - rows.shape[-2]))
        return rows.unflatten(-2, (-1, 2)).flatten(-2)

    def levels(self, keys: Tensor) -> Tensor:
        """Of one layer: keys [kv_heads, n, head_dim] float32 as components [kv_heads, n, components] in units
        of a level, not rounded."""
        return (keys - self.mean.float()[:, None]) @ self.encoder.float().transpose(1, 2)


def basis_entries(head_dim: int) -> int:
    """Entries of a lane that mean and decoder of its basis fill, two rows of head_dim numbers in each."""
    return 1 + head_dim // 8


def basis_of(keys: Tensor, some: Tensor, queries: Tensor) -> Basis:
    """The basis of a layer's lanes.

    keys: [kv_heads, n, head_dim] float32; some: [kv_heads, n] bool, those that count, at least one of each
    lane. queries: [kv_heads, m, head_dim] float32, as they meet these keys.
    """
    size = keys.shape[-1] // 4
    weight = some.to(keys.dtype)[..., None]
    count = weight.sum(dim=1, keepdim=True).clamp(min=1)
    mean = weight.transpose(1, 2) @ keys / count
    spread = (keys - mean).mul_(weight)
    covariance = spread.transpose(1, 2) @ spread / count
    metric, directions = torch.linalg.eigh(queries.transpose(1, 2) @ queries / queries.shape[1])
    metric = metric.clamp(min=1e-12)
    metric = metric.clamp(min=_LEAST * metric.amax(dim=1, keepdim=True)).sqrt()[:, None]
    root = (directions * metric) @ directions.transpose(1, 2)
    inverse = (directions / metric) @ directions.transpose(1, 2)
    variance, components = torch.linalg.eigh(root @ covariance @ root)
    components = components[..., -size:].flip(-1)
    # A lane whose keys are all alike has no variance; its codes say nothing, and do no harm.
    step = variance[:, -size:].flip(-1).clamp(min=1e-12).sqrt() * (2 * _CLIP / LEVELS)
    decoder = (inverse @ components).transpose(1, 2) * step[..., None]
    encoder = (root @ components).transpose(1, 2) / step[..., None]
    parts = (mean[:, 0], decoder, encoder.clamp(-6e4, 6e4))
    return Basis(*(part.to(torch.float16) for part in parts))


def rounded(levels: Tensor) -> Tensor:
    """Codes of components: float32 whole numbers from 0 to LEVELS - 1."""
    return (levels.floor() + LEVELS // 2).clamp(0, LEVELS - 1)


def centres(codes: Tensor) -> Tensor:
    """What codes stand for, in units of a level."""
    return codes - (LEVELS - 1) / 2


def pack(codes: Tensor, digits: int) -> Tensor:
    """Codes [..., cells, components] as the numbers of entries [..., 2 * head_dim] float32, key and value in
    one; each is a whole number that the KV dtype holds exactly."""
    parts = codes.unflatten(-2, (digits, _CELLS)).flatten(-2)  # [..., digits, 2 * head_dim]
    powers = LEVELS ** torch.arange(digits, dtype=codes.dtype)
    return (parts * powers[:, None]).sum(dim=-2) - LEVELS**digits // 2


def unpack(numbers: Tensor, digits: int) -> Tensor:
    """The codes [..., cells, components] float32 of entries [..., 2 * head_dim]."""
    whole = numbers.float().round().to(torch.int32) + LEVELS**digits // 2
    shifts = 4 * torch.arange(digits, dtype=torch.int32, device=numbers.device)
    parts = (whole[..., None, :] >> shifts[:, None]) & (LEVELS - 1)
    return parts.unflatten(-1, (_CELLS, -1)).flatten(-3, -2).float()
