"""Beginnings of prompts that are found again: nothing changes but what is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping import LANES, keep
from tiny import TINY, Collector, drain, greedy, hot_bytes, prompt, tiny_decoder, tiny_engine

from minikv.cache.tiers.span import Owner, owner_key, raw_span
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.errors import ConfigError
from minikv.models.config import RopeConfig
from minikv.scheduler import prefix
from minikv.scheduler.prefix import Prefixes
from minikv.scheduler.request import Lanes

BLOCK = 8
DOCUMENT = prompt(50, seed=1)
WARM = TierConfig(warm="64MiB")
CACHES = {
    "full": CacheConfig(),
    "window": keep("window"),
    "snapkv": keep("snapkv"),
    "adakv": keep("adakv"),
    "expected": keep("expected"),
    "compresskv": keep("compresskv"),
    "gracekv": keep("gracekv"),
    "refit": keep("adakv:expected", refit=True),
    "streaming": keep("snapkv", prefill="streaming"),
    "streaming expected": keep("expected", 30, prefill="streaming"),
    "streaming gracekv": keep("gracekv", prefill="streaming"),
    "pages": keep("adakv", "8KiB", prefill="streaming"),
    "slack": keep("expected", 20, decode_slack=4),
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(prefix, "BLOCK_TOKENS", BLOCK)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


class Counting:
    """A decoder that counts the rows that it computes."""

    def __init__(self, decoder):
        self.decoder, self.rows = decoder, 0

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def forward(self, batch):
        self.rows += batch.num_rows
        return self.decoder.forward(batch)


def question(seed: int, length: int = 7) -> list[int]:
    return prompt(length, seed=100 + seed)


def run_all(engine, prompts, cache=None, params=None, **options):
    """Outputs of prompts that are added at once, and how many tokens each of them took over."""
    ids = [engine.add(p, params or greedy(), cache=cache, **options)[0] for p in prompts]
    collector = drain(engine)
    assert [collector.reason(i) for i in ids] == ["length"] * len(ids)
    return [collector.tokens[i] for i in ids], [collector.finished[i].request.num_reused for i in ids]


def apart(decoder, prompts, cache=None, params=None, chunk=512, **options):
    """Outputs of prompts each of which has an engine of its own, without a store."""
    engines = [tiny_engine(decoder, prefill_chunk=chunk) for _ in prompts]
    return [run_all(e, [p], cache, params, **options)[0][0] for e, p in zip(engines, prompts, strict=True)]


# The same answers


@pytest.mark.parametrize(
    ("name", "chunk"),
    [(name, chunk) for name in CACHES for chunk in (7, 64)]
    + [(name, 1) for name in ("full", "expected", "streaming gracekv")],
)
def test_answers_are_those_without_the_store(decoder, name, chunk):
    cache = CACHES[name]
    prompts = [DOCUMENT + question(n) for n in range(3)] + [DOCUMENT[:20] + question(9, 40)]
    expected = apart(decoder, prompts, cache, chunk=chunk)
    engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=chunk)
    assert run_all(engine, prompts[:1], cache) == (expected[:1], [0])
    outputs, reused = run_all(engine, prompts, cache)
    assert outputs == expected
    if name not in ("pages", "streaming", "streaming gracekv", "streaming expected"):
        assert reused[1:] == [48, 48, 16]
    assert min(reused) >= BLOCK


@pytest.mark.parametrize("name", CACHES)
def test_answers_are_those_without_the_store_in_a_batch_that_begins_at_once(decoder, name):
    prompts = [DOCUMENT + question(n) for n in range(4)] + [question(5, 30)]
    expected = apart(decoder, prompts, CACHES[name], chunk=16)
    outputs, reused = run_all(tiny_engine(decoder, tiers=WARM, prefill_chunk=16), prompts, CACHES[name])
    assert outputs == expected
    assert reused[0] == reused[4] == 0 and min(reused[1:4]) >= BLOCK


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("content_end", [45, 50, 53])
def test_what_a_template_puts_behind_the_text_is_heeded(decoder, name, content_end):
    prompts = [DOCUMENT + question(n) for n in range(2)]
    expected = apart(decoder, prompts, CACHES[name], content_end=content_end)
    engine = tiny_engine(decoder, tiers=WARM)
    assert run_all(engine, prompts[:1], CACHES[name])[0] == apart(decoder, prompts[:1], CACHES[name])
    outputs, reused = run_all(engine, prompts, CACHES[name], content_end=content_end)
    assert outputs == expected and min(reused) >= BLOCK


def test_requests_of_different_policies_share_rows(decoder):
    prompts = [DOCUMENT + question(n) for n in range(len(CACHES))]
    expected = [apart(decoder, [p], c, chunk=16)[0] for p, c in zip(prompts, CACHES.values(), strict=True)]
    for order in (1, -1):
        engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=16, max_batch_tokens=40)
        ids, collector = {}, Collector()
        for index in list(range(len(prompts)))[::order]:
            (ids[index],) = engine.add(prompts[index], greedy(), cache=[*CACHES.values()][index])
            collector.take(engine.step())
        drain(engine, collector)
        assert [collector.tokens[ids[index]] for index in range(len(prompts))] == expected


@pytest.mark.parametrize("name", ["full", "expected", "gracekv", "streaming expected"])
def test_a_request_that_is_set_back_finds_what_it_had_published(decoder, name):
    cache = CACHES[name]
    prompts = [DOCUMENT + question(n) for n in range(3)]
    expected = apart(decoder, prompts, cache, greedy(30), chunk=16)
    options = {"prefill_chunk": 16, "tiers": TierConfig(warm="64MiB", hot=hot_bytes(36 * LANES))}
    engine = tiny_engine(decoder, **options)
    outputs, reused = run_all(engine, prompts, cache, greedy(30))
    assert outputs == expected
    if name == "full":
        assert engine.scheduler.num_preemptions and reused[2] >= 48


def test_a_request_that_is_aborted_leaves_whole_blocks(decoder):
    engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=9)
    (gone,) = engine.add(DOCUMENT + question(0), greedy())
    (waiting,) = engine.add(DOCUMENT + question(1), greedy())
    engine.step()
    engine.step()
    engine.abort(gone)
    collector = drain(engine)
    assert collector.tokens[waiting] == apart(decoder, [DOCUMENT + question(1)])[0]
    assert collector.finished[waiting].request.num_reused == 16


def test_siblings_and_conversations_begin_with_what_is_found(decoder):
    engine = tiny_engine(decoder, tiers=WARM)
    run_all(engine, [DOCUMENT])
    ids = engine.add(DOCUMENT + question(1), greedy(n=3))
    collector = drain(engine)
    assert [collector.tokens[i] for i in ids] == 3 * apart(decoder, [DOCUMENT + question(1)])
    lanes, history = Lanes(), DOCUMENT + question(2)
    plain, theirs = tiny_engine(decoder), Lanes()
    for turn in range(3):
        outputs, reused = run_all(engine, [history], lanes=lanes)
        assert outputs == run_all(plain, [history], lanes=theirs)[0]
        assert reused[0] == (48 if turn == 0 else len(history) - 8)
        history = history + outputs[0] + question(turn)


# What is found


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_t4_only_whole_blocks_are_published(decoder, blocks, extra):
    length = blocks * BLOCK + extra
    ids = prompt(length, seed=7)
    engine = tiny_engine(decoder, tiers=WARM)
    expected = apart(decoder, [ids, ids + question(1)])
    assert run_all(engine, [ids]) == (expected[:1], [0])
    whole = length // BLOCK
    assert engine.storage.report()["prefix_blocks"] == whole
    # The last token is always computed: its logits are wanted.
    assert run_all(engine, [ids]) == (expected[:1], [min(whole * BLOCK, length - 1)])
    assert run_all(engine, [ids + question(1)]) == (expected[1:], [whole * BLOCK])
    assert engine.storage.report()["prefix_blocks"] == (length + 7) // BLOCK


@pytest.mark.parametrize("name", ["full", "snapkv", "expected", "gracekv"])
def test_the_same_prompt_again_computes_no_more_than_it_must(decoder, name):
    model = Counting(decoder)
    engine = tiny_engine(model, tiers=WARM)
    ids = DOCUMENT[:48]
    first = run_all(engine, [ids], CACHES[name], greedy(1))
    assert (model.rows, first[1]) == (48, [0])
    again = run_all(engine, [ids], CACHES[name], greedy(1))
    window = CACHES[name].window if name in ("snapkv", "gracekv") else 1
    assert model.rows == 48 + window and again == (first[0], [48 - window])


@pytest.mark.parametrize("name", ["full", "expected"])
def test_fifty_questions_compute_their_document_once(decoder, name):
    model = Counting(decoder)
    engine = tiny_engine(model, tiers=WARM, prefill_chunk=16)
    prompts = [DOCUMENT[:48] + question(n) for n in range(50)]
    outputs, _ = run_all(engine, prompts, CACHES[name], greedy(1))
    assert model.rows == 48 + 50 * 7
    report = engine.storage.report()
    assert (report["prefix_hits"], report["prefix_tokens"], report["prefix_blocks"]) == (49, 49 * 48, 6)
    assert outputs == apart(decoder, prompts, CACHES[name], greedy(1))


def test_a_document_that_differs_in_one_token_is_another(decoder):
    engine = tiny_engine(decoder, tiers=WARM)
    run_all(engine, [DOCUMENT])
    for place, reused in ((0, 0), (8, 8), (15, 8), (47, 40), (49, 48)):
        other = list(DOCUMENT)
        other[place] = 3 + (other[place] - 2) % 94
        assert run_all(engine, [other]) == (apart(decoder, [other]), [reused])
    # The same tokens behind others are others.
    assert run_all(engine, [DOCUMENT[8:]])[1] == [0]


def test_without_tiers_or_by_wish_nothing_is_kept(decoder):
    for tiers in (TierConfig(), TierConfig(warm="64MiB", prefixes=False)):
        engine = tiny_engine(decoder, tiers=tiers)
        assert run_all(engine, [DOCUMENT])[1] == run_all(engine, [DOCUMENT])[1] == [0]
        assert engine.storage is None or engine.storage.tiers.nbytes == 0
    with pytest.raises(ConfigError, match="prefixes"):
        TierConfig(prefixes="yes")


def test_dynamic_rope_shares_within_the_original_context_alone():
    decoder = tiny_decoder(rope=RopeConfig(kind="dynamic", factor=4.0, original_context=56))
    short, long = DOCUMENT + question(0, 6), DOCUMENT + question(1, 20)
    expected = apart(decoder, [short, long], keep("expected"))
    engine = tiny_engine(decoder, tiers=WARM)
    assert run_all(engine, [long], keep("expected")) == (expected[1:], [0])
    assert engine.storage.report()["prefix_blocks"] == 0
    assert run_all(engine, [short], keep("expected")) == (expected[:1], [0])
    assert run_all(engine, [short], keep("expected")) == (expected[:1], [55])
    assert run_all(engine, [long], keep("expected")) == (expected[1:], [0])


# Across runs


def engine_on(path, decoder, dtype=torch.float32, fingerprint="model", size="8MiB", **tiers):
    config = EngineConfig(debug_checks=True, tiers=TierConfig(cold=f"{path}:{size}", **tiers))
    return Engine(decoder, config, dtype, 4, decoder.config.eos_token_ids, fingerprint=fingerprint)


@pytest.mark.parametrize("warm", [None, "20KiB", "8MiB"])
@pytest.mark.parametrize("name", ["full", "expected", "gracekv", "streaming expected"])
def test_a_later_run_finds_what_is_in_the_file(decoder, tmp_path, name, warm):
    first, second = DOCUMENT + question(0), DOCUMENT + question(1)
    expected = apart(decoder, [first, second], CACHES[name])
    engine = engine_on(tmp_path / "cold", decoder, warm=warm)
    assert run_all(engine, [first], CACHES[name]) == (expected[:1], [0])
    engine.close()
    engine = engine_on(tmp_path / "cold", decoder, warm=warm)
    outputs, reused = run_all(engine, [second], CACHES[name])
    assert outputs == expected[1:] and reused[0] >= 32
    engine.close()


def test_t5_other_models_dtypes_and_rotations_find_nothing(decoder, tmp_path):
    engine = engine_on(tmp_path / "cold", decoder)
    run_all(engine, [DOCUMENT])
    engine.close()
    turned = tiny_decoder(rope=RopeConfig(theta=500.0))
    for model, dtype, name in (
        (tiny_decoder(seed=1), torch.float32, "other"),
        (decoder, torch.float16, "model"),
        (turned, torch.float32, "model"),
    ):
        engine = engine_on(tmp_path / "cold", model, dtype, name)
        assert run_all(engine, [DOCUMENT])[1] == [0]
        engine.close()
    engine = engine_on(tmp_path / "cold", decoder)
    assert run_all(engine, [DOCUMENT])[1] == [48]
    engine.close()


@pytest.mark.parametrize("name", ["full", "expected"])
def test_a_damaged_file_shortens_what_is_found_and_is_mended(decoder, tmp_path, name):
    path, cache = tmp_path / "cold", CACHES[name]
    expected = apart(decoder, [DOCUMENT], cache)
    for place in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        engine = engine_on(path, decoder)
        run_all(engine, [DOCUMENT], cache)
        engine.close()
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 1
        if place > 0.001:  # behind the file's own header
            path.write_bytes(data)
        engine = engine_on(path, decoder)
        outputs, (reused,) = run_all(engine, [DOCUMENT], cache)
        assert outputs == expected and reused <= 48
        assert reused < 48 or place in (0.001, 0.999)
        assert run_all(engine, [DOCUMENT], cache) == (expected, [48])
        engine.close()


def test_a_span_of_another_shape_is_not_taken(decoder):
    engine = tiny_engine(decoder, tiers=WARM)
    tiers, fingerprint = engine.storage.tiers, engine.storage.exact.fingerprint
    key = owner_key("prefix", b"", torch.tensor(DOCUMENT[:BLOCK]).numpy().astype("<i8").tobytes())
    for layer in range(TINY.num_layers):
        tiers.release(tiers.write(raw_span(Owner(key, layer), fingerprint, BLOCK, b"no rows")))
    assert run_all(engine, [DOCUMENT]) == (apart(decoder, [DOCUMENT]), [0])


# Short of room


@pytest.mark.parametrize("name", ["full", "expected"])
@pytest.mark.parametrize("size", ["1KiB", "10KiB", "30KiB", "60KiB"])
def test_full_tiers_keep_the_beginning_and_change_no_answer(decoder, name, size):
    prompts = [DOCUMENT + question(n) for n in range(3)]
    expected = apart(decoder, prompts, CACHES[name])
    engine = tiny_engine(decoder, tiers=TierConfig(warm=size), prefill_chunk=16)
    assert run_all(engine, prompts, CACHES[name])[0] == expected
    outputs, reused = run_all(engine, prompts[::-1], CACHES[name])
    assert outputs == expected[::-1]
    assert (min(reused) >= BLOCK) is (engine.storage.report()["warm_bytes"] > 0)
    others = [prompt(40, seed=50 + n) for n in range(4)]
    assert run_all(engine, others, CACHES[name])[0] == apart(decoder, others, CACHES[name])


def test_publishing_takes_no_room_from_spans_that_have_an_owner(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(warm="20KiB"))
    body = bytes(6000)
    spans = [raw_span(Owner(owner_key(str(n)), 0), bytes(32), 1, body) for n in range(3)]
    handles = [engine.storage.tiers.write(span) for span in spans]
    assert run_all(engine, [DOCUMENT]) == (apart(decoder, [DOCUMENT]), [0])
    assert [engine.storage.tiers.read(handle) for handle in handles] == spans


# Waiting for one another


@pytest.mark.parametrize("name", ["full", "expected"])
@pytest.mark.parametrize("way", ["_append", "_load_companion", "_publish_block"])
@pytest.mark.parametrize("works", [0, 2])
def test_where_memory_runs_out_the_prompt_is_computed(decoder, monkeypatch, name, way, works):
    prompts = [DOCUMENT + question(n) for n in range(2)]
    expected = apart(decoder, prompts, CACHES[name])
    engine = tiny_engine(decoder, tiers=WARM)
    method, calls = getattr(Prefixes, way), []

    def short(self, *args):
        calls.append(way)
        if len(calls) > works:
            raise MemoryError
        return method(self, *args)

    monkeypatch.setattr(Prefixes, way, short)
    outputs = [run_all(engine, [p], CACHES[name])[0][0] for p in prompts]
    assert outputs == expected
    assert calls or (way, name) == ("_load_companion", "full")
    found = (way, works) == ("_publish_block", 2) or (way, name) == ("_load_companion", "full")
    assert engine.storage.report()["prefix_hits"] == found


def test_rows_that_are_no_numbers_are_not_published(decoder):
    engine = tiny_engine(decoder, tiers=WARM)

    class Faulty(Counting):
        def forward(self, batch):
            logits = super().forward(batch)
            if self.rows == len(DOCUMENT):
                engine.store.pool.values[1:] = torch.nan
                logits *= torch.nan
            return logits

    engine.model = Faulty(decoder)
    (failing,) = engine.add(DOCUMENT, greedy())
    assert drain(engine).reason(failing) == "error"
    engine.store.pool.values.zero_()
    expected = apart(decoder, [DOCUMENT])
    assert run_all(engine, [DOCUMENT]) == (expected, [0])


def test_who_shares_nothing_goes_ahead(decoder):
    engine = tiny_engine(decoder, tiers=WARM, prefill_chunk=8, max_batch_tokens=16)
    (first,) = engine.add(DOCUMENT + question(0), greedy(2))
    (follower,) = engine.add(DOCUMENT + question(1), greedy(2))
    (other,) = engine.add(question(2, 12), greedy(2))
    order = [event.request_id for event in steps(engine) if event.reason]
    assert order.index(other) < order.index(first) and set(order) == {first, follower, other}


def steps(engine):
    collector = Collector()
    drain(engine, collector)
    return list(collector.finished.values())


def test_who_waits_runs_alone_if_the_other_cannot_publish(decoder):
    engine = tiny_engine(decoder, tiers=TierConfig(warm="1KiB"), prefill_chunk=8)
    prompts = [DOCUMENT + question(n) for n in range(2)]
    assert run_all(engine, prompts) == (apart(decoder, prompts), [0, 0])


def test_who_waits_runs_alone_if_the_other_fails(decoder):
    class Failing(Counting):
        def forward(self, batch):
            if self.rows == 24:
                self.rows += 1
                raise RuntimeError("out of order")
            return super().forward(batch)

    engine = tiny_engine(Failing(decoder), tiers=WARM, prefill_chunk=8, max_batch_tokens=16)
    (first,) = engine.add(DOCUMENT + question(0), greedy())
    (second,) = engine.add(DOCUMENT + question(1), greedy())
    collector = drain(engine)
    assert collector.reason(first) == "error"
    assert collector.tokens[second] == apart(decoder, [DOCUMENT + question(1)])[0]
    assert collector.finished[second].request.num_reused == 24


commands = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 2),
            st.integers(0, 50),
            st.integers(0, 12),
            st.sampled_from([*CACHES]),
            st.sampled_from([1, 1, 2]),
        ),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=14,
)
DECODER = tiny_decoder(num_layers=1)
ALONE: dict[tuple, list[int]] = {}


def alone(ids, name, chunk):
    if (key := (*ids, name, chunk)) not in ALONE:
        ALONE[key] = apart(DECODER, [ids], CACHES[name], greedy(6), chunk)[0]
    return ALONE[key]


@given(
    commands,
    st.integers(17, 60),
    st.sampled_from([1, 5, 8, 64]),
    st.integers(1, 4),
    st.sampled_from(["3KiB", "12KiB", "40KiB", "4MiB"]),
)
@settings(max_examples=150, deadline=None)
def test_random_batches_with_common_beginnings(schedule, pages, chunk, max_seqs, warm):
    monkey = pytest.MonkeyPatch()
    monkey.setattr(prefix, "BLOCK_TOKENS", BLOCK)
    engine = tiny_engine(
        DECODER,
        tiers=TierConfig(warm=warm, hot=hot_bytes(pages * DECODER.config.num_kv_heads)),
        prefill_chunk=chunk,
        max_batch_tokens=max(chunk, max_seqs),
        max_seqs=max_seqs,
    )
    monkey.undo()
    collector, asked = Collector(), {}
    for command in schedule:
        match command:
            case ("add", document, length, own, name, n):
                ids = prompt(50, seed=document)[:length] + prompt(own + 1, seed=60 + own)
                for number in engine.add(ids, greedy(6, n=n), cache=CACHES[name]):
                    asked[number] = (ids, name)
            case ("step", count):
                for _ in range(count):
                    collector.take(engine.step())
            case ("abort", which) if asked:
                engine.abort([*asked][which % len(asked)])
    drain(engine, collector)
    assert set(collector.finished) == set(asked)
    for number, (ids, name) in asked.items():
        if collector.reason(number) == "length":
            assert collector.tokens[number] == alone(ids, name, chunk)
    assert engine.store.pool.bytes_in_use == 0
    engine.storage.tiers.check()
    assert not any(place.owners for place in engine.storage.tiers._places.values())
