"""What was recorded of a block of prompt tokens, beside their keys and values: queries, norms, surprisal.

A policy judges by the whole prompt. Where a block's keys and values are put back instead of computed, a
recorder gets from here what it would have got.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from minikv.cache.evidence import Recorder, stride_of
from minikv.cache.policies.base import Evidence
from minikv.cache.surprisal import ESTIMATE
from minikv.cache.tiers.forms import Reader, pack

_COUNTS = 2


@dataclass(frozen=True)
class Traces:
    """What decides which rows of a block a recorder wants long before its content ends, and what it takes of
    them. Queries are captured of all heads, so that those which a policy reads do not matter.

    window: last rows of the block, 0 if only the content's last count. stride: of the rows that statistics
    are taken from, 0 for none. future: as in `Evidence`. surprisal: of the block's tokens. norms: of the
    window.
    """

    window: int
    stride: int
    future: int
    surprisal: bool
    norms: bool

    @classmethod
    def of(cls, evidence: Evidence, content: range, rolling: bool) -> Traces | None:
        """Those of a recorder; None if it takes nothing before the content's last rows."""
        window = evidence.window if rolling else 0
        stride = stride_of(content) if evidence.query_statistics else 0
        norms = evidence.residual_norms and window > 0
        traces = cls(window, stride, evidence.future, evidence.surprisal, norms)
        return traces if window or stride or evidence.future or evidence.surprisal else None

    @property
    def name(self) -> str:
        """Equal for equal traces alone."""
        # Surprisal by another method would not fit to that of the rest of a prompt.
        return repr(astuple(self)) + (f" {ESTIMATE}" if self.surprisal else "")


@dataclass(frozen=True)
class Companion:
    """What was recorded of the block of tokens [start, end).

    positions: [R] int64, ascending, of queries [layers, R, query_heads, head_dim] float32, rotated, and norms
    [layers, R] float32. surprisal: float32 of the tokens [max(start, 1), end). None for what is not asked.
    """

    start: int
    end: int
    positions: Tensor
    queries: Tensor
    norms: Tensor | None
    surprisal: Tensor | None

    def to_bytes(self) -> bytes:
        """The body of a record."""
        rows = 0 if self.surprisal is None else len(self.surprisal)
        counts = torch.tensor([len(self.positions), rows])
        return pack(counts, self.positions, self.queries, self.norms, self.surprisal)

    @classmethod
    def from_bytes(
        cls, body: bytes, start: int, end: int, traces: Traces, shape: tuple[int, int, int]
    ) -> Companion:
        """What `to_bytes` gave; ValueError if it is not of this block. shape: layers, query heads, width."""
        layers, heads, width = shape
        reader = Reader(body)
        rows, known = reader.take(torch.int64, _COUNTS).tolist()
        per_row = 8 + 4 * layers * heads * width + 4 * layers * traces.norms
        expected = end - max(start, 1) if traces.surprisal else 0
        if known != expected or len(body) != 8 * _COUNTS + rows * per_row + 4 * known:
            raise ValueError("what was recorded is not of this block")
        positions = reader.take(torch.int64, rows)
        queries = reader.take(torch.float32, layers, rows, heads, width)
        norms = reader.take(torch.float32, layers, rows) if traces.norms else None
        surprisal = reader.take(torch.float32, known) if traces.surprisal else None
        return cls(start, end, positions, queries, norms, surprisal)

    def replay(self, recorder: Recorder, until: int, num_prompt: int) -> None:
        """Give a recorder that has seen all before `start` what it would have got of the tokens
        [start, until) of a prompt. Those of the block that are left are still to be computed."""
        wanted = recorder.wanted_rows(self.start, self.end - self.start)
        here = self.positions < until
        rows = here.nonzero().squeeze(1)
        expected = torch.empty(0) if wanted is None else wanted + self.start
        assert torch.equal(expected[expected < until].long(), self.positions[rows]), (
            "other rows were captured than a recorder wants"
        )
        if len(rows):
            positions = self.positions[rows]
            # As the rows were rotated: for the length of the whole prompt, see `Rope.cos_sin`.
            lengths = (positions + 1).clamp(min=num_prompt)
            norms = None if self.norms is None else self.norms[:, rows]
            recorder.add(positions, self.queries[:, rows], lengths, norms)
        if self.surprisal is not None:
            first = max(self.start, 1)
            recorder.add_surprisal(first, self.surprisal[: until + 1 - first])


class Tape:
    """Collects what a recorder gets, chunk by chunk, until a block is whole."""

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._surprisal: list[tuple[int, Tensor]] = []

    def add(self, positions: Tensor, queries: Tensor, norms: Tensor) -> None:
        """As `Recorder.add`."""
        self._rows.append((positions, queries, norms))

    def add_surprisal(self, first_position: int, values: Tensor) -> None:
        """As `Recorder.add_surprisal`."""
        self._surprisal.append((first_position, values))

    def cut(self, start: int, end: int, wanted: Tensor, traces: Traces) -> Companion | None:
        """What is to be kept of the block [start, end), of the `wanted` [R] int64 positions; None if not all
        of it is here. Nothing before `end` is left."""
        positions, queries, norms = self._joined(wanted)
        surprisal = self._surprisal_of(max(start, 1), end) if traces.surprisal else None
        self._rows = [part for part in self._rows if len(part[0]) and int(part[0][-1]) >= end]
        self._surprisal = [part for part in self._surprisal if part[0] + len(part[1]) > end]
        if not torch.equal(positions, wanted) or (traces.surprisal and surprisal is None):
            return None
        return Companion(start, end, positions, queries, norms if traces.norms else None, surprisal)

    def _joined(self, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self._rows:
            return torch.empty(0).long(), torch.empty(0), torch.empty(0)
        parts = []
        for positions, queries, norms in self._rows:
            here = torch.isin(positions, wanted)
            parts.append((positions[here], queries[:, here], norms[:, here]))
        positions, queries, norms = zip(*parts, strict=True)
        return torch.cat(positions), torch.cat(queries, dim=1), torch.cat(norms, dim=1)

    def _surprisal_of(self, first: int, end: int) -> Tensor | None:
        if not self._surprisal:
            return None
        start, values = self._surprisal[0][0], torch.cat([part for _, part in self._surprisal])
        found = values[max(0, first - start) : end - start]
        return found if start <= first and len(found) == end - first else None
