"""A device that is not there: its tensors are on the CPU but refuse to meet others.

As on a real one, operators take tensors of one device only, apart from copies, numbers and indices; the host
cannot look inside. So tests without a GPU find a tensor that was left behind.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from minikv.kernels.torch_cpu import TorchBackend

# One that torch does not try to start.
DEVICE = torch.device("lazy", 0)
_INDICES_MAY_DIFFER = ("aten::index", "aten::index_put_", "aten::index_put")
_LOOKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")
_crossing: list[list[str]] = [[]]  # what has crossed so far; the last one is of the innermost `watched`
_COPIES = ("aten::copy_", "aten::_to_copy")


class Distant(torch.Tensor):
    """A tensor on the device. `near` is what it really is."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=DEVICE
        )
        self.near = near
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


def near(value):
    """What a kernel is to be given in the place of a tensor of the device; fails for one of the host."""
    if isinstance(value, torch.Tensor):
        assert isinstance(value, Distant), "a kernel got a tensor of the host"
        return value.near
    return value


def _is_distant(device) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _meets(func, args, kwargs, distant) -> bool:
    """Whether the host and the device meet in a call, for which the host has to wait."""
    to, name = kwargs.get("device"), func._schema.name
    crosses = to is not None and _is_distant(to) != bool(distant) and name == "aten::_to_copy"
    if name == "aten::copy_":
        crosses = isinstance(args[0], Distant) != isinstance(args[1], Distant)
    if name in _INDICES_MAY_DIFFER:
        indices = [t for t in tree_flatten(args[1:])[0] if isinstance(t, torch.Tensor)]
        crosses = bool(distant) and any(not isinstance(t, Distant) and t.dim() for t in indices)
        masks = [t for t in tree_flatten(args[1])[0] if isinstance(t, torch.Tensor) and t.dtype == torch.bool]
        crosses |= bool(distant and masks)  # only the device knows how many there are
    return crosses or bool(name in _LOOKS and distant)


def _call(func, args, kwargs):
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    distant = [t for t in tensors if isinstance(t, Distant)]
    name = func._schema.name
    others = [t for t in tensors if not isinstance(t, Distant) and t.dim()]
    if distant and others and name not in _COPIES:
        indices_only = name in _INDICES_MAY_DIFFER and isinstance(args[0], Distant)
        if not (indices_only and all(not t.is_floating_point() for t in others)):
            raise RuntimeError(f"{name}: tensors of the host and of the device")
    if _meets(func, args, kwargs, distant):
        _crossing[-1].append(name)
    to = kwargs.get("device")
    stays = bool(distant) if to is None else _is_distant(to)
    if name == "aten::copy_":
        stays = isinstance(args[0], Distant)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map(lambda x: x.near if isinstance(x, Distant) else x, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if func._schema.is_mutable and func._schema.name.endswith("_"):
        return args[0]
    if name == "aten::_to_copy" and not stays:
        result = result.clone()
    wrap = lambda x: Distant(x) if stays and isinstance(x, torch.Tensor) else x  # noqa: E731
    return tree_map(wrap, result)


class _Kernel:
    """A Triton kernel that is launched on what the device's tensors really are."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*map(near, args), **kwargs)


@contextmanager
def watched():
    """A list of the calls in which the host and the device meet from here on."""
    _crossing.append([])
    try:
        yield _crossing[-1]
    finally:
        _crossing.pop()


class _Nothing(list):
    def append(self, name):
        raise RuntimeError(f"{name}: the host and the device meet")


@contextmanager
def nothing_crosses():
    """Nothing may go from the host to the device or back, and nobody may look inside: what a graph needs."""
    _crossing.append(_Nothing())
    try:
        yield
    finally:
        _crossing.pop()


@contextmanager
def pretended_device(monkeypatch, kernels: dict[object, tuple[str, ...]]):
    """Tensors can be made on DEVICE, and the `kernels` of modules take those alone."""
    with monkeypatch.context() as patch, torch.no_grad(), _Mode():
        # Tensors of inference mode cannot be wrapped.
        for name in ("__enter__", "__exit__"):
            patch.setattr(torch.inference_mode, name, lambda *_: None)
        for module, names in kernels.items():
            for name in names:
                patch.setattr(module, name, _Kernel(getattr(module, name)))
        yield


class NearBackend(TorchBackend):
    """Plain torch on what the device's tensors really are, in the place of kernels."""

    page_size = 16
    device = DEVICE

    def plan(self, batch):
        """The plan is a batch that has all that is read of the device."""
        pool = copy(batch.pool)
        for name in ("keys", "values", "key_scales", "value_scales", "log_mass", "positions"):
            setattr(pool, name, near(getattr(pool, name)))
        pool.device = torch.device("cpu")
        batch.plan = replace(batch, pool=pool, cos=near(batch.cos), sin=near(batch.sin))
        super().plan(batch.plan)

    def rotate_and_write(self, qkv, batch, layer):
        """See `AttentionBackend.rotate_and_write`."""
        return tuple(map(Distant, super().rotate_and_write(near(qkv), batch.plan, layer)))

    def attend(self, q, k, v, batch, layer):
        """See `AttentionBackend.attend`."""
        return tuple(map(Distant, super().attend(*map(near, (q, k, v)), batch.plan, layer)))
