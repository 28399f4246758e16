"""Decode steps replayed from graphs: buckets, padding, memory that stays in its place, and when to forget."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from model_files import write_directory
from recorded_graph import RecordedGraph, RefusingGraph
from tiny import tiny_decoder
from torch import Tensor

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool
from minikv.config import CacheConfig
from minikv.kernels.batch import Batch
from minikv.kernels.torch_cpu import TorchBackend
from minikv.loading import load_model
from minikv.models import graphs as module
from minikv.models.graphs import Bucket, CudaGraphs, DecodeGraphs, bucket_of, padded
from minikv.scheduler.batching import Rows, batch_of

LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4
WIDTH = HEADS * DIM


@dataclass
class Plan:
    tables: Tensor
    past_lengths: Tensor
    slots: Tensor
    longest: int
    has_mass: bool


class Backend:
    """Plans as those of a device's kernels: of a batch it keeps what its kernels read."""

    def plan(self, batch: Batch) -> None:
        longest = int(batch.past_lengths.max()) + 1
        tensors = (batch.lane_pages.clone(), batch.past_lengths.clone(), batch.slots.clone())
        batch.plan = Plan(*tensors, longest, any(batch.has_mass))

    def refill(self, plan: Plan, batch: Batch) -> None:
        plan.tables[..., : batch.lane_pages.shape[-1]].copy_(batch.lane_pages)
        plan.past_lengths.copy_(batch.past_lengths)
        plan.slots.copy_(batch.slots)


def run(hidden: Tensor, batch: Batch) -> Tensor:
    """Layers that write a row to its slots and add what its lanes hold, each entry with a weight of its place
    and, if there are any, its mass. Reads plan, angles and pool alone, and overwrites its input."""
    plan, pool = batch.plan, batch.pool
    entry = torch.arange(plan.longest)
    values, mass = pool.values.view(-1, DIM), pool.log_mass.view(-1)
    for layer in range(LAYERS):
        rows = (hidden * batch.cos + batch.sin).view(-1, HEADS, DIM)
        values[plan.slots[layer].T] = rows
        slots = plan.tables[:, layer][:, :, entry // PAGE].long() * PAGE + entry % PAGE
        held = entry <= plan.past_lengths[:, layer, :, None]
        weight = torch.where(held, 1.0 / (entry + 1), 0.0)
        if plan.has_mass:
            weight = weight * torch.where(held, mass[slots].exp(), 0.0)
        seen = torch.where(held[..., None], values[slots], 0.0)
        hidden += (weight[..., None] * seen).sum(dim=2).view(-1, WIDTH).tanh()
    return hidden * 2


class Talks:
    """Sequences on a store, of which some say a token in each step."""

    def __init__(self, seed: int = 0, scratch: bool = True) -> None:
        self.pool = PagePool(1900, PAGE, DIM, torch.float32, poison=True, scratch=scratch)
        self.store = LaneStore(self.pool, 80, LAYERS, HEADS, 4096)
        self.random = torch.Generator().manual_seed(seed)
        self.seqs: list[int] = []

    def open(self, length: int) -> int:
        seq = self.store.open()
        if length:
            assert self.store.reserve(seq, length)
            slots = torch.from_numpy(self.store.next_slots(seq, length))
            rows = torch.randn(2, *slots.shape, DIM, generator=self.random)
            self.pool.write_rows(slots, rows[0], rows[1])
            self.pool.write_entries(slots, torch.arange(length))
            self.store.append(seq, length)
        self.seqs.append(seq)
        return seq

    def step(self, seqs: list[int]) -> tuple[Tensor, Batch]:
        """Embedded rows and the batch of a step; the caller computes it."""
        for seq in seqs:
            assert self.store.reserve(seq, 1)
        batch = batch_of(self.store, [Rows(seq, [5], int(self.store.num_tokens[seq])) for seq in seqs])
        batch.cos, batch.sin = torch.randn(2, len(seqs), WIDTH, generator=self.random)
        self.pool.write_entries(batch.slots, batch.positions)
        return torch.randn(len(seqs), WIDTH, generator=self.random), batch

    def done(self, seqs: list[int]) -> None:
        for seq in seqs:
            self.store.append(seq, 1)
        self.store.check()


def eager(hidden: Tensor, batch: Batch) -> Tensor:
    Backend().plan(batch)
    return run(hidden.clone(), batch)


def recording(make=RecordedGraph) -> DecodeGraphs:
    return DecodeGraphs(run, Backend(), make)


def check_step(talks: Talks, graphs: DecodeGraphs, seqs: list[int]) -> None:
    """Fail unless a step gives what it gives without graphs, writes the same rows and spares its input."""
    hidden, batch = talks.step(seqs)
    given = hidden.clone()
    found = graphs.replay(hidden, batch)
    assert found is not None
    found, slots = found.clone(), batch.slots.reshape(-1)
    written = talks.pool.values.view(-1, DIM)[slots].clone()
    assert torch.equal(hidden, given)
    expected = eager(hidden, batch)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(written, talks.pool.values.view(-1, DIM)[slots], atol=1e-6, rtol=1e-6)
    talks.done(seqs)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_a_step_of_any_size_is_what_it_is_without_graphs(count):
    talks, graphs = Talks(), recording()
    seqs = [talks.open(7 * n) for n in range(count)]
    for _ in range(4):
        check_step(talks, graphs, seqs)
    assert graphs.num_replayed == 4 and len(graphs._steps) == 1


def test_sequences_come_and_go_and_are_rewritten_between_steps():
    talks, graphs, choose = Talks(1), recording(), random.Random(1)
    for n in range(6):
        talks.open(9 * n + 1)
    for _ in range(40):
        kind = choose.randrange(4)
        if kind == 0 and len(talks.seqs) > 2:
            talks.store.close(talks.seqs.pop(choose.randrange(len(talks.seqs))))
        elif kind == 1 and len(talks.seqs) < 9:
            talks.open(choose.randrange(60))
        elif kind == 2:
            seq = choose.choice(talks.seqs)
            longest = int(talks.store.lengths[seq].max())
            if longest:
                keep = torch.rand(LAYERS, HEADS, longest, generator=talks.random) < 0.7
                talks.store.rewrite(seq, keep, fresh=choose.random() < 0.5)
        check_step(talks, graphs, choose.sample(talks.seqs, choose.randrange(1, len(talks.seqs) + 1)))
    assert graphs.num_replayed == 40
    assert {bucket.rows for bucket in graphs._steps} <= {1, 2, 4, 8, 16}


def test_a_lane_that_outgrows_its_bucket_goes_to_the_next():
    talks, graphs = Talks(), recording()
    seq, other = talks.open(1022), talks.open(3)
    for _ in range(4):
        check_step(talks, graphs, [seq, other])
    assert [bucket.entries for bucket in graphs._steps] == [1024, 2048]
    check_step(talks, graphs, [other])
    assert Bucket(1, 1024, False) in graphs._steps


def test_tables_with_an_area_may_be_wider_than_a_graph_has_room_for():
    """An area that nobody zooms into stays, beside a lane of another that fills the graph's bucket."""
    talks, graphs = Talks(), recording()
    seqs = [talks.open(5), talks.open(1020)]
    talks.store.ask_area(seqs[0], 4)
    assert talks.store.take_area(seqs[0])
    hidden, batch = talks.step(seqs)
    assert batch.lane_pages.shape[-1] * PAGE > bucket_of(batch).entries
    assert graphs.replay(hidden, batch) is not None and not graphs._failed
    check_step(talks, graphs, seqs)


def test_log_masses_have_graphs_of_their_own():
    talks, graphs = Talks(), recording()
    seqs = [talks.open(20), talks.open(30)]
    check_step(talks, graphs, seqs)
    slots, valid = talks.store.slots(seqs[0])
    talks.pool.log_mass.view(-1)[slots[valid]] = 0.7
    talks.store.has_mass[seqs[0]] = True
    talks.store.mass_ends[seqs[0]] = talks.store.lengths[seqs[0]]
    check_step(talks, graphs, seqs)
    assert {bucket.has_mass for bucket in graphs._steps} == {False, True}


def test_rows_of_nobody_write_to_the_scratch_page_and_read_nothing_else():
    talks = Talks()
    hidden, batch = talks.step([talks.open(9), talks.open(2), talks.open(0)])
    wider = padded(batch, 8)
    assert wider.row_starts == list(range(9))
    assert set(wider.slots[..., 3:].reshape(-1).tolist()) == {talks.pool.scratch * PAGE}
    assert torch.equal(wider.slots[..., :3], batch.slots)
    assert torch.equal(wider.slots, replace(wider).slots)  # as they follow from tables and lengths
    assert set(wider.lane_pages[3:].reshape(-1).tolist()) == {0, talks.pool.scratch}
    assert not wider.past_lengths[3:].any()
    before = talks.pool.values.clone()
    assert recording().replay(hidden, batch) is not None
    touched = (talks.pool.values != before).flatten(1).any(dim=1).nonzero().view(-1).tolist()
    pages = set((batch.slots // PAGE).reshape(-1).tolist())
    assert set(touched) <= pages | {talks.pool.scratch}


def test_the_scratch_page_is_nobodys():
    pool = PagePool(6, PAGE, DIM, torch.float32, scratch=True)
    ids = pool.allocate(6)
    assert pool.scratch == 7 not in ids and pool.num_free == 0
    pool.values[pool.scratch] = torch.nan
    pool.check(ids)
    assert PagePool(6, PAGE, DIM, torch.float32).scratch is None


def unfit(name: str) -> tuple[Tensor, Batch]:
    """A step that no graph is for."""
    talks = Talks(scratch=name != "no scratch page")
    hidden, batch = talks.step([talks.open(4) for _ in range(65 if name == "many rows" else 2)])
    if name == "captured":
        batch.capture_rows = torch.tensor([1])
    elif name == "routed":
        batch.route = lambda layer, q: None
    elif name == "a chunk":
        batch.row_starts = [0, 2]
        batch.lane_pages, batch.past_lengths = batch.lane_pages[:1], batch.past_lengths[:1]
    return hidden, batch


@pytest.mark.parametrize("name", ["captured", "routed", "a chunk", "many rows", "no scratch page"])
def test_a_step_that_does_more_than_decode_is_computed_without(name):
    hidden, batch = unfit(name)
    graphs = recording()
    assert graphs.replay(hidden, batch) is None
    assert not graphs._steps and graphs.num_replayed == 0


def test_the_least_bucket_is_taken():
    talks = Talks()
    seqs = [talks.open(1) for _ in range(33)]
    for count, rows in ((1, 1), (2, 2), (3, 4), (9, 16), (17, 32), (33, 64)):
        _, batch = talks.step(seqs[:count])
        assert bucket_of(batch) == Bucket(rows, 1024, False)


def test_a_graph_is_captured_once():
    talks, made = Talks(), []

    def make():
        made.append(RecordedGraph())
        return made[-1]

    graphs = recording(make)
    seqs = [talks.open(3) for _ in range(4)]
    for count in (3, 4, 3, 4, 1, 4):
        check_step(talks, graphs, seqs[:count])
    assert [graph.num_replays for graph in made] == [5, 1]


def test_memory_of_a_graph_stays_in_its_place():
    talks, graphs = Talks(), recording()
    seqs = [talks.open(3), talks.open(50)]
    places = []
    for _ in range(3):
        check_step(talks, graphs, seqs)
        (step,) = graphs._steps.values()
        plan = step.batch.plan
        tensors = (step.hidden, step.batch.cos, step.batch.sin, plan.tables, plan.past_lengths, plan.slots)
        places.append([t.data_ptr() for t in (*tensors, step.output)])
    assert places[0] == places[1] == places[2]


def test_graphs_of_another_pool_are_forgotten():
    graphs, one, other = recording(), Talks(), Talks(2)
    check_step(one, graphs, [one.open(5)])
    (first,) = graphs._steps.values()
    check_step(other, graphs, [other.open(5)])
    (second,) = graphs._steps.values()
    assert second is not first and second.batch.pool is other.pool
    other.pool.values = other.pool.values.clone()
    check_step(other, graphs, other.seqs)
    (third,) = graphs._steps.values()
    assert third is not second


def test_the_graph_that_was_not_used_for_longest_makes_way(monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    talks, graphs = Talks(), recording()
    seqs = [talks.open(3) for _ in range(4)]
    for count in (1, 2, 1, 4):
        check_step(talks, graphs, seqs[:count])
    assert [bucket.rows for bucket in graphs._steps] == [1, 4]


def test_graphs_make_way_for_the_bytes_of_another_ones_tables(monkeypatch):
    of_a_row = LAYERS * HEADS * module.LEAST_ENTRIES // PAGE * 4
    monkeypatch.setattr(module, "MOST_TABLE_BYTES", 5 * of_a_row)
    talks, graphs, kept = Talks(), recording(), []
    seqs = [talks.open(3) for _ in range(4)]
    for count in (1, 2, 1, 4, 1, 2):
        check_step(talks, graphs, seqs[:count])
        kept.append([bucket.rows for bucket in graphs._steps])
        held = sum(step.batch.plan.tables.nbytes for step in graphs._steps.values())
        assert held == graphs.table_bytes <= 5 * of_a_row
    assert kept == [[1], [1, 2], [2, 1], [1, 4], [4, 1], [1, 2]]


def test_a_step_whose_tables_alone_are_too_large_is_computed_without(monkeypatch):
    monkeypatch.setattr(module, "MOST_TABLE_BYTES", 3 * LAYERS * HEADS * module.LEAST_ENTRIES // PAGE * 4)
    talks, graphs = Talks(), recording()
    seqs = [talks.open(3) for _ in range(3)]
    check_step(talks, graphs, seqs[:1])
    hidden, batch = talks.step(seqs)
    assert graphs.replay(hidden, batch) is None
    assert [bucket.rows for bucket in graphs._steps] == [1]
    talks.done(seqs)
    check_step(talks, graphs, seqs[:2])


def test_what_cannot_be_captured_is_computed_without_and_said_once(caplog):
    talks, graphs = Talks(), recording(RefusingGraph)
    seqs = [talks.open(5), talks.open(8)]
    for _ in range(3):
        hidden, batch = talks.step(seqs)
        given = hidden.clone()
        assert graphs.replay(hidden, batch) is None
        assert torch.equal(hidden, given)
        assert eager(hidden, batch).isfinite().all()
        talks.done(seqs)
    assert [record.message for record in caplog.records] == [
        "Decode steps are computed without CUDA graphs from here on: CUDA error: operation not permitted "
        "when stream is capturing."
    ]


def test_graphs_of_a_device_share_their_memory_as_long_as_there_is_one(monkeypatch):
    handles = iter(range(10))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    for name in ("CUDAGraph", "Stream"):
        monkeypatch.setattr(torch.cuda, name, object)
    make = CudaGraphs()
    first, second = make(), make()
    assert first._memory == second._memory == 0
    del first
    assert make()._memory == 0
    del second
    assert make()._memory == 1


class Streams:
    """The calls of `torch.cuda` that a capture makes, and which stream is the current one."""

    def __init__(self, monkeypatch) -> None:
        self.made, self.captured_on = [], []
        streams = self

        class Side:
            def __init__(self) -> None:
                streams.made.append(self)

            def wait_stream(self, stream) -> None:
                pass

        @contextmanager
        def stream(given):
            before, streams.current = streams.current, given
            try:
                yield
            finally:
                streams.current = before

        class Capture:
            """As torch's: where the capture cannot be ended, its stream stays the current one."""

            def __init__(self, graph, pool, stream=None, capture_error_mode="global") -> None:
                self.stream = stream or Side()

            def __enter__(self) -> None:
                self.before, streams.current = streams.current, self.stream
                streams.captured_on.append(self.stream)

            def __exit__(self, kind, *_) -> None:
                if kind is not None:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                streams.current = self.before

        self.current = self.main = Side()
        self.made.clear()
        patches = {
            "Stream": Side,
            "stream": stream,
            "graph": Capture,
            "CUDAGraph": object,
            "graph_pool_handle": object,
            "current_stream": lambda: self.current,
            "set_stream": lambda given: setattr(self, "current", given),
        }
        for name, patch in patches.items():
            monkeypatch.setattr(torch.cuda, name, patch)


def test_all_captures_use_one_stream_which_has_run_the_work_before(monkeypatch):
    streams, make, ran = Streams(monkeypatch), CudaGraphs(), []
    for _ in range(3):
        make().capture(lambda: ran.append(streams.current))
    assert len(streams.made) == 1 and set(ran) == set(streams.captured_on) == set(streams.made)
    assert len(ran) == 6 and streams.current is streams.main


def test_a_capture_that_fails_leaves_the_stream_that_was_current(monkeypatch):
    streams, calls = Streams(monkeypatch), []

    def run():
        calls.append(streams.current)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphs()().capture(run)
    assert len(calls) == 2 and streams.current is streams.main


@pytest.mark.parametrize(
    ("name", "device", "asked", "has"),
    [
        ("triton", "cuda", True, True),
        ("triton", "cuda", False, False),
        ("triton", "cpu", True, False),
        ("another", "cuda", True, False),
    ],
)
def test_a_model_that_is_loaded_has_graphs_where_they_can_be(name, device, asked, has, tmp_path, monkeypatch):
    kernels = TorchBackend()
    monkeypatch.setattr(kernels, "name", name, raising=False)
    monkeypatch.setattr(kernels, "device", torch.device(device), raising=False)
    monkeypatch.setattr("minikv.loading.choose_backend", lambda *_: (kernels, "as asked"))
    monkeypatch.setattr("minikv.loading._load_weights", lambda *_: tiny_decoder())
    loaded = load_model(write_directory(tmp_path), CacheConfig(), 1 << 30, cuda_graphs=asked)
    assert (loaded.decoder.graphs is not None) == has
