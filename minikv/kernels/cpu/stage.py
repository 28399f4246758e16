"""Staging by the compiled decoder: called back before the attention of each layer (`Batch::stage`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minikv.kernels.cpu.library import BEFORE_LAYER, BatchStruct

if TYPE_CHECKING:
    from minikv.cache.stage import Stage


class CompiledStaging:
    """A batch's `stages`, set up in its structure for one pass. What is raised meanwhile is raised again by
    `finish`."""

    def __init__(self, stages: Sequence[Stage], batch: BatchStruct) -> None:
        self._stages = stages
        self._error: BaseException | None = None
        self._call = BEFORE_LAYER(self._fill)
        batch.stage = ctypes.cast(self._call, ctypes.c_void_p)

    def _fill(self, layer: int) -> None:
        if self._error is not None:
            return
        try:
            for stage in self._stages:
                stage.fill(layer)
        except BaseException as error:  # must not pass through the library
            self._error = error

    def finish(self) -> None:
        """End the pass."""
        if self._error is not None:
            raise self._error
