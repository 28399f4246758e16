"""Room beside the lanes of a sequence: pages of the same pool, whose rows the lanes see as well.

    LaneStore.ask_area --> reserve: pool.allocate --> Area, all rows masked
    Area               --> release_area (also when lanes are rewritten or closed) --> pool.free

Rows of an area lie in no order. One that is not in use has the log mass -inf, which attention adds to its
score, so that it has no weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(eq=False)
class Area:
    """pages: [layers, kv_heads, n] int32, as many in every lane. state: of whoever uses it; undo: what makes
    the lanes again what they were before it was used."""

    pages: np.ndarray
    state: Any = None
    undo: Callable[[], None] | None = None

    @property
    def per_lane(self) -> int:
        """Pages of each lane."""
        return self.pages.shape[-1]

    def reset(self) -> None:
        """Mask all rows and make the lanes what they were."""
        if self.undo is not None:
            self.undo()
        self.state = self.undo = None
