"""What is recorded of a prompt while it is computed, chunk by chunk, for policies to judge by.

The result does not depend on where chunks begin and end: the window is the last rows of a known range,
sums are taken over blocks of a fixed number of rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.policies.base import Evidence, QueryStatistics
from minikv.cache.spread import Spread

if TYPE_CHECKING:
    from minikv.models.config import ModelConfig
    from minikv.models.rope import Rope

# The first tokens draw attention whatever they are, and their queries are like no others.
_UNLIKE_OTHERS = 4
# Rows that statistics are taken from, evenly spaced over a longer content: more cost time and tell little.
_SAMPLES = 768
_BLOCK_ROWS = 256


@dataclass(frozen=True)
class Recorded:
    """What was recorded; None for what was not asked for or did not occur.

    queries: [layers, k, W, head_dim] float32, rotated, of the query heads query_heads [layers, k] int64
    (ascending) at query_positions [W] int64 (ascending).
    mean [layers, query_heads, head_dim], covariance [layers, query_heads, head_dim, head_dim] float32: of
    the unrotated queries.
    surprisal: [n] float32 by position, NaN where not known.
    residual_norms: [layers, W] float32, of the residual streams that `queries` were made from.
    future: [layers, query_heads, F, head_dim] float32, unrotated queries spread over the content.
    """

    queries: Tensor | None = None
    query_heads: Tensor | None = None
    query_positions: Tensor | None = None
    mean: Tensor | None = None
    covariance: Tensor | None = None
    surprisal: Tensor | None = None
    residual_norms: Tensor | None = None
    future: Tensor | None = None

    def statistics(self, layer: int) -> QueryStatistics | None:
        """Mean and covariance of one layer."""
        if self.mean is None or self.covariance is None:
            return None
        return QueryStatistics(self.mean[layer], self.covariance[layer])

    def serves(self, evidence: Evidence) -> bool:
        """Whether all that a policy asks for is there."""
        return not (
            (evidence.window and self.queries is None)
            or (evidence.query_statistics and self.mean is None)
            or (evidence.surprisal and self.surprisal is None)
            or (evidence.future and self.future is None)
            or (evidence.residual_norms and self.residual_norms is None)
        )


class Recorder:
    """Collects one sequence's evidence while its rows are computed.

    content: positions whose queries count; a chat template's tokens after the user's text do not.
    resumes: with a position, all from there on count as well: tokens the model itself produced.
    rolling: the window may be wanted before the content's end, after any chunk.
    """

    def __init__(
        self,
        evidence: Evidence,
        config: ModelConfig,
        rope: Rope,
        content: range,
        *,
        resumes: int | None = None,
        rolling: bool = False,
    ):
        self.evidence = evidence
        self.content = content
        self.resumes = resumes
        self._rolling = rolling
        self._rope = rope
        self._stride = stride_of(content)
        layers, heads = config.num_layers, config.num_query_heads
        chosen = torch.arange(heads).expand(layers, heads) if evidence.heads is None else evidence.heads
        self._heads = chosen.sort(dim=1).values
        self._all_heads = evidence.heads is None
        self._shape = (layers, heads, config.head_dim)
        self._latest: list[_Rows] = []  # the last that count
        self._spread = Spread(evidence.future) if evidence.future else None
        self._moments = _Moments(*self._shape) if evidence.query_statistics else None
        self._surprisal = torch.empty(0)
        self._end = 0  # position after the last row that counted

    @property
    def wants_surprisal(self) -> bool:
        """Whether `add_surprisal` is waited for."""
        return self.evidence.surprisal

    def keeps_traces(self, position: int) -> bool:
        """Whether something would be left of rows from `position` on if they were forgotten."""
        lasting = self.evidence.query_statistics or self.evidence.future > 0
        return lasting and self._end > position

    def wanted_rows(self, first_position: int, count: int) -> Tensor | None:
        """Rows [R] int64, ascending, of a chunk of `count` tokens whose queries are to be captured."""
        positions = torch.arange(first_position, first_position + count)
        counted = self._counted(positions)
        self._look_at(positions[counted])
        wanted = torch.zeros(count, dtype=torch.bool)
        if self.evidence.window:
            recent = counted.nonzero().squeeze(1)[-self.evidence.window :]
            wanted[recent] = True
            if not self._rolling:
                wanted[positions < self.content.stop - self.evidence.window] = False
        if self._moments is not None:
            wanted |= counted & self._sampled(positions)
        if self._spread is not None:
            wanted[self._spread_rows(positions)] = True
        rows = wanted.nonzero().squeeze(1)
        return rows if len(rows) else None

    def lasting_rows(self, first_position: int, count: int) -> Tensor:
        """Positions [R] int64, ascending, of the last `count` tokens recorded, whose queries another recorder
        wants that gets all of them as one chunk, long before its content ends."""
        positions = torch.arange(first_position, first_position + count)
        lasting = torch.zeros(count, dtype=torch.bool)
        if self._rolling and self.evidence.window:
            lasting[-self.evidence.window :] = True
        if self._moments is not None:
            lasting |= self._sampled(positions)
        if self._spread is not None:
            lasting |= (positions >= _UNLIKE_OTHERS) & (positions % self._spread.stride == 0)
        return positions[lasting & self._counted(positions)]

    def add(
        self,
        positions: Tensor,
        captured: Tensor,
        lengths: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> None:
        """Take rotated queries captured [layers, R, query_heads, head_dim] at positions [R] (ascending,
        after those of earlier calls). `lengths` [R] as the rows were rotated with, see `Rope.cos_sin`;
        `norms` [layers, R] of the residual streams."""
        counted = self._counted(positions)
        window = self.evidence.window
        rows = counted.nonzero().squeeze(1)
        self._look_at(positions[rows])
        recent = rows[-window:] if window else rows[:0]
        if not self._rolling:  # others were captured for other reasons
            recent = recent[positions[recent] >= self.content.stop - window]
        if len(recent):
            queries = self._of_wanted_heads(captured.index_select(1, recent))
            taken = None if norms is None or not self.evidence.residual_norms else norms[:, recent]
            self._latest.append(_Rows(positions[recent], queries, taken))
            if len(self._latest) > 4 * window:  # a decoding sequence brings one row at a time
                self._latest = [self._window()]
        if self._spread is not None:
            self._add_spread(positions, captured, lengths)
        if self._moments is not None:
            rows = rows[self._sampled(positions[rows])]
            self._moments.add(captured, rows, *self._inverse(positions[rows], lengths, rows))

    def _look_at(self, positions: Tensor) -> None:
        """Note positions [n], ascending, that count."""
        if len(positions):
            self._end = max(self._end, int(positions[-1]) + 1)

    def add_surprisal(self, first_position: int, values: Tensor) -> None:
        """Take -log p [n] of the tokens at first_position and after."""
        missing = first_position + len(values) - len(self._surprisal)
        if missing > 0:
            self._surprisal = torch.cat((self._surprisal, torch.full((missing,), torch.nan)))
        self._surprisal[first_position : first_position + len(values)] = values

    def forget(self, position: int) -> None:
        """Drop what was recorded of tokens from `position` on, which are taken back. They stay in the
        statistics: one reply among all the tokens of a conversation."""
        self._latest = [rows.before(position) for rows in self._latest if rows.positions[0] < position]
        if self._spread is not None:
            self._spread.forget(position)
        self._surprisal = self._surprisal[:position]

    def extended(self, content: range) -> Recorder:
        """An independent copy that goes on with a longer content range."""
        assert content.start == self.content.start and content.stop >= self.content.stop
        other = self.copy()
        other.content = content
        return other

    def continued(self, content: range, resumes: int | None, rolling: bool) -> Recorder:
        """An independent copy that goes on with the next turn; where its content is shorter than the
        window, rows recorded before fill it."""
        other = self.copy()
        other.content, other.resumes, other._rolling = content, resumes, rolling
        return other

    def copy(self) -> Recorder:
        """An independent copy."""
        other = copy.copy(self)
        other._latest = list(self._latest)
        other._surprisal = self._surprisal.clone()
        other._spread = None if self._spread is None else self._spread.copy()
        other._moments = None if self._moments is None else self._moments.copy()
        return other

    def state(self) -> dict[str, Tensor]:
        """All that was recorded, as tensors by name, of which `resume` makes an equal recorder."""
        numbers = [self._stride, 0 if self._spread is None else self._spread.stride]
        numbers += [0 if self._moments is None else self._moments.count, self._end]
        state = {"numbers": torch.tensor(numbers)}
        if self._latest:
            parts = [len(rows.positions) for rows in self._latest]
            rows = _Rows.joined(self._latest, sum(parts))
            state |= {"window.parts": torch.tensor(parts), "window.positions": rows.positions}
            state |= {"window.queries": rows.queries}
            state |= {} if rows.norms is None else {"window.norms": rows.norms}
        if self._spread is not None:
            state |= {f"spread.{name}": tensor for name, tensor in self._spread.state().items()}
        if self._moments is not None:
            state |= {f"moments.{name}": tensor for name, tensor in self._moments.state().items()}
        return state | ({"surprisal": self._surprisal} if self.evidence.surprisal else {})

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave of a recorder for the same model and evidence, if this one is new. The
        caller sees to names, types and shapes; ValueError where one does not fit the others."""
        self._stride, spread_stride, count, self._end = state["numbers"].tolist()
        if "window.parts" in state:
            self._latest = _Rows(
                state["window.positions"], state["window.queries"], state.get("window.norms")
            ).split(state["window.parts"].tolist())
        if self._spread is not None:
            self._spread.resume(spread_stride, state["spread.positions"], state.get("spread.rows"))
        if self._moments is not None:
            parts = (state[f"moments.{name}"] for name in ("sum", "outer", "waiting"))
            self._moments.resume(count, *parts)
        self._surprisal = state.get("surprisal", self._surprisal)
        if self._stride < 1 or self._end < 0:
            raise ValueError("a stride or an end is too small")

    def state_shapes(self, num_tokens: int) -> dict[str, tuple[torch.dtype, tuple[int | Most, ...]]]:
        """Type and largest shape of whatever `state` can hold after `num_tokens` tokens."""
        evidence, long = self.evidence, torch.int64
        layers, k = self._heads.shape
        _, heads, width = self._shape
        shapes: dict[str, tuple[torch.dtype, tuple[int | Most, ...]]] = {"numbers": (long, (4,))}
        if evidence.window:
            # At most four windows of parts are kept, each as long as a window.
            parts = Most(min(4 * evidence.window + 1, num_tokens))
            rows = Most(min((4 * evidence.window + 1) * evidence.window, num_tokens))
            shapes |= {"window.parts": (long, (parts,)), "window.positions": (long, (rows,))}
            shapes |= {"window.queries": (torch.float32, (layers, k, rows, width))}
            shapes |= {"window.norms": (torch.float32, (layers, rows))} if evidence.residual_norms else {}
        if evidence.future:
            rows = Most(min(4 * evidence.future, num_tokens))
            shapes |= {"spread.positions": (long, (rows,))}
            shapes |= {"spread.rows": (torch.float32, (layers, heads, rows, width))}
        if evidence.query_statistics:
            shapes |= {"moments.sum": (torch.float64, (layers, heads, width))}
            shapes |= {"moments.outer": (torch.float64, (layers, heads, width, width))}
            shapes |= {"moments.waiting": (torch.float32, (layers, heads, Most(_BLOCK_ROWS - 1), width))}
        if evidence.surprisal:
            shapes |= {"surprisal": (torch.float32, (Most(num_tokens + 1),))}
        return shapes

    def result(self) -> Recorded:
        """What has been recorded so far."""
        window = self._window() if self._latest else None
        mean, covariance = (None, None) if self._moments is None else self._moments.result()
        return Recorded(
            queries=None if window is None else window.queries,
            query_heads=None if window is None else self._heads,
            query_positions=None if window is None else window.positions,
            mean=mean,
            covariance=covariance,
            surprisal=self._surprisal if self.evidence.surprisal else None,
            residual_norms=None if window is None else window.norms,
            future=None if self._spread is None else self._spread.result(),
        )

    def _counted(self, positions: Tensor) -> Tensor:
        counted = (positions >= self.content.start) & (positions < self.content.stop)
        return counted if self.resumes is None else counted | (positions >= self.resumes)

    def _window(self) -> _Rows:
        """The last rows that count, as many as the window holds."""
        return _Rows.joined(self._latest, self.evidence.window)

    def _spread_rows(self, positions: Tensor) -> Tensor:
        """Rows [R] int64 of a chunk that are among those spread over the content."""
        assert self._spread is not None
        rows = (self._counted(positions) & (positions >= _UNLIKE_OTHERS)).nonzero().squeeze(1)
        return rows[self._spread.announce(positions[rows])]

    def _add_spread(self, positions: Tensor, captured: Tensor, lengths: Tensor | None) -> None:
        assert self._spread is not None
        # Of rows captured for another reason as well: the stride follows from all rows of the chunk, and was
        # settled when they were asked for.
        rows = self._spread_rows(positions)
        part = captured.index_select(1, rows).transpose(1, 2)
        plain = torch.empty(part.shape)
        _unrotate(part, *self._inverse(positions[rows], lengths, rows), plain)
        self._spread.add(positions[rows], plain)

    def _inverse(self, positions: Tensor, lengths: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [R, head_dim] that `_unrotate` takes for rows [R] at positions [R]."""
        cos, sin = self._rope.cos_sin(positions, None if lengths is None else lengths[rows])
        # They carry yarn's factor, once in the rotation and once in its inverse.
        square = self._rope.attention_factor**2
        return cos / square, sin / square

    def _sampled(self, positions: Tensor) -> Tensor:
        return (positions >= _UNLIKE_OTHERS) & (positions % self._stride == 0)

    def _of_wanted_heads(self, captured: Tensor) -> Tensor:
        """[layers, R, query_heads, head_dim] to [layers, k, R, head_dim]."""
        by_head = captured.transpose(1, 2)
        if self._all_heads:
            return by_head
        return by_head[torch.arange(len(by_head))[:, None], self._heads]


def stride_of(content: range) -> int:
    """By which the rows lie apart that statistics of a content are taken from."""
    return max(1, -(-len(content) // _SAMPLES))


@dataclass(frozen=True)
class Most:
    """A size in a shape that may be less."""

    size: int


@dataclass(frozen=True)
class _Rows:
    """positions [n] (ascending), queries [layers, k, n, head_dim], norms [layers, n] or None."""

    positions: Tensor
    queries: Tensor
    norms: Tensor | None

    @classmethod
    def joined(cls, parts: list[_Rows], most: int) -> _Rows:
        """The last `most` rows of all parts."""
        norms = [part.norms for part in parts if part.norms is not None]
        return cls(
            # Copies, so that what is cut off is not held.
            torch.cat([part.positions for part in parts])[-most:].clone(),
            torch.cat([part.queries for part in parts], dim=2)[:, :, -most:].clone(),
            torch.cat(norms, dim=1)[:, -most:].clone() if len(norms) == len(parts) else None,
        )

    def split(self, counts: list[int]) -> list[_Rows]:
        """In parts of that many rows. ValueError unless they are rows in order, and all of them."""
        _check_rows(self.positions, self.queries.shape[2])
        norms = [None] * len(counts)
        if min(counts) < 1 or sum(counts) != len(self.positions):
            raise ValueError("parts do not make up the window")
        if self.norms is not None:
            _check_rows(self.positions, self.norms.shape[1])
            norms = self.norms.split(counts, dim=1)
        parts = zip(self.positions.split(counts), self.queries.split(counts, dim=2), norms, strict=True)
        return [_Rows(*part) for part in parts]

    def before(self, position: int) -> _Rows:
        """Those at positions below `position`."""
        keep = self.positions < position
        return _Rows(
            self.positions[keep],
            self.queries[:, :, keep],
            None if self.norms is None else self.norms[:, keep],
        )


class _Moments:
    """Sums and outer products of unrotated rows, in float64 over blocks of `_BLOCK_ROWS` rows, which bounds
    both the rounding and the rows that wait."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        self.count = 0
        self._sum = torch.zeros(layers, heads, width, dtype=torch.float64)
        self._outer = torch.zeros(layers, heads, width, width, dtype=torch.float64)
        self._block = torch.empty(layers, heads, _BLOCK_ROWS, width)

    def add(self, captured: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Take rows [R] of captured [layers, *, heads, head_dim], rotated by cos, sin [R, head_dim]."""
        done = 0
        while done < len(rows):
            filled = self.count % _BLOCK_ROWS
            taken = slice(done, done + _BLOCK_ROWS - filled)
            count = len(rows[taken])
            part = captured.index_select(1, rows[taken]).transpose(1, 2)
            _unrotate(part, cos[taken], sin[taken], self._block[:, :, filled : filled + count])
            self.count += count
            done += count
            if self.count % _BLOCK_ROWS == 0:
                self._fold(self._block)

    def copy(self) -> _Moments:
        other = copy.copy(self)
        other._sum, other._outer = self._sum.clone(), self._outer.clone()
        other._block = self._block.clone()
        return other

    def state(self) -> dict[str, Tensor]:
        """Sums, outer products and the rows that wait for a whole block."""
        waiting = self._block[:, :, : self.count % _BLOCK_ROWS]
        return {"sum": self._sum, "outer": self._outer, "waiting": waiting}

    def resume(self, count: int, total: Tensor, outer: Tensor, waiting: Tensor) -> None:
        """Take over what `state` gave of `count` rows."""
        if count < 0 or waiting.shape[2] != count % _BLOCK_ROWS:
            raise ValueError("rows do not make up the moments")
        self.count, self._sum, self._outer = count, total, outer
        self._block[:, :, : waiting.shape[2]] = waiting

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and covariance, float32; None before the first row."""
        if not self.count:
            return None, None
        whole, waiting = self, self.count % _BLOCK_ROWS
        if waiting:
            whole = self.copy()
            whole._fold(self._block[:, :, :waiting])
        mean = whole._sum / self.count
        covariance = whole._outer / self.count
        covariance -= mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return mean.float(), covariance.float()

    def _fold(self, block: Tensor) -> None:
        layers, heads, rows, width = block.shape
        flat = block.reshape(layers * heads, rows, width)
        self._outer += torch.bmm(flat.transpose(1, 2), flat).view(self._outer.shape)
        self._sum += flat.sum(dim=1).view(self._sum.shape)


def _check_rows(positions: Tensor, count: int) -> None:
    if len(positions) != count or not bool((positions[1:] > positions[:-1]).all()):
        raise ValueError("rows and their positions do not fit together")


def _unrotate(rotated: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Undo the rotation of rows [..., R, head_dim] by cos, sin [R, head_dim] into `out` of the same shape."""
    half = rotated.shape[-1] // 2
    cos, sin = cos[:, :half], sin[:, :half]
    first, second = rotated[..., :half], rotated[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=-1)
