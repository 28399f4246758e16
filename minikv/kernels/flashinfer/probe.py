"""Whether the FlashInfer backend can serve here."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from minikv.kernels.flashinfer import library
from minikv.kernels.triton import probe as triton
from minikv.kernels.triton.probe import installed

HEAD_DIMS = (64, 128, 256)
LEAST_CAPABILITY = (8, 0)
RELEASE = "0.7"
"""The one whose interface the calls are written for."""


def load(device: str, head_dim: int, page_size: int | None, kv_dtype: str) -> Any | str:
    """The module, or why it cannot serve a model on a device (`auto`, `cpu` or `cuda`) with entries in
    `kv_dtype` (a name or `auto`), as a clause."""
    problem = _why_unusable(device, head_dim, page_size, kv_dtype)
    if problem is not None:
        return problem
    try:
        return library.load()
    except Exception as error:
        # It looks for a compiler and for other packages on the way.
        return f"flashinfer cannot be imported ({(str(error).splitlines() or ['no message'])[0]})"


def _why_unusable(device: str, head_dim: int, page_size: int | None, kv_dtype: str) -> str | None:
    if not installed("flashinfer") or (release := _release()) is None:
        return "flashinfer is not installed (pip install 'minikv[flashinfer]')"
    problem = triton.why_unusable(device, head_dim, page_size)
    if problem is not None:
        return f"lanes with log masses need Triton's kernels, and {problem}"
    if triton.interpreted() or device == "cpu":
        return "FlashInfer has no kernels for the CPU"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer's head_dim is {_listed(HEAD_DIMS)}, not {head_dim}"
    if kv_dtype not in ("auto", "float16", "bfloat16"):
        return f"FlashInfer reads a KV cache in float16 or bfloat16, not {kv_dtype}"
    return _why_not_here(release)


def _release() -> str | None:
    """Which one is installed; None if what has the package's name is not it, but a folder, say."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


def _why_not_here(release: str) -> str | None:
    """Why the package, the device or the machine will not do, or None."""
    if release.split(".")[:2] != RELEASE.split("."):
        return f"the calls are written for flashinfer {RELEASE}, and {release} is installed"
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return "FlashInfer's kernels want a device of compute capability 8.0 or more"
    if not (_has_compiler() or installed("flashinfer_jit_cache")):
        return (
            "FlashInfer compiles its kernels, and there is no nvcc (install CUDA's, or flashinfer-jit-cache)"
        )
    return None


def _has_compiler() -> bool:
    """Whether nvcc is where flashinfer looks for it."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named, "bin", "nvcc").exists()
    return shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").exists()


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
