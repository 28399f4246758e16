"""How the decoder writes vectors down: as they are, or as their Fourier transforms.

A few of a decoder's activations are many times as large as the others, which rounding to 8 bits
does not bear: the others would be left with few steps. Every number of a transform depends on all
of a vector alike, so none stands out, and products with transformed weights are what they were.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class Basis(Protocol):
    """Rows [n, size] float32 of two kinds, written as [n, width]."""

    def hidden(self, x: Tensor) -> Tensor:
        """Rows of the residual stream, of the same lengths as before; weights that read the stream
        are written the same way."""
        ...

    def plain(self, x: Tensor) -> Tensor:
        """What `hidden` was made of."""
        ...

    def inputs(self, x: Tensor) -> Tensor:
        """Rows that one matrix reads, with as little work as can be."""
        ...

    def against_inputs(self, x: Tensor) -> Tensor:
        """Weights [out, size] whose products with `inputs` are those with the rows as they were."""
        ...


class PlainBasis:
    """Everything as it is."""

    def hidden(self, x: Tensor) -> Tensor:
        """See `Basis`."""
        return x

    plain = inputs = against_inputs = hidden


class FourierBasis:
    """Real and imaginary parts of each frequency in turn: even sizes become two numbers wider. The
    imaginary parts of the first and the last frequency, columns 1 and -1, are always zero."""

    def hidden(self, x: Tensor) -> Tensor:
        """See `Basis`."""
        mixed = self.inputs(x)
        # All frequencies but the first and the last stand for themselves and their mirror image.
        mixed[:, 2:-2] *= math.sqrt(2)
        return mixed

    def plain(self, x: Tensor) -> Tensor:
        """See `Basis`."""
        mixed = x.clone()
        mixed[:, 2:-2] /= math.sqrt(2)
        pairs = torch.view_as_complex(mixed.view(len(mixed), -1, 2))
        return torch.fft.irfft(pairs, norm="ortho")

    def inputs(self, x: Tensor) -> Tensor:
        """See `Basis`."""
        return torch.view_as_real(torch.fft.rfft(x, norm="ortho")).view(len(x), -1)

    def against_inputs(self, x: Tensor) -> Tensor:
        """See `Basis`."""
        mixed = self.inputs(x)
        mixed[:, 2:-2] *= 2
        return mixed
