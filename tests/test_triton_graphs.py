"""The engine on the Triton backend with its decode steps replayed: the tokens that it says without graphs.

The graph is one on the CPU that runs its launches again, interpreted, on what is in the same memory.
"""

from __future__ import annotations

import pytest
import torch
from keeping import keep
from pretended_device import DEVICE, nothing_crosses, pretended_device
from recorded_graph import RecordedGraph
from test_device_placement import KERNELS
from tiny import TINY, Collector, RandomWeights, drain, greedy, prompt
from triton_tools import INTERPRETED_ONLY

from minikv import memory
from minikv.cache.pool import PagePool
from minikv.config import EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.backend import CPU
from minikv.kernels.triton.backend import TritonBackend
from minikv.models import graphs as graphs_module
from minikv.models.decoder import Decoder
from minikv.scheduler.request import Lanes

pytestmark = INTERPRETED_ONLY

PROMPTS = [prompt(n, seed=n) for n in (21, 40, 9)]


class Spared(PagePool):
    """A pool of the host that has a scratch page, as one of a device has."""

    def __init__(self, *args, **options):
        super().__init__(*args[:8], **options, scratch=True)


def engine_of(
    monkeypatch, graphs, kv_dtype=torch.float32, device=CPU, kind="f32", tiers=None, **changes
) -> Engine:
    if device == CPU:
        monkeypatch.setattr(memory, "PagePool", Spared)
    config = TINY.__class__(**{**TINY.__dict__, "head_dim": 32, **changes})
    decoder = Decoder(config, RandomWeights(config), TritonBackend(device), kind)
    if graphs:
        decoder.use_graphs(RecordedGraph)
    options = EngineConfig(debug_checks=True, prefill_chunk=32, tiers=tiers or TierConfig())
    kernels = decoder.backend.entries
    return Engine(decoder, options, kv_dtype, 16, (), entry_kernels=kernels, device=device)


def said(engine: Engine, cache=None):
    """Three requests, one of which comes later and all of which end at other times; then a second turn."""
    lanes, collector, requests = [Lanes() for _ in PROMPTS], Collector(), []
    for ids, lane, length in zip(PROMPTS, lanes, (5, 8, 3), strict=True):
        requests += engine.add(ids, greedy(length), lanes=lane, cache=cache)
        collector.take(engine.step())
    drain(engine, collector)
    tokens = [collector.tokens[request] for request in requests]
    (again,) = engine.add([*PROMPTS[0], *tokens[0], *prompt(4)], greedy(4), lanes=lanes[0], cache=cache)
    tokens.append(drain(engine).tokens[again])
    return tokens


@pytest.mark.parametrize(
    ("policy", "kv_dtype"), [(None, torch.float32), ("adakv", torch.float16), ("gracekv", torch.int8)]
)
def test_the_engine_says_the_same_with_graphs(policy, kv_dtype, monkeypatch):
    cache = None if policy is None else keep(policy, 0.5)
    expected = said(engine_of(monkeypatch, False, kv_dtype), cache)
    engine = engine_of(monkeypatch, True, kv_dtype)
    assert said(engine, cache) == expected
    graphs = engine.model.graphs
    assert graphs.num_replayed >= 10
    assert {bucket.rows for bucket in graphs._steps} >= {1, 4}  # of three requests, and one that is left
    assert {bucket.has_mass for bucket in graphs._steps} >= {policy == "gracekv"}


def test_steps_in_which_a_sequence_zooms_in_are_computed_without(monkeypatch):
    """They are replayed again when it has ended."""

    def both(graphs):
        engine = engine_of(monkeypatch, graphs, tiers=TierConfig(warm="8MiB"))
        requests = engine.add(prompt(9), greedy(10))
        requests += engine.add(prompt(70), greedy(5), cache=keep("sekv", 40))
        tokens = drain(engine).tokens
        return [tokens[request] for request in requests], engine

    expected, _ = both(False)
    tokens, engine = both(True)
    assert tokens == expected and engine.zoomed.rows > 0
    assert 3 <= engine.model.graphs.num_replayed <= 6


def test_the_engine_says_the_same_where_tables_have_little_room(monkeypatch):
    """For one row, or for two, but not both."""

    def few(engine):
        requests = [*engine.add(PROMPTS[2], greedy(3)), *engine.add(PROMPTS[2][2:], greedy(5))]
        collector = drain(engine)
        return [collector.tokens[request] for request in requests]

    expected = few(engine_of(monkeypatch, False))
    lanes = TINY.num_layers * TINY.num_kv_heads
    monkeypatch.setattr(graphs_module, "MOST_TABLE_BYTES", 2 * lanes * graphs_module.LEAST_ENTRIES // 16 * 4)
    engine = engine_of(monkeypatch, True)
    assert few(engine) == expected
    graphs = engine.model.graphs
    assert graphs.num_replayed == 4 and [bucket.rows for bucket in graphs._steps] == [1]


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "architecture": "qwen3", "qkv_bias": True}])
def test_nothing_of_a_graph_waits_for_the_host(changes, monkeypatch):
    """On the pretended device, where tensors are named by where they are: what is captured neither copies
    between it and the host nor looks inside a tensor, and it finds all it reads on the device."""
    expected = said(engine_of(monkeypatch, False, torch.bfloat16, kind="bf16", **changes))
    monkeypatch.setattr(RecordedGraph, "inside", staticmethod(nothing_crosses))
    with pretended_device(monkeypatch, KERNELS):
        engine = engine_of(monkeypatch, True, torch.bfloat16, DEVICE, "bf16", **changes)
        assert said(engine) == expected
    assert engine.model.graphs.num_replayed >= 10


def test_a_wait_for_the_host_within_a_graph_is_noticed(monkeypatch):
    with pretended_device(monkeypatch, {}):
        there = torch.ones(3, device=DEVICE)
        here = torch.tensor([0, 2])
        looks = (there.cpu, lambda: float(there[0]), lambda: there.copy_(torch.ones(3)), lambda: there[here])
        for look in looks:
            look()
            with nothing_crosses(), pytest.raises(RuntimeError, match="the host and the device meet"):
                look()
        with nothing_crosses():
            assert (there + 1).half().device.type == DEVICE.type
