"""Policy sekv on a device that is only pretended: nothing is left behind, the host waits for no more than it
must, and all is said as on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cli_tools import write_tiny_model
from keeping import keep
from late_stream import LateEvent, LateStream
from pretended_device import DEVICE, Distant, NearBackend, near, nothing_crosses, pretended_device, watched
from session_tools import begun, load, more
from tiny import TINY, Collector, RandomWeights, drain, greedy, prompt
from zooming import Shape, routed

from minikv import loading
from minikv.cache.copies import Copies
from minikv.cache.pool import page_bytes
from minikv.cache.spans.router import Router
from minikv.cache.spans.zoom import Routing, Zoom
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.backend import CPU
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.decoder import Decoder
from minikv.scheduler.request import Lanes

SEKV = keep("sekv", 48, decode_slack=4)
FIRST, SECOND, COUNT = 100, 9, 8  # tokens of two prompts, and of each reply
WARM = TierConfig(warm="64MiB", async_copies=False)
HEAD_DIM, PAGE = 32, NearBackend.page_size


def engine_on(device, kv_dtype=torch.float32, tiers=WARM, router=None, chunk=64, **changes) -> Engine:
    config = replace(TINY, head_dim=HEAD_DIM, **changes)
    backend = TorchBackend() if device == CPU else NearBackend()
    decoder = Decoder(config, RandomWeights(config), backend, "f32")
    options = EngineConfig(debug_checks=True, prefill_chunk=chunk, tiers=tiers, max_seqs=4)
    return Engine(decoder, options, kv_dtype, PAGE, (), device=device, find_router=lambda _: router)


def talk(engine, cache=SEKV, sizes=(FIRST, SECOND), count=COUNT, between=lambda lanes: None):
    """What is said in the turns of a conversation: spans are made of its prompts, and of what is said."""
    lanes, ids, said = Lanes(), [], []
    for seed, size in enumerate(sizes):
        ids += prompt(size, seed=seed)
        (request,) = engine.add(ids, greedy(count), lanes=lanes, cache=cache)
        collector = Collector()
        while engine.has_work:
            collector.take(engine.step())
        assert collector.reason(request) == "length", collector.finished[request].message
        said.append(collector.tokens[request])
        ids += said[-1]
        between(lanes)
    return said, lanes


@pytest.fixture
def device(monkeypatch):
    with pretended_device(monkeypatch, {}):
        yield DEVICE


class DistantStream(LateStream):
    """A late side stream of the device."""

    def out(self, sources, targets):
        return super().out([near(source) for source in sources], targets)

    def into(self, sources):
        targets, event = super().into(sources)
        return [Distant(target) for target in targets], event


class NoHold(LateEvent):
    """Faulty: what computes does not wait."""

    def hold_compute(self):
        pass


def with_copies(engine, seed=0, nbytes=1 << 20):
    stream = LateStream(seed) if engine.store.pool.device == CPU else DistantStream(seed)
    engine.store.pool.copies = Copies(stream, nbytes)
    return engine


@pytest.fixture(scope="module")
def said_on_the_host():
    """By KV dtype: what the host says, the lanes then, and what was zoomed in."""
    found = {}
    for dtype in (torch.float32, torch.float16, torch.int8):
        engine = engine_on(CPU, dtype)
        said, lanes = talk(engine)
        found[dtype] = said, engine.store.counts(lanes.seq), engine.zoomed
    return found


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.int8])
def test_a_conversation_is_that_of_the_host(kv_dtype, said_on_the_host, device):
    expected, counts, zoomed = said_on_the_host[kv_dtype]
    engine = engine_on(device, kv_dtype)
    said, lanes = talk(engine)
    assert said == expected and engine.zoomed == zoomed and zoomed.rows > 0
    assert torch.equal(engine.store.counts(lanes.seq), counts)
    at = {compression.num_tokens for compression in lanes.course.compressions}
    assert len(at - {FIRST, FIRST + COUNT + SECOND}) >= 2, "what is said becomes spans on the way"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_the_same_rows_are_chosen_step_by_step(dtype, device):
    shape = Shape(dtype=dtype, rows=50, moves=9, router=True, parts=2)
    expected = routed(shape, CPU)
    assert torch.equal(routed(shape, device), expected) and expected.any()


def test_a_router_goes_there_as_well(device):
    layers, heads = TINY.num_layers, TINY.num_query_heads
    router = Router(0.5 + torch.rand(layers, heads, HEAD_DIM // 4), torch.randn(layers, heads))
    here = engine_on(CPU, router=router)
    expected, _ = talk(here)
    there = engine_on(device, router=router)
    assert talk(there)[0] == expected and there.zoomed == here.zoomed


def test_the_host_waits_once_a_layer_and_for_nothing_but_what_enters(device, monkeypatch):
    decide, enter, route, waits = Zoom.decide, Zoom.enter, Routing.__call__, []

    def alone(zoom, batch, sequence, layer, q):
        assert (sequence in batch._lanes) == (layer > 0), "tables are copied once for all layers"
        batch.lanes_of(sequence)
        with nothing_crosses():
            return decide(zoom, batch, sequence, layer, q)

    def entering(zoom, layer, tokens):
        assert type(tokens) is torch.Tensor and not tokens.is_floating_point()
        with watched() as seen:
            enter(zoom, layer, tokens)
        assert bool((tokens >= 0).any()) or not seen, "where nothing enters nothing is copied"

    def counted(routing, layer, q):
        with watched() as seen:
            route(routing, layer, q)
        waits.append(seen)

    monkeypatch.setattr(Zoom, "decide", alone)
    monkeypatch.setattr(Zoom, "enter", entering)
    monkeypatch.setattr(Routing, "__call__", counted)
    engine = engine_on(device)
    for seed in range(2):
        engine.add(prompt(100, seed=seed), greedy(9), cache=SEKV)
    ended = drain(engine).finished.values()
    assert [event.message for event in ended] == [None, None] and engine.zoomed.changes > 0
    later = waits[1 :: TINY.num_layers]
    assert len(later) > 5 and all(len(seen) == 1 for seen in later)


@pytest.mark.parametrize(("seed", "nbytes"), [(0, 1 << 20), (1, 1 << 20), (2, 12 << 10), (3, 12 << 10)])
def test_with_copies_that_are_late_it_says_the_same(seed, nbytes, said_on_the_host, device):
    engine = with_copies(engine_on(device, torch.float16), seed, nbytes)
    engine.config = replace(engine.config, debug_checks=seed % 2 == 0)
    assert talk(engine)[0] == said_on_the_host[torch.float16][0]
    stats = engine.tier_stats
    assert stats["copies_beside"] > 20 and (stats["copies_refused"] > 0) == (nbytes < 1 << 20)


def test_it_is_noticed_where_a_row_is_not_waited_for(device):
    engine = with_copies(engine_on(device, torch.float16))
    engine.store.pool.copies._stream.event = NoHold
    with pytest.raises(AssertionError):
        talk(engine)


@pytest.mark.parametrize("steps", [1, 6])
def test_a_preempted_request_says_the_same(steps, said_on_the_host, device):
    engine, collector = engine_on(device), Collector()
    (request,) = engine.add(prompt(FIRST), greedy(COUNT), cache=SEKV)
    for _ in range(steps):
        collector.take(engine.step())
    engine.scheduler._preempt(engine.scheduler.running[0], {})
    drain(engine, collector)
    assert collector.tokens[request] == said_on_the_host[torch.float32][0][0]


def test_siblings_share_a_prompt(said_on_the_host, device):
    engine = engine_on(device)
    requests = engine.add(prompt(FIRST), greedy(COUNT, n=3), cache=SEKV)
    tokens = drain(engine).tokens
    assert [tokens[request] for request in requests] == 3 * [said_on_the_host[torch.float32][0][0]]
    assert engine.storage.tiers.nbytes == 0 and engine.store.pool.bytes_in_use == 0


def test_idle_lanes_leave_the_pool_and_zoom_in_when_they_are_back(said_on_the_host, device):
    engine = engine_on(device)

    def away(lanes):
        engine.scheduler._reclaim(lanes)
        assert lanes.seq is None

    assert talk(engine, between=away)[0] == said_on_the_host[torch.float32][0]
    assert engine.storage.num_restored == 1


def test_a_prompt_larger_than_the_pool_is_staged(device):
    """While what a chunk leaves is on its way, the next one is written to the same pages."""
    shape, sizes = {"num_layers": 6, "chunk": 32}, (200,)
    tiers = replace(WARM, hot=page_bytes(PAGE, HEAD_DIM, torch.float16) * 130)
    here = engine_on(CPU, torch.float16, **shape)
    expected, _ = talk(here, sizes=sizes, count=4)
    assert here.tier_stats["prompts_staged"] == 0
    engine = with_copies(engine_on(device, torch.float16, tiers, **shape))
    assert talk(engine, sizes=sizes, count=4)[0] == expected
    assert engine.tier_stats["prompts_staged"] == 1 and engine.zoomed == here.zoomed


def test_a_session_goes_there_and_comes_back(tmp_path, monkeypatch):
    model = write_tiny_model(tmp_path / "tiny", max_context=512)
    options = {"tiers": TierConfig(hot="4MiB", warm="16MiB"), "cache": CacheConfig(page_size=PAGE)}
    cache = keep("sekv", 80)
    with load(model, **options) as here:
        session = begun(here, cache)
        session.save(tmp_path / "here")
        expected = more(session)
        with pretended_device(monkeypatch, {}), monkeypatch.context() as patch:
            patch.setattr(loading, "choose_backend", lambda *_: (NearBackend(), "pretended"))
            with load(model, backend="triton", device="cuda", dtype="fp32", **options) as there:
                assert there.engine.store.pool.device == DEVICE
                session = there.load_session(tmp_path / "here")
                session.save(tmp_path / "there")
                assert more(session) == expected and there.engine.zoomed.rows > 0
        assert more(here.load_session(tmp_path / "there")) == expected
