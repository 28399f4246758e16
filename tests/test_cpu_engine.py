"""The engine on the compiled kernels: ids and logits do not depend on how the work was arranged, nor on
the number of threads, and with unrounded weights they are those of the plain decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import TINY, Collector, RandomWeights, drain, greedy, prompt

from minikv.cache.lanes import LaneStore
from minikv.cache.pool import PagePool, page_bytes
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LibraryMissing, load_library
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.decoder import Decoder
from minikv.models.packed_decoder import PackedDecoder
from minikv.scheduler.batching import Rows, batch_of
from minikv.scheduler.request import Lanes

try:
    load_library()
except LibraryMissing as missing:
    pytest.skip(f"{missing}", allow_module_level=True)

CONFIG = replace(TINY, hidden_size=64, intermediate_size=96)
PAGE = 32
NUM_LANES = CONFIG.num_layers * CONFIG.num_kv_heads
PROMPTS = [prompt(n, seed=n) for n in (3, 17, 1, 40, 8, 64, 5, 31)]
SETTINGS = [
    ("f32", torch.float32),
    ("f32", torch.int8),
    ("bf16", torch.float16),
    ("q8", torch.int8),
    ("q8", torch.bfloat16),
    ("q4", torch.float16),
]
GROUPS = {1: (4, 4), 2: (4, 2), 3: (6, 2), 4: (8, 2), 7: (14, 2), 8: (8, 1)}


class Setup:
    """A packed decoder for one kind of weights and KV, and what each prompt gives alone on one thread."""

    def __init__(self, kind, dtype):
        self.kind, self.dtype = kind, dtype
        self.decoders = {threads: packed(CONFIG, kind, threads) for threads in (1, 2, 3)}
        self.expected = [run_all(self.engine(threads=1), [ids])[0] for ids in PROMPTS]
        assert len({tuple(ids) for ids in self.expected}) > 4, (
            "the tiny model must not answer everything alike"
        )

    def engine(self, threads=2, pages=None, **options):
        hot = None if pages is None else (pages + 1) * page_bytes(PAGE, CONFIG.head_dim, self.dtype)
        config = EngineConfig(debug_checks=True, tiers=TierConfig(hot=hot), **options)
        return Engine(self.decoders[threads], config, self.dtype, PAGE, (), keys_transposed=True)


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda s: f"{s[0]}-{s[1]}".replace("torch.", ""))
def setup(request):
    return Setup(*request.param)


def packed(config, kind="f32", threads=2, seed=0):
    return PackedDecoder(config, RandomWeights(config, seed), CpuBackend(threads), kind)


def run_all(engine, prompts=PROMPTS, params=None):
    ids = [engine.add(p, params or greedy(20))[0] for p in prompts]
    tokens = drain(engine).tokens
    assert engine.store.pool.bytes_in_use == 0
    return [tokens[i] for i in ids]


def logits_of(decoder, ids, chunk=512, dtype=torch.float32):
    """Logits of every position, the prompt computed in chunks."""
    config, backend = decoder.config, decoder.backend
    lanes = config.num_layers * config.num_kv_heads
    pool = PagePool(
        -(-len(ids) // PAGE) * lanes, PAGE, config.head_dim, dtype, keys_transposed=backend.keys_transposed
    )
    store = LaneStore(pool, 1, config.num_layers, config.num_kv_heads, len(ids))
    seq, rows = store.open(), []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        assert store.reserve(seq, len(part))
        rows.append(decoder.forward(batch_of(store, [Rows(seq, part, start, len(ids), "all")])))
        store.append(seq, len(part))
    return torch.cat(rows)


# Ids


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batch_matches_single_on_any_number_of_threads(setup, threads):
    assert run_all(setup.engine(threads)) == setup.expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunk_size_changes_nothing(setup, chunk):
    engine = setup.engine(prefill_chunk=chunk, max_seqs=8, max_batch_tokens=max(8, chunk) + 3)
    assert run_all(engine) == setup.expected


def test_preemption_changes_nothing(setup):
    # Each grows from one page a lane to three, and two at a time have four.
    prompts = [prompt(31 - n, seed=n) for n in range(3)]
    expected = [run_all(setup.engine(1), [ids], greedy(40))[0] for ids in prompts]
    engine = setup.engine(pages=4 * NUM_LANES)
    assert run_all(engine, prompts, greedy(40)) == expected
    assert engine.scheduler.num_preemptions > 0


def test_staggered_arrivals_change_nothing(setup):
    engine = setup.engine(prefill_chunk=16, max_batch_tokens=24)
    collector, ids = Collector(), []
    for p in PROMPTS:
        ids.append(engine.add(p, greedy(20))[0])
        for _ in range(3):
            collector.take(engine.step())
    drain(engine, collector)
    assert [collector.tokens[i] for i in ids] == setup.expected


@pytest.mark.parametrize("steps", [0, 3, 9])
def test_aborting_a_neighbour_changes_nothing(setup, steps):
    engine = setup.engine(prefill_chunk=8, max_batch_tokens=20)
    ids = [engine.add(p, greedy(20))[0] for p in PROMPTS]
    collector = Collector()
    for _ in range(steps):
        collector.take(engine.step())
    for victim in (ids[1], ids[3], ids[7]):
        engine.abort(victim)
    drain(engine, collector)
    for i in (0, 2, 4, 5, 6):
        assert collector.tokens[ids[i]] == setup.expected[i]
    assert engine.store.pool.bytes_in_use == 0


def test_four_completions_share_their_prompt_and_give_what_one_gives(setup):
    engine = setup.engine()
    requests = engine.add(PROMPTS[3], greedy(20, n=4))
    collector = drain(engine)
    assert [collector.tokens[r] for r in requests] == [setup.expected[3]] * 4
    reused = [collector.finished[r].request.num_reused for r in requests]
    assert reused == [0, 40, 40, 40]


def test_a_second_turn_reuses_the_first_and_gives_what_the_whole_gives(setup):
    engine, lanes = setup.engine(), Lanes()
    ids = list(PROMPTS[5])
    for turn in range(3):
        (request,) = engine.add(ids, greedy(10), lanes=lanes)
        collector = drain(engine)
        assert (collector.finished[request].request.num_reused > 0) is (turn > 0)
        assert collector.tokens[request] == run_all(setup.engine(1), [ids], greedy(10))[0]
        ids += collector.tokens[request] + prompt(9, seed=turn)


# Logits


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_are_the_same_bits_chunked_or_whole_on_any_number_of_threads(setup, chunk):
    ids = prompt(70, seed=5)
    whole = logits_of(setup.decoders[1], ids, dtype=setup.dtype)
    assert torch.isfinite(whole).all()
    for decoder in setup.decoders.values():
        assert torch.equal(logits_of(decoder, ids, chunk, setup.dtype), whole)


def assert_same_logits(config, chunk=512, length=100):
    ids = prompt(length, seed=1)
    expected = logits_of(Decoder(config, RandomWeights(config), TorchBackend()), ids, chunk)
    actual = logits_of(packed(config), ids, chunk)
    spread = (expected.max() - expected.min()).item()
    difference = (actual - expected).abs().max().item()
    assert difference < 1e-4 * spread, f"logits differ by {difference:.2e} of {spread:.2f}"


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_family_and_group_size_gives_the_logits_of_the_plain_decoder(family, group):
    heads, kv_heads = GROUPS[group]
    config = replace(
        CONFIG,
        architecture=family,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=group % 2 == 0,
    )
    assert_same_logits(config)
    assert_same_logits(config, chunk=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64, "num_query_heads": 9, "num_kv_heads": 3},
        {"head_dim": 80, "num_query_heads": 2, "num_kv_heads": 1},
        {"hidden_size": 44, "intermediate_size": 100},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "tied_embeddings": False},
        {"vocab_size": 131, "num_layers": 3},
    ],
)
def test_odd_sizes_and_biases_give_the_logits_of_the_plain_decoder(changes):
    assert_same_logits(replace(CONFIG, **changes))


def test_weights_that_cannot_be_quantised_stay_as_they_are():
    config = replace(CONFIG, hidden_size=44, intermediate_size=100, num_query_heads=5, num_kv_heads=5)
    assert torch.equal(logits_of(packed(config, "q4"), prompt(9)), logits_of(packed(config), prompt(9)))


def test_two_engines_in_two_threads_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    setups = [Setup("q8", torch.float16), Setup("q4", torch.int8)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run_all, setup.engine()) for setup in setups]
        assert [f.result() for f in futures] == [setup.expected for setup in setups]


def test_a_logit_that_is_not_a_number_is_not_hidden_by_quantisation():
    """One bad number in the weights' input shows in the logits: the engine then ends the request."""
    config = replace(CONFIG, num_layers=1)
    for kind in ("q4", "q8", "f32"):
        decoder = packed(config, kind)
        decoder.embedding.weight = decoder.embedding.weight.clone()
        decoder.embedding.weight[7, 3] = float("nan")
        assert torch.isnan(logits_of(decoder, [5, 7])[1]).all()


def test_captured_queries_are_the_rotated_ones_of_the_plain_decoder():
    """Both decoders hand out the queries of the rows asked for, in every layer."""
    rows = torch.tensor([12, 3, 7])
    captured, norms = [], []
    for decoder, dtype, transposed in (
        (packed(CONFIG, "f32", threads=2), torch.float32, True),
        (Decoder(CONFIG, RandomWeights(CONFIG), TorchBackend()), torch.float32, False),
    ):
        pool = PagePool(NUM_LANES, PAGE, CONFIG.head_dim, dtype, keys_transposed=transposed)
        store = LaneStore(pool, 1, CONFIG.num_layers, CONFIG.num_kv_heads, PAGE)
        seq = store.open()
        assert store.reserve(seq, 20)
        batch = batch_of(store, [Rows(seq, prompt(20, seed=4), 0, capture=rows)])
        decoder.forward(batch)
        captured.append(batch.captured)
        norms.append(batch.captured_norms)
    assert captured[0].shape == (CONFIG.num_layers, 3, CONFIG.num_query_heads, CONFIG.head_dim)
    torch.testing.assert_close(captured[0], captured[1], rtol=1e-4, atol=1e-5)
    assert norms[0].shape == (CONFIG.num_layers, 3)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_spans_are_zoomed_in_as_in_the_plain_decoder(dtype):
    """Routing runs inside the library's call, between writing and attending. Not in float32: keys of the two
    decoders differ in last bits there, and a code at the border of two levels with them. So do some of int8,
    by their scales; this prompt has none that matters."""
    cache = CacheConfig(policy="sekv", budget=80, sinks=2, recent=4, window=6)
    tiers = TierConfig(warm="64MiB")
    config = EngineConfig(debug_checks=True, max_context=256, tiers=tiers)
    plain = Decoder(CONFIG, RandomWeights(CONFIG), TorchBackend(), "f32")
    said = []
    for decoder in (packed(CONFIG), plain):
        engine = Engine(decoder, config, dtype, PAGE, (), keys_transposed=decoder is not plain)
        (request,) = engine.add(prompt(180, seed=4), greedy(40), cache=cache)
        said.append(drain(engine).tokens[request])
        assert engine.zoomed.rows > 0
    assert said[0] == said[1]


def test_what_fails_while_routing_ends_the_requests_of_the_step():
    config = EngineConfig(debug_checks=True, max_context=256, tiers=TierConfig(warm="64MiB"))
    engine = Engine(packed(CONFIG), config, torch.float16, PAGE, (), keys_transposed=True)
    cache = CacheConfig(policy="sekv", budget=80, sinks=2, recent=4, window=6)
    assert engine.storage is not None
    engine.storage.tiers.at_hand = lambda handle: None  # so that rows are asked for
    (request,) = engine.add(prompt(180), greedy(40), cache=cache)
    for _ in range(3):  # the prompt may be computed in blocks
        engine.step()

    def fail(*_):
        raise MemoryError

    below = engine.scheduler.running[0].course.below
    below.rows = fail
    collector = drain(engine)
    assert collector.finished[request].reason == "error"
    assert engine.store.pool.num_free == engine.store.pool.num_pages
