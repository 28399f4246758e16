"""Triton as the kernels name it; Any to a type checker, which has to pass where triton is not installed."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    constexpr: TypeAlias = Any
    jit: Any
    tl: Any
else:
    import triton.language as tl
    from triton import jit

    constexpr = tl.constexpr

__all__ = ["constexpr", "jit", "tl"]
