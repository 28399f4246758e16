"""A graph on the CPU: it records what is to be run, and runs it again on what is in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class RecordedGraph:
    """See `Graph`. As on a device nothing has been computed when it was captured, and all that there is to be
    had is in the same memory after each replay."""

    inside: Callable[[], AbstractContextManager] = nullcontext  # what is forbidden while it is captured

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        self.run = run
        with type(self).inside():
            self.output = run()
        self.output.fill_(torch.nan)
        return self.output

    def replay(self) -> None:
        self.num_replays += 1
        with type(self).inside():
            self.output.copy_(self.run())


class RefusingGraph:
    """A graph that a device cannot capture."""

    def __init__(self) -> None:
        pass

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        run()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")

    def replay(self) -> None:
        raise AssertionError("nothing was captured")
