"""Finding and loading the compiled library, and its structures as ctypes sees them."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

# Must be equal to `mkv_version` in api.cpp.
VERSION = 11


class MatrixStruct(Structure):
    """`Matrix` in common.h."""

    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("groups", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class LayerStruct(Structure):
    """`Layer` in common.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
    )


class ModelStruct(Structure):
    """`Model` in common.h."""

    _fields_ = (
        ("hidden", c_int32),
        ("inner", c_int32),
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_layers", c_int32),
        ("eps", c_float),
        ("layers", POINTER(LayerStruct)),
    )


class PoolStruct(Structure):
    """`Pool` in common.h."""

    _fields_ = (
        ("kind", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("masses", c_void_p),
        ("positions", c_void_p),
    )


class BatchStruct(Structure):
    """`Batch` in common.h."""

    _fields_ = (
        ("rows", c_int32),
        ("sequences", c_int32),
        ("max_pages", c_int32),
        ("captures", c_int32),
        ("row_starts", c_void_p),
        ("lane_pages", c_void_p),
        ("past_lengths", c_void_p),
        ("has_mass", c_void_p),
        ("positions", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("angle_rows", c_void_p),
        ("capture_of", c_void_p),
        ("captured", c_void_p),
        ("captured_norms", c_void_p),
        ("fetch", c_void_p),
        ("stage", c_void_p),
        ("num_zooms", c_int32),
        ("zooms", c_void_p),
    )


BEFORE_LAYER = CFUNCTYPE(None, c_int)
"""`Batch::fetch` and `Batch::stage` in common.h."""


class ZoomStruct(Structure):
    """`Zoom` in common.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "sequence",
                "off",
                "spans",
                "rows",
                "basis_entries",
                "digits",
                "most",
                "moves",
                "beside",
                "groups",
                "parts",
            )
        ),
        ("hold", c_float),
        ("least", c_float),
        *(
            (name, c_void_p)
            for name in (
                "starts",
                "sizes",
                "slots",
                "area",
                "basis",
                "owners",
                "cells",
                "scale",
                "bias",
                "sources",
                "at_hand",
                "entered",
                "entered_rows",
            )
        ),
    )


class SlotsStruct(Structure):
    """`Slots` in common.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "kv_heads",
                "group",
                "head_dim",
                "entries",
                "slots",
                "rows",
                "own",
                "lanes",
                "queries",
                "angles",
                "angle_stride",
            )
        ),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("back", c_float),
        *(
            (name, c_void_p)
            for name in (
                "keys",
                "values",
                "counts",
                "log_mass",
                "positions",
                "cos",
                "sin",
                "attention",
                "weights",
                "own_weights",
                "pools",
                "query_rows",
                "normalisers",
                "origins",
                "roots",
                "outputs",
                "out_squares",
                "drop",
                "value_weights",
                "products",
                "squares",
            )
        ),
    )


class LooksStruct(Structure):
    """`Looks` in common.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("kv_heads", "group", "head_dim", "entries", "queries", "rows", "late", "hiding")
        ),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        *(
            (name, c_void_p)
            for name in (
                "keys",
                "values",
                "bias",
                "positions",
                "query_rows",
                "at",
                "pools",
                "wanted",
                "attention",
                "outputs",
                "normalisers",
                "sums",
                "means",
            )
        ),
    )


_SIGNATURES = {
    "mkv_version": (c_int, ()),
    "mkv_isa": (c_char_p, (c_int,)),
    "mkv_create": (c_void_p, (c_int, c_char_p)),
    "mkv_destroy": (None, (c_void_p,)),
    "mkv_layers": (
        c_int,
        (
            c_void_p,
            POINTER(ModelStruct),
            POINTER(PoolStruct),
            POINTER(BatchStruct),
            c_void_p,
            c_int,
            c_int,
        ),
    ),
    "mkv_write": (
        c_int,
        (c_void_p, POINTER(ModelStruct), POINTER(PoolStruct), POINTER(BatchStruct), c_void_p, c_int),
    ),
    "mkv_attend": (
        c_int,
        (
            c_void_p,
            POINTER(ModelStruct),
            POINTER(PoolStruct),
            POINTER(BatchStruct),
            c_void_p,
            c_void_p,
            c_void_p,
            c_int,
        ),
    ),
    "mkv_zoom": (
        c_int,
        (c_void_p, POINTER(ModelStruct), POINTER(PoolStruct), POINTER(BatchStruct), c_void_p, c_int),
    ),
    "mkv_pack": (None, (c_int, c_void_p, c_int, c_int, c_void_p, c_void_p)),
    "mkv_logits": (
        c_int,
        (c_void_p, POINTER(MatrixStruct), c_void_p, c_void_p, c_int, c_void_p, c_float, c_void_p, c_void_p),
    ),
    "mkv_slots": (c_int, (c_void_p, POINTER(SlotsStruct))),
    "mkv_look": (c_int, (c_void_p, POINTER(LooksStruct))),
    "mkv_linear": (c_int, (c_void_p, POINTER(MatrixStruct), c_void_p, c_int, c_void_p)),
}


class LibraryMissing(Exception):
    """The compiled library is not there or is of another version; the message says which."""


def load_library() -> ctypes.CDLL:
    """The library with its signatures set. Raises LibraryMissing."""
    folder = Path(__file__).parent
    # Only this Python's own build: another's may lie beside it and be out of date.
    files = [f for suffix in EXTENSION_SUFFIXES if (f := folder / f"_kernels{suffix}").exists()]
    if not files:
        raise LibraryMissing("the compiled kernels were not built (no C++ compiler at install time?)")
    try:
        library = ctypes.CDLL(str(files[0]))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"the compiled kernels cannot be loaded ({error})") from error
    if library.mkv_version() != VERSION:
        raise LibraryMissing("the compiled kernels are of another version; install the package again")
    return library


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Names of those this processor supports, best first; the last is always `generic`."""
    names = []
    while (name := library.mkv_isa(len(names))) is not None:
        names.append(name.decode())
    return names
