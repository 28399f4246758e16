"""What the compiled kernels zoom in against the plain torch of `minikv.cache.spans.zoom`, for every
instruction set of this processor, the same whatever the number of threads and the batch mates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_cpu_engine import CONFIG, packed
from tiny import drain, greedy, prompt
from torch import Tensor
from zooming import LAYERS, Sequence, Shape, batch_of, pool_for

from minikv.cache.spans.codes import cells_of
from minikv.cache.spans.routing import choose, exchanged, worth_of
from minikv.cache.spans.zoom import Cells
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LibraryMissing, instruction_sets, load_library

try:
    ISAS = instruction_sets(load_library())
except LibraryMissing as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

SHAPES = {
    "plain": Shape(),
    "few rows": Shape(rows=7),
    "more rows than tokens": Shape(spans=5, rows=150),
    "shared cells": Shape(longest=60, spans=30),
    "shared cells and few rows": Shape(longest=70, spans=30, rows=9),
    "few moves": Shape(moves=3),
    "one move": Shape(rows=20, moves=1),
    "no moves": Shape(rows=30, moves=0),
    "shared cells and few moves": Shape(longest=70, spans=30, rows=40, moves=4),
    "router": Shape(router=True),
    "no group": Shape(group=1, heads=2),
    "group of seven": Shape(group=7, heads=2),
    "many heads": Shape(group=2, heads=7, spans=20),
    "head of 16": Shape(head_dim=16),
    "head of 80": Shape(head_dim=80, router=True),
    "head of 96": Shape(head_dim=96, longest=40),
    "head of 128": Shape(head_dim=128, group=4, heads=1),
    "bfloat16": Shape(dtype=torch.bfloat16, longest=30),
    "float32": Shape(dtype=torch.float32, router=True),
    "int8": Shape(dtype=torch.int8, longest=30),
    "several parts below": Shape(parts=4),
}
NEAR = 1e-3  # relative, of worths that are alike but for rounding


def tokens_held(owner: Tensor, num_tokens: int) -> Tensor:
    """Tokens [kv_heads, num_tokens] bool that have a row."""
    held = torch.zeros(len(owner), num_tokens + 1, dtype=torch.bool)
    return held.scatter_(1, owner + 1, True)[:, 1:]


class Expected:
    """What plain torch would zoom in of a layer."""

    def __init__(self, one: Sequence, batch, place: int, layer: int, q: Tensor) -> None:
        zoom = one.zoom
        self.cells = Cells.of(zoom.start[layer], zoom.size[layer], cells_of(one.shape.dtype))
        others = zoom._others(batch, place, layer, q)
        worth = worth_of(zoom._scores(layer, q), self.cells.size, others)
        self.before = tokens_held(zoom.owner[layer], one.num_tokens)
        held = self.before.gather(1, self.cells.first.clamp(max=one.num_tokens - 1)) & (self.cells.size > 0)
        chosen = choose(worth, self.cells.size, held, zoom.zooming)
        free = zoom.zooming.rows - self.before.sum(dim=1)
        most = zoom.zooming.moves * len(q)
        entering, leaving = exchanged(chosen, held, worth, self.cells.size, free, most, zoom.zooming)
        moving = zoom._moving(self.cells, entering, leaving)
        self.after = self.before & (moving >= 0) | (moving > 0)
        self.rank = torch.where(held & (worth >= zoom.zooming.least), worth * zoom.zooming.hold, worth)
        self.least = zoom.zooming.least

    def check(self, found: Tensor) -> None:
        """Fail unless tokens [kv_heads, num_tokens] bool are those, or others that are worth as much."""
        for head in range(len(found)):
            size, first = self.cells.size[head], self.cells.first[head]
            inside = self.after[head][first.clamp(max=found.shape[1] - 1)] & (size > 0)
            away = 0
            for token in (found[head] != self.after[head]).nonzero()[:, 0].tolist():
                cell = ((first <= token) & (token < first + size)).nonzero()[:, 0]
                assert len(cell) == 1, "a token of no span"
                rank = self.rank[head, cell].item()
                if abs(rank / self.least - 1) > NEAR:
                    edge = self.rank[head, inside].min().item()
                    assert abs(rank / edge - 1) < NEAR, "a token of another worth was chosen"
                    away += 1 if found[head, token] else -1
            assert int(size.max()) > 1 or away == 0, "there is room for another number of tokens"


def steps(one: Sequence, backend: CpuBackend, counts=(1, 1, 1, 5, 1, 2), drift=0.6):
    """Steps of so many query rows, each nearly the queries of the step before, checked in all layers."""
    q = one.queries(1)
    entered = 0
    for count in counts:
        q = (drift * q[:1] + (1 - drift**2) ** 0.5 * one.queries(count)) * 1.5
        one.write_new(count)
        batch = batch_of([one], [count])
        backend.plan(batch)
        for layer in range(LAYERS):
            expected = Expected(one, batch, 0, layer, q)
            backend.zoom(q, batch, layer)
            found = tokens_held(one.zoom.owner[layer], one.num_tokens)
            entered += int((found & ~expected.before).sum())
            expected.check(found)
            one.zoom.check()
    return entered


def check_rows(one: Sequence) -> None:
    """Fail unless rows of areas are those from below, bit for bit."""
    zoom = one.zoom
    for layer in range(LAYERS):
        heads, rows = (zoom.owner[layer] >= 0).nonzero().unbind(1)
        wanted = zoom.below.rows(layer, heads, zoom.owner[layer, heads, rows])
        found = zoom._pool.stored(zoom.rows[layer, heads, rows])
        for a, b in zip(wanted, found, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_tokens_are_chosen_as_by_plain_torch(name, isa):
    one = Sequence(SHAPES[name], seed=1)
    entered = steps(one, CpuBackend(2, isa))
    check_rows(one)
    assert one.zoom._counters.rows == entered > 0
    assert int((one.zoom.owner >= 0).sum(dim=-1).max()) <= one.shape.rows


def test_rows_change_hands_when_queries_change():
    one = Sequence(Shape(rows=40), seed=2)
    backend = CpuBackend(2)
    first = steps(one, backend, counts=(1,))
    assert first == 40 * LAYERS * one.shape.heads, "all rows are taken at once"
    owner = one.zoom.owner.clone()
    assert steps(one, backend, counts=(1,), drift=0.0) > 0
    assert not torch.equal(owner, one.zoom.owner)


def test_tokens_that_are_zoomed_in_stay_for_like_queries():
    one = Sequence(Shape(rows=40), seed=3)
    backend = CpuBackend(2)
    steps(one, backend, counts=(1,))
    held = steps(one, backend, counts=(1,) * 5, drift=0.99)
    one = Sequence(Shape(rows=40), seed=3)
    one.zoom.zooming = replace(one.zoom.zooming, hold=1.0)
    steps(one, backend, counts=(1,))
    assert held < steps(one, backend, counts=(1,) * 5, drift=0.99)


def test_nothing_is_zoomed_in_below_the_least_mass():
    one = Sequence(Shape(), seed=4)
    one.zoom.zooming = replace(one.zoom.zooming, least=0.5)
    assert steps(one, CpuBackend(2), counts=(1, 1)) == 0


def copies(shape: Shape, count: int, isa: str, threads: int, batched: bool) -> list[Tensor]:
    """Owners of the rows of some sequences after a few steps, taken together or one after the other."""
    pool = pool_for(shape, count)
    sequences = [Sequence(shape, seed, pool) for seed in range(count)]
    backend = CpuBackend(threads, isa)
    for rows in (1, 3, 1, 1):
        given = [one.queries(rows) for one in sequences]
        for one in sequences:
            one.write_new(rows)
        together = [range(count)] if batched else [[index] for index in range(count)]
        for some in together:
            batch = batch_of([sequences[i] for i in some], [rows] * len(some))
            backend.plan(batch)
            for layer in range(LAYERS):
                backend.zoom(torch.cat([given[i] for i in some]), batch, layer)
    return [one.zoom.owner for one in sequences]


@pytest.mark.parametrize("isa", ISAS)
def test_neither_threads_nor_batch_mates_change_the_choice(isa):
    shape = Shape(rows=30, spans=40)
    alone = copies(shape, 3, isa, threads=1, batched=False)
    assert all(int((owner >= 0).sum()) for owner in alone)
    for threads, batched in ((3, False), (1, True), (2, True), (5, True)):
        for a, b in zip(alone, copies(shape, 3, isa, threads, batched), strict=True):
            assert torch.equal(a, b)


def test_rows_that_are_not_in_memory_are_fetched(monkeypatch):
    near, far = (Sequence(Shape(parts=2), seed=5) for _ in range(2))
    monkeypatch.setattr(far.below.storage.tiers, "at_hand", lambda handle: None)
    backend = CpuBackend(2)
    assert steps(near, backend) == steps(far, backend) == far.zoom._counters.rows
    assert torch.equal(near.zoom.owner, far.zoom.owner)
    check_rows(far)


def test_what_cannot_be_had_any_more_ends_it(monkeypatch):
    one = Sequence(Shape(), seed=6)
    backend = CpuBackend(2)
    assert steps(one, backend, counts=(1, 1)) > 0
    for _, _, handles in one.below.whole_parts():
        for handle in handles:
            one.below.storage.tiers.drop(handle)
    one.write_new(1)
    batch = batch_of([one], [1])
    backend.plan(batch)
    backend.zoom(one.queries(1), batch, 0)
    backend.zoom(one.queries(1), batch, 1)
    assert one.below.lost
    assert int(one.zoom.owner.max()) == -1
    one.zoom.check()


def test_spans_that_left_the_warm_tier_are_not_kept_alive():
    one = Sequence(Shape(), seed=7)
    steps(one, CpuBackend(2), counts=(1,))
    assert all(ref() is not None for layer in one.zoom.compiled._reach._spans for ref in layer)
    for _, _, handles in one.below.whole_parts():
        for handle in handles:
            one.below.storage.tiers.drop(handle)
    assert all(ref() is None for layer in one.zoom.compiled._reach._spans for ref in layer)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("f32", torch.float16), ("q8", torch.int8), ("q4", torch.float16)]
)
def test_greedy_ids_alone_are_those_in_a_batch(kind, dtype):
    prompts = [prompt(count, seed=count) for count in (200, 150, 180)]
    cache = CacheConfig(policy="sekv", budget=128, sinks=2, recent=4, window=6)

    def said(threads: int, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
        config = EngineConfig(debug_checks=True, tiers=TierConfig(warm="64MiB"))
        engine = Engine(packed(CONFIG, kind, threads), config, dtype, 32, (), keys_transposed=True)
        ids = [engine.add(one, greedy(20), cache=cache)[0] for one in prompts]
        tokens = drain(engine).tokens
        return [tokens[i] for i in ids], engine.zoomed.rows

    together, rows = said(2, prompts)
    assert rows > 0
    assert together == [said(1, [one])[0][0] for one in prompts]
