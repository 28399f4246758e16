"""Zooming in by the compiled kernels: what they read and write of `minikv.cache.spans.zoom`.

Zoom --CompiledZoom--> a structure, made once
choice and copies, by all threads (route.h) --> owners, entered rows
rows that are not in memory --fetch--> Zoom.put, by one thread
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minikv.cache.tiers.reach import Reach
from minikv.kernels.cpu.library import BEFORE_LAYER, BatchStruct, ZoomStruct

if TYPE_CHECKING:
    from minikv.cache.spans.zoom import Routing, Zoom

_GROUP = 8  # neighbouring entries whose codes are read together


class CompiledZoom:
    """What one sequence may zoom in, as the library sees it, for as long as its lanes stay."""

    def __init__(self, zoom: Zoom) -> None:
        layers, heads, spans = zoom.size.shape
        rows = zoom.rows.shape[-1]
        self.entered = np.zeros((layers, heads), np.int32)
        self.entered_rows = torch.zeros(layers, heads, rows, dtype=torch.int32)
        self._reach = Reach(zoom.below, layers)
        self._held: list = []
        self._tensors = [t.contiguous() for t in (zoom.start, zoom.size, zoom.slot, zoom.rows, zoom.meaning)]
        self._tensors += [zoom.owner, torch.zeros(layers, heads, rows, dtype=torch.int32)]
        assert int(zoom.owner.max()) < 0, "rows were zoomed in by other means"
        router = [None, None]
        if zoom.router is not None:
            numbers = [t.float().contiguous() for t in (zoom.router.scale, zoom.router.bias)]
            self._tensors += numbers
            router = [t.data_ptr() for t in numbers]
        chosen = (zoom.zooming.rows, zoom.zooming.moves)
        counts = (spans, rows, zoom.meaning.shape[-1], zoom.digits, *chosen, zoom.beside)
        self.struct = ZoomStruct(
            0,
            0,
            *counts,
            _most_groups(zoom.slot, zoom.size),
            0,
            zoom.zooming.hold,
            zoom.zooming.least,
            *(t.data_ptr() for t in self._tensors[:7]),
            *router,
            None,
            None,
            self.entered.ctypes.data,
            self.entered_rows.data_ptr(),
        )

    def begin(self, sequence: int, lost: bool) -> bool:
        """Look where rows lie before a pass in which it is at that place; whether all are in memory. lost: no
        more can be had."""
        struct, reach = self.struct, self._reach
        self._held = reach.refresh()
        self.entered[:] = 0
        struct.sequence, struct.off, struct.parts = sequence, lost, reach.sources.shape[1]
        struct.sources, struct.at_hand = reach.sources.ctypes.data, reach.at_hand.ctypes.data
        return bool(reach.at_hand.all())

    def fetch(self, zoom: Zoom, layer: int) -> bool:
        """Get the rows that entered in a layer, if that is still to be done; False if that cannot be."""
        counts = self.entered[layer]
        if self._reach.at_hand[layer] or not counts.any():
            return True
        heads = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        rows = torch.cat(
            [rows[:count] for rows, count in zip(self.entered_rows[layer], counts.tolist(), strict=True)]
        )
        return zoom.put(layer, heads, rows.long())

    def end(self, zoom: Zoom) -> None:
        """Count what entered, and let go of what was held."""
        self._held = []
        zoom.count(int(self.entered.sum()), int(self.entered.any(axis=1).sum()))


def _most_groups(slots: Tensor, sizes: Tensor) -> int:
    """Most groups of neighbouring entries that spans of a lane lie in, as they come."""
    group = torch.where(sizes > 0, slots // _GROUP, -1)
    new = torch.ones_like(group, dtype=torch.bool)
    new[..., 1:] = group[..., 1:] != group[..., :-1]
    return max(1, int((new & (group >= 0)).sum(dim=-1).max()))


class CompiledRouting:
    """A batch's `route`, set up in its structure for one pass. What is raised meanwhile is raised again by
    `finish`."""

    def __init__(self, routing: Routing, batch: BatchStruct) -> None:
        self._zooms: list[tuple[Zoom, CompiledZoom]] = []
        all_there = True
        for index, zoom in routing.zooms:
            compiled: CompiledZoom = zoom.compiled or CompiledZoom(zoom)
            zoom.compiled = compiled
            all_there &= compiled.begin(index, zoom.below.lost)
            self._zooms.append((zoom, compiled))
        self._structs = (ZoomStruct * len(self._zooms))(*(compiled.struct for _, compiled in self._zooms))
        self._error: BaseException | None = None
        self._call = BEFORE_LAYER(self._fetch)
        batch.num_zooms = len(self._zooms)
        batch.zooms = ctypes.addressof(self._structs)
        batch.fetch = None if all_there else ctypes.cast(self._call, ctypes.c_void_p)

    def fetch(self, layer: int) -> None:
        """Get the rows that entered in a layer and are not in memory."""
        for struct, (zoom, compiled) in zip(self._structs, self._zooms, strict=True):
            if not struct.off and not compiled.fetch(zoom, layer):
                struct.off = 1

    def _fetch(self, layer: int) -> None:
        if self._error is not None:
            return
        try:
            self.fetch(layer)
        except BaseException as error:  # must not pass through the library
            self._error = error

    def finish(self) -> None:
        """End the pass."""
        for zoom, compiled in self._zooms:
            compiled.end(zoom)
        if self._error is not None:
            raise self._error
