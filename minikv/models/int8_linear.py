"""Linear layers with 8-bit weights from plain torch, for machines without the compiled kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minikv.models.basis import FourierBasis

_WEIGHT_LEVELS = 127
# Steps on either side of zero that activations may take, the best first. Where the processor adds
# two products of 8 bits in 16 bits, only half of the range cannot overflow.
_ACTIVATION_LEVELS = (127, 63)
# Weights are rounded so many rows at a time: temporaries stay small beside a large head.
_ROUND_ROWS = 4096


class Int8Linear:
    """y = x W^T + b in a Fourier basis, weights rounded to 8 bits per output, activations per row.

    torch's operator takes one range for all the activations of a call, so a row's result would
    depend on the rows beside it. Here every row is divided by its own largest magnitude, and the two
    columns that are always zero hold the ends of the range; their weights are zero. The sums are
    whole numbers, so a row gets the same bits in any company.

    weight: [out_features, size] float32, not kept. bias: [out_features] float32 or None. levels: what
    `activation_levels` found for this machine. columns: writes rows of the weight in the basis, as
    [rows, size + 2].
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, levels: int, columns: Callable[[Tensor], Tensor]
    ) -> None:
        outputs, width = weight.shape[0], weight.shape[1] + 2
        codes = torch.empty((outputs, width), dtype=torch.int8)
        scales = torch.empty(outputs)
        for start in range(0, outputs, _ROUND_ROWS):
            rows = slice(start, start + _ROUND_ROWS)
            codes[rows], scales[rows] = _rounded(columns(weight[rows]))
        self.bias = bias
        self._packed = _pack(codes, scales)
        self._levels = levels
        # The operator's steps number one more than twice the levels: this end makes 1 a whole step.
        end = (levels + 0.5) / levels
        self._ends = torch.zeros(1, width)
        self._ends[0, 1], self._ends[0, -1] = end, -end
        self.nbytes = codes.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, size + 2] float32 to [rows, out_features] float32."""
        peak = x.abs().amax(-1, keepdim=True)
        # A row of zeros, or with a number that is not finite, must not spoil the common range;
        # the product with its peak gives such a row back what it had.
        scaled = torch.addcdiv(self._ends, x, peak).nan_to_num_()
        y = _product(scaled, self._packed, self._levels)
        return y.mul_(peak) if self.bias is None else torch.addcmul(self.bias, y, peak)


def activation_levels() -> int | None:
    """The finest rounding of activations whose products are exact on this machine, found by trying
    the largest sums there are; None if torch has no such operator here."""
    x = torch.ones(2, 256)
    x[1] = -1
    try:
        # torch announces that it may drop these operators; without them weights are float32.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FourierBasis().inputs(x)
            packed = _pack(torch.full((32, 256), _WEIGHT_LEVELS, dtype=torch.int8), torch.ones(32))
            for levels in _ACTIVATION_LEVELS:
                sums = _product(x, packed, levels)[0]
                if (sums - 256 * _WEIGHT_LEVELS).abs().max() < 0.02 * 256 * _WEIGHT_LEVELS:
                    return levels
    except (AttributeError, RuntimeError):
        return None
    return None


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [rows, width] of -127 to 127, and the scale [rows] of each output."""
    scales = weight.abs().amax(-1) / _WEIGHT_LEVELS
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (weight / scales.unsqueeze(-1)).round_(), scales


def _pack(codes: Tensor, scales: Tensor) -> Any:
    zero_points = torch.zeros(len(scales), dtype=torch.int64)
    # Not through torch.ops: its warning would go straight to stderr, where nothing can silence it.
    make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
    quantised = make(codes, scales, zero_points, 0)
    return torch.ops.quantized.linear_prepack(quantised, None)


def _product(x: Tensor, packed: Any, levels: int) -> Tensor:
    """x W^T, with x rounded to steps of the range that x as a whole has."""
    return torch.ops.quantized.linear_dynamic(x, packed, levels < _WEIGHT_LEVELS)
