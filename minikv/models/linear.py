"""Linear layers: the decoder calls them and does not know how the weight is stored."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows the packing is tuned for. From 8 up, oneDNN picks one blocked layout that serves every
# number of rows and gives each row the same bits whatever stands beside it.
_PACK_ROWS = 64


class Linear(Protocol):
    """y = x W^T + b for x [rows, in_features], W [out_features, in_features]."""

    nbytes: int  # of weight and bias
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """float32 weight packed once into oneDNN's blocked layout (the plain copy is dropped).

    Packed products run near memory speed from one row to sixteen, where the unpacked operator
    takes two to four times as long.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.packed = _pack(weight)
        self.weight = weight if self.packed is None else None
        self._pad_one_row = self.packed is not None and self._one_row_differs(weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] == 1 and self._pad_one_row:
            return self._product(x.expand(2, -1).contiguous())[:1]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _one_row_differs(self, inputs: int) -> bool:
        """Whether a row alone is summed in another order than a row among others, which it is for
        some shapes: then it is computed as two, to keep a sequence independent of its batch."""
        probe = torch.linspace(-1.0, 1.0, inputs).cos().expand(2, -1).contiguous()
        return not torch.equal(self._product(probe[:1]), self._product(probe)[:1])


class DeviceLinear:
    """A weight on a device in a type of its own, to which the rows are rounded and which y has too."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype):
        self.weight = weight.to(device, dtype)
        self.bias = None if bias is None else bias.to(device, dtype)
        self.nbytes = self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def of_outputs(self, x: Tensor, outputs: Tensor) -> Tensor:
        """Some columns of y [rows, n]: outputs [n] int64, on any device."""
        outputs = outputs.to(self.weight.device)
        bias = None if self.bias is None else self.bias[outputs]
        return F.linear(x.to(self.weight.dtype), self.weight[outputs], bias)


def _pack(weight: Tensor) -> Tensor | None:
    if not torch.backends.mkldnn.is_available() or weight.device.type != "cpu":
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
