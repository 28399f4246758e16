"""Whether the Triton backend can serve here, found out without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from minikv.kernels.triton.shapes import LARGEST_HEAD_DIM, PAGE_SIZES


def interpreted() -> bool:
    """Whether the kernels are to be interpreted on the CPU, which triton decides by its own variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_unusable(device: str, head_dim: int, page_size: int | None) -> str | None:
    """Why the Triton kernels cannot serve a model on a device (`auto`, `cpu` or `cuda`), as a clause; None if
    they can."""
    if not installed("triton"):
        return "triton is not installed (pip install 'minikv[triton]')"
    if interpreted() and device == "cuda":
        return "TRITON_INTERPRET is set, which runs its kernels on the CPU; unset it for device cuda"
    if not interpreted() and (device == "cpu" or not torch.cuda.is_available()):
        missing = "" if device == "cpu" else "torch finds no CUDA device, and "
        return f"{missing}on the CPU its kernels only run interpreted, slowly, with TRITON_INTERPRET=1"
    if head_dim % 16 or head_dim > LARGEST_HEAD_DIM:
        return f"its head_dim is a multiple of 16 up to {LARGEST_HEAD_DIM}, not {head_dim}"
    if page_size not in (None, *PAGE_SIZES):
        listed = " or ".join(map(str, PAGE_SIZES))
        return f"its pages have {listed} entries, not {page_size}"
    return None


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
