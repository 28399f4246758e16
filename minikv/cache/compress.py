"""The compressor: asks a policy which entries of a sequence stay or are merged, and lets the store do it.

What it sees to itself, for every policy: sinks, recent entries and pinned ranges stay; the budget
counts all entries; a budget that holds everything changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from minikv.cache.ceiling import Ceiling
from minikv.cache.crew import Crew, crew_size
from minikv.cache.evidence import Recorded
from minikv.cache.lanes import LaneStore
from minikv.cache.merging import Merger, is_merging, kept_rows
from minikv.cache.policies.base import (
    Allocation,
    AnyPolicy,
    Evidence,
    LayerView,
    Policy,
    Rows,
    output_gram,
)
from minikv.cache.policies.select import select
from minikv.cache.policies.window import Window
from minikv.cache.protect import Ranges, pinned_too_much, protect
from minikv.cache.references import Seen
from minikv.cache.showing import for_refit, joined
from minikv.cache.spans.codes import Basis
from minikv.cache.spans.routing import MUTED
from minikv.cache.spans.share import lanes_part
from minikv.cache.stage import Stage
from minikv.cache.task import Task, refits
from minikv.config import CacheConfig
from minikv.errors import ConfigError
from minikv.kernels.backend import CPU, AttentionBackend
from minikv.models.config import ModelConfig
from minikv.models.rope import Rope

__all__ = ["Compressor", "Ranges", "Report", "evidence_for", "refits"]

RowsOf = Callable[[LayerView], tuple[Rows, Tensor]]

_FUTURE_SPAN = 128  # positions that queries still to come are spread over


class Weights(Protocol):
    """What the compressor needs of a decoder."""

    config: ModelConfig
    rope: Rope

    @property
    def backend(self) -> AttentionBackend:
        """What runs the model's attention."""
        ...

    def output_weight(self, layer: int) -> Tensor:
        """The output projection of a layer's attention: [hidden, query_heads * head_dim] float32."""
        ...


@dataclass(frozen=True)
class Report:
    """What a compression did: (before, after) entries over all lanes, and bytes of pages; seconds taken;
    entries that now stand for more than one token; what codes in entries mean, if there are any."""

    entries: tuple[int, int]
    bytes: tuple[int, int]
    seconds: float
    merged: int = 0
    basis: Basis | None = None

    @property
    def dropped(self) -> bool:
        """Whether anything was dropped or merged."""
        return self.entries[0] != self.entries[1]


def evidence_for(policy: AnyPolicy, cache: CacheConfig) -> Evidence:
    """What has to be recorded for a policy under a configuration."""
    if not refits(policy, cache):
        return policy.evidence
    return joined([policy.evidence, for_refit(cache.window)])


class Compressor:
    """Compresses sequences of one store. Layers are read and moved one at a time, in order; in between as
    many are worked on side by side as the model's backend has threads, if memory lasts."""

    def __init__(self, store: LaneStore, model: Weights):
        self.store = store
        self.model = model
        self._grams: dict[tuple[int, torch.device], Tensor] = {}

    @torch.inference_mode()
    def compress(
        self,
        seq: int,
        policy: AnyPolicy,
        cache: CacheConfig,
        num_tokens: int,
        recorded: Recorded,
        pinned: Ranges = (),
        room: int = 0,
        of_tokens: int | None = None,
        basis: Basis | None = None,
        stage: Stage | None = None,
    ) -> Report:
        """Do what a policy of either kind says, with a refit if the configuration or the policy wants one;
        pages no longer needed are free when this returns. The arguments are those of `choose`; basis: that of
        the codes which entries hold, from the first report that had one; stage: entries that come before
        those of the lanes, in which those that stay are then. Raises NotThere if they cannot be had."""
        started = time.perf_counter()
        stage = stage if stage is not None and stage.num_tokens else None
        entries, held = int(self._lengths(seq, stage).sum()), self.store.bytes_of(seq)
        task = self._task(seq, policy, cache, num_tokens, recorded, pinned, room, of_tokens, stage)
        if task is not None and self._drop_muted(seq, policy):
            task = self._task(seq, policy, cache, num_tokens, recorded, pinned, room, of_tokens, stage)
        if task is not None and is_merging(task.policy):
            basis = self._merge(task, basis)
        elif task is not None:
            self._evict(task)
        elif stage is not None:
            self._take_all(seq, stage)
        seconds = time.perf_counter() - started
        left = int(self.store.lengths[seq].sum())
        sizes = (held, self.store.bytes_of(seq))
        return Report((entries, left), sizes, seconds, self.store.num_merged(seq), basis)

    @torch.inference_mode()
    def choose(
        self,
        seq: int,
        policy: AnyPolicy,
        cache: CacheConfig,
        num_tokens: int,
        recorded: Recorded,
        pinned: Ranges = (),
        room: int = 0,
        of_tokens: int | None = None,
    ) -> Tensor:
        """Which entries a policy that merges nothing keeps: [layers, kv_heads, n] bool, over the entries as
        `LaneStore.slots` lists them.

        num_tokens: logical length of the sequence.
        pinned: token ranges that stay, besides those of `cache`.
        room: entries per lane that are to fit beside those kept; for a budget in bytes only.
        of_tokens: the length that a fractional budget is a fraction of; None: `num_tokens`.

        A policy whose evidence was not recorded gives way to the window policy. Raises ConfigError when
        pinned tokens alone pass a budget in bytes.
        """
        assert not is_merging(policy), "what is merged is not a choice among entries"
        task = self._task(seq, policy, cache, num_tokens, recorded, pinned, room, of_tokens)
        lengths = self._lengths(seq)
        return _valid(lengths) if task is None else self._keep(task)

    def view(
        self,
        seq: int,
        layer: int,
        num_tokens: int,
        recorded: Recorded,
        output: bool = True,
        gram: bool = False,
        device: torch.device = CPU,
        stage: Stage | None = None,
    ) -> LayerView:
        """One layer of a sequence as policies see it; without `output` its output_weight is empty, without
        `gram` its output_gram None. device: where its tensors are, the host or the pool's own. stage: entries
        that come before those of the lanes."""
        store, pool = self.store, self.store.pool
        beside, counts = 0, store.counts(seq, layer)
        if stage is not None:
            stage.filled(layer)
            beside = stage.num_tokens
            counts = torch.cat((counts.new_ones(len(counts), beside), counts), dim=1)
        valid = counts > 0
        pages = store.table(seq, layer, beside)
        heads, there = len(pages), valid.shape[1]
        keys, values = pool.read_pages(pages.reshape(-1), device=device)
        slots = (pages.unsqueeze(-1) * pool.page_size + torch.arange(pool.page_size)).view(heads, -1)
        log_mass, positions = pool.masses_and_positions(slots[:, :there])
        queries, query_heads, norms = recorded.queries, recorded.query_heads, recorded.residual_norms
        view = LayerView(
            layer=layer,
            keys=keys.view(heads, -1, pool.head_dim)[:, :there].float(),
            values=values.view(heads, -1, pool.head_dim)[:, :there].float(),
            log_mass=log_mass,
            counts=counts,
            positions=positions.long().masked_fill(~valid, -1),
            valid=valid,
            num_tokens=num_tokens,
            group=self.model.config.group_size,
            output_weight=self.model.output_weight(layer) if output else torch.empty(0, 0),
            queries=None if queries is None else queries[layer],
            query_heads=None if query_heads is None else query_heads[layer],
            query_positions=recorded.query_positions,
            residual_norms=None if norms is None else norms[layer],
            future_queries=self._future(recorded, layer, num_tokens),
            statistics=recorded.statistics(layer),
            surprisal=recorded.surprisal,
            output_gram=self._gram(layer, device) if gram else None,
            slots=self.model.backend.slots,
            kv_dtype=pool.dtype,
        )
        return view.on(device)

    def _gram(self, layer: int, device: torch.device) -> Tensor:
        """Of the layer's output projection, made once: it depends on weights alone."""
        if (layer, device) not in self._grams:
            gram = output_gram(self.model.output_weight(layer), self.store.pool.head_dim)
            self._grams[layer, device] = gram.to(device)
        return self._grams[layer, device]

    def _future(self, recorded: Recorded, layer: int, num_tokens: int) -> Tensor | None:
        """Recorded queries rotated to positions yet to come: [query_heads, F, head_dim]."""
        if recorded.future is None:
            return None
        count = recorded.future.shape[2]
        positions = num_tokens + torch.arange(count) * _FUTURE_SPAN // count
        # Dynamic RoPE is taken as it stands at the present length.
        cos, sin = self.model.rope.cos_sin(positions, torch.full_like(positions, num_tokens))
        rows = recorded.future[layer]
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat((-second, first), dim=-1) * sin

    def _lengths(self, seq: int, stage: Stage | None = None) -> Tensor:
        """Entries of each lane, those that are staged among them: [layers, kv_heads] int64."""
        return torch.from_numpy(self.store.lengths[seq]).long() + (0 if stage is None else stage.num_tokens)

    def _positions(self, seq: int, stage: Stage | None) -> Tensor:
        """As `LaneStore.positions`, of staged entries first."""
        positions = self.store.positions(seq)
        return positions if stage is None else torch.cat((stage.positions, positions), dim=-1)

    def _task(
        self,
        seq: int,
        policy: AnyPolicy,
        cache: CacheConfig,
        num_tokens: int,
        recorded: Recorded,
        pinned: Ranges,
        room: int,
        of_tokens: int | None,
        stage: Stage | None = None,
    ) -> Task | None:
        """What there is to do; None if the budget holds everything."""
        lengths = self._lengths(seq, stage)
        valid = _valid(lengths)
        limit = cache.limit
        if limit is None:
            return None
        ceiling = None
        # What is zoomed in has its own part of the budget, once lanes are shorter than the text.
        share = lanes_part(policy, limit, self.store, of_tokens or num_tokens)
        shorter = int(lengths.sum()) < num_tokens * self.store.num_lanes
        if limit.kind == "bytes":
            whole = Ceiling.of(limit, self.store)
            ceiling = whole.part(share)
            fitting = ceiling if shorter else whole
            fits = fitting.pages(lengths.numpy(), room) <= fitting.max_pages
            total = ceiling.max_pages * ceiling.page_size - self.store.num_lanes * room
            capacity = ceiling.per_lane - room
        else:
            whole = limit.entries(of_tokens or num_tokens, self.store.num_lanes)
            total = max(self.store.num_lanes, int(share * whole))
            fits = (total if shorter else whole) >= int(lengths.sum()) or num_tokens <= cache.too_short
            capacity = total // self.store.num_lanes
        if fits:
            return None
        if not recorded.serves(policy.evidence):
            policy = Window()
        positions = self._positions(seq, stage)
        # Recent entries compete where they would leave a policy that merges nothing to divide.
        capacity = capacity // 2 if is_merging(policy) else capacity
        protected = protect(positions, lengths, cache, (*cache.pinned, *pinned), capacity)
        floors = protected.sum(dim=-1)
        least = torch.minimum(floors.clamp(min=1), lengths) if is_merging(policy) else floors
        if ceiling is not None and ceiling.pages(least.numpy(), room) > ceiling.max_pages:
            raise ConfigError(pinned_too_much(int(floors.max()), ceiling))
        if not (valid & ~protected).any():
            return None  # what is pinned may be all there is, and more than a budget in entries
        sizes = max(total, int(least.sum())), ceiling, room
        held = lengths, valid, positions, protected
        return Task(seq, stage, policy, cache, num_tokens, recorded, *held, *sizes)

    def _drop_muted(self, seq: int, policy: AnyPolicy) -> bool:
        """Drop entries that attention does not see; they mean nothing to a policy that zooms in on none."""
        if getattr(policy, "zooms", False) or not self.store.num_merged(seq):
            return False
        slots, valid = self.store.slots(seq)
        masses, _ = self.store.pool.masses_and_positions(slots.flatten())
        keep = valid & (masses.view(slots.shape) > MUTED / 2)
        if torch.equal(keep, valid):
            return False
        self.store.rewrite(seq, keep)
        return True

    # Keeping

    def _evict(self, task: Task) -> None:
        keep = self._keep(task)
        if task.stage is None and int(keep.sum()) == int(task.lengths.sum()):
            return
        if task.refit_evidence is None and task.stage is None:
            self.store.rewrite(task.seq, keep)
            return

        def rows_of(view: LayerView) -> tuple[Rows, Tensor]:
            held = task.protected_of(view.layer)
            rows, source = kept_rows(view, keep[view.layer, :, : held.shape[1]], held)
            return self._refitted(task, view, rows), source

        with self._crew(task) as crew:
            self._replace(task, crew, rows_of, 0 if task.refit_evidence is None else task.end)

    def _take_all(self, seq: int, stage: Stage) -> None:
        """Put everything that is staged into the lanes, before what they hold."""

        def rows_of(layer: int) -> tuple[Rows, Tensor]:
            view = self.view(seq, layer, stage.num_tokens, Recorded(), output=False, stage=stage)
            return kept_rows(view, view.valid, view.valid)

        self.store.replace(seq, rows_of, 0, stage.num_tokens)

    def _keep(self, task: Task) -> Tensor:
        """[layers, kv_heads, n] bool, the entries that stay."""
        scores = self._scores(task)
        question = Allocation(scores, task.lengths, task.floors, task.total)
        if task.ceiling is None:
            return select(scores, task.policy.allocate(question))
        return select(scores, _allocate_pages(task.policy, question, task.ceiling, task.room))

    def _scores(self, task: Task) -> list[Tensor]:
        """Per layer [kv_heads, n] float32, +inf for protected entries and -inf past a lane's end. They are
        computed where the pool is, and come to the host."""

        def scores_of(view: LayerView) -> Tensor:
            given = task.policy.score(view).to(CPU, torch.float32)
            given = given.masked_fill(task.protected_of(view.layer), torch.inf)
            return given.masked_fill(~task.valid[view.layer, :, : given.shape[1]], -torch.inf)

        device = self.store.pool.device
        with self._crew(task) if device == CPU else Crew(1) as crew:
            return list(crew.map(scores_of, self._views(task, device)))

    def _crew(self, task: Task) -> Crew:
        """Who works on the layers of a task on the host."""
        _, heads, longest = task.valid.shape
        return Crew(crew_size(self.model.backend.threads, 8 * heads * longest * self.store.pool.head_dim))

    def _replace(self, task: Task, crew: Crew, rows_of: RowsOf, end: int) -> None:
        """Let the store put what `rows_of` makes of a layer's view in its place, layer by layer."""
        # The rows of one layer alone are staged, and wanted until its own are written.
        made = crew.map(rows_of, self._views(task), ahead=task.stage is None)
        self.store.replace(task.seq, lambda _: next(made), end, task.beside)

    def _views(self, task: Task, device: torch.device = CPU) -> Iterator[LayerView]:
        """All layers in order, each read when it is asked for."""
        return (self._view(task, layer, device) for layer in range(len(task.lengths)))

    def _view(self, task: Task, layer: int, device: torch.device = CPU) -> LayerView:
        wanted = task.policy.evidence
        output, gram = wanted.output_weight, wanted.output_gram
        return self.view(task.seq, layer, task.num_tokens, task.shown, output, gram, device, task.stage)

    # Merging

    def _merge(self, task: Task, basis: Basis | None) -> Basis | None:
        """Returns what codes in entries mean, if the policy makes any."""
        refit = task.refit_evidence is not None
        with self._crew(task) as crew:
            slots = self.model.backend.slots
            slots = slots.alone() if slots is not None and crew.size > 1 else slots

            def measure(view: LayerView) -> Any:
                own = None if basis is None else basis.layer(view.layer)
                shown = replace(view, refit=refit, basis=own, slots=slots)
                return task.policy.measure(shown, task.protected_of(view.layer))

            measured = list(crew.map(measure, self._views(task)))
            merger = Merger(task.policy, measured, task.lengths, task.floors)
            assignment = (
                merger.assign(task.total)
                if task.ceiling is None
                else merger.assign_pages(task.total, task.ceiling, task.room)
            )

            def rows_of(view: LayerView) -> tuple[Rows, Tensor]:
                layer, held = view.layer, task.protected_of(view.layer)
                rows, source = merger.rows(layer, view, assignment[layer], held)
                return self._refitted(task, view, rows, getattr(measured[layer], "seen", None)), source

            self._replace(task, crew, rows_of, task.end)
        made = [layer.basis for layer in measured if hasattr(layer, "basis")]
        return Basis.stacked(made) if made else basis

    def _refitted(self, task: Task, view: LayerView, rows: Rows, seen: Seen | None = None) -> Rows:
        """The rows with masses and values corrected, if there is to be a refit; seen: by the policy."""
        if task.refit_evidence is None:
            return rows
        from minikv.cache.refit import refit

        shown = self._with(view, task.refit_evidence, task.num_tokens)
        return refit(shown, rows, seen=seen)

    def _with(self, view: LayerView, recorded: Recorded, num_tokens: int) -> LayerView:
        """The view with other evidence."""
        assert recorded.queries is not None and recorded.query_heads is not None
        return replace(
            view,
            queries=recorded.queries[view.layer],
            query_heads=recorded.query_heads[view.layer],
            query_positions=recorded.query_positions,
            residual_norms=None,
            future_queries=self._future(recorded, view.layer, num_tokens),
        )


def _valid(lengths: Tensor) -> Tensor:
    """Which entries exist of lanes of these lengths [layers, kv_heads]: [layers, kv_heads, n] bool."""
    return torch.arange(int(lengths.max())) < lengths[..., None]


def _allocate_pages(policy: Policy, question: Allocation, ceiling: Ceiling, room: int) -> Tensor:
    """Counts [layers, kv_heads] of a policy whose lanes, with `room` entries more in each, fit the ceiling.

    Lanes end within a page, so the entries that fit depend on how they are divided: the total is
    lowered until the pages suffice, and then every lane takes what its pages hold.
    """
    least = int(question.protected.sum())
    lengths = question.lengths.numpy()
    total = question.total
    while True:
        counts = policy.allocate(Allocation(question.scores, question.lengths, question.protected, total))
        excess = ceiling.pages(counts.numpy(), room) - ceiling.max_pages
        if excess <= 0:
            return torch.from_numpy(ceiling.filled(counts.numpy(), lengths, room))
        assert total > least, "the protected entries were found to fit"
        total = max(least, total - excess * ceiling.page_size)
