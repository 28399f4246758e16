"""Surprisal from a part of the vocabulary: near to the exact one, and the same however it is asked for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
from pretended_device import DEVICE, pretended_device
from tiny import TINY, RandomWeights, drain, greedy, prompt

from minikv.cache.evidence import Recorder
from minikv.cache.policies.base import Evidence
from minikv.cache.spans.segments import Cutting, anchors
from minikv.cache.surprisal import estimated_surprisal, frequent, token_surprisal
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.evals.text import reference_prose
from minikv.kernels.cpu.backend import CpuBackend
from minikv.kernels.cpu.library import LibraryMissing, load_library
from minikv.kernels.torch_cpu import TorchBackend
from minikv.models.decoder import Decoder
from minikv.models.packed_decoder import PackedDecoder
from minikv.probe import Probe

try:
    load_library()
    PACKED = ["q4", "q8", "f32", "bf16", "f16"]
except LibraryMissing:
    PACKED = []

VOCAB = 6001  # more than are always in the sum, and no whole number of groups
LARGE = replace(TINY, vocab_size=VOCAB, hidden_size=64, intermediate_size=96, max_context=1024)
needs_kernels = pytest.mark.skipif(not PACKED, reason="the compiled kernels are not here")


def packed(kind, threads=2, **changes):
    config = replace(LARGE, **changes)
    return PackedDecoder(config, RandomWeights(config), CpuBackend(threads), kind)


def plain(kind="f32", **changes):
    config = replace(LARGE, **changes)
    return Decoder(config, RandomWeights(config), TorchBackend(), kind)


DECODERS = [
    *(pytest.param(packed, kind, {}, id=f"packed {kind}") for kind in PACKED),
    *(pytest.param(packed, kind, {"tied_embeddings": False}, id="packed, untied") for kind in PACKED[:1]),
    pytest.param(plain, "f32", {}, id="torch"),
    pytest.param(plain, "q8", {}, id="torch, 8 bits"),
    pytest.param(plain, "f32", {"tied_embeddings": False}, id="torch, untied"),
    pytest.param(plain, "f16", {}, id="a device's"),
    pytest.param(plain, "f16", {"tied_embeddings": False}, id="a device's, untied"),
]


def states(decoder, rows):
    """Made-up hidden states as a decoder gives them."""
    hidden = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    return decoder._normalised(decoder.basis.hidden(hidden)) if isinstance(decoder, Decoder) else hidden


def table(rows, vocab=VOCAB, seed=0):
    """Made-up logits, and the function that shows some of them."""
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return logits, lambda some, ids: logits[some][:, ids]


def text_of(count, seed=0):
    """Tokens of which many come again."""
    some = prompt(count // 3, seed=seed, vocab=VOCAB)
    picked = torch.randint(0, len(some), (count,), generator=torch.Generator().manual_seed(seed))
    return [some[i] for i in picked.tolist()]


def by_hand(logits, tokens, start):
    """One token after the other, over a set of ids for each."""
    found = []
    for row, at in zip(logits, range(start, len(tokens)), strict=True):
        ids = {*range(4096), *tokens[max(0, at - 255) : at + 1]}
        found.append(torch.logsumexp(row[sorted(ids)], 0) - row[tokens[at]])
    return torch.stack(found)


@pytest.mark.parametrize("start", [1, 7, 255, 256, 257, 300])
def test_the_sum_is_over_frequent_ids_and_the_last_words(start):
    tokens = text_of(600)
    logits, logits_of = table(len(tokens) - start)
    found = estimated_surprisal(logits_of, VOCAB, torch.arange(len(logits)), tokens, start)
    torch.testing.assert_close(found, by_hand(logits, tokens, start), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [8, 97, 4096])
def test_a_small_vocabulary_gives_the_exact_values(vocab):
    tokens = prompt(300, vocab=vocab)
    logits, logits_of = table(299, vocab)
    rows, targets = torch.arange(299), torch.tensor(tokens[1:])
    found = estimated_surprisal(logits_of, vocab, rows, tokens, 1)
    assert torch.equal(found, token_surprisal(lambda some: logits[some], rows, targets))
    torch.testing.assert_close(found, -logits.log_softmax(1)[rows, targets])


def test_a_twelfth_of_a_large_vocabulary_is_always_in_the_sum():
    assert [frequent(size) for size in (97, 32_000, 49_152)] == [4096, 4096, 4096]
    assert frequent(151_936) == 12_672
    asked = set()

    def logits_of(rows, ids):
        asked.add(len(ids))
        return torch.zeros(len(rows), len(ids))

    estimated_surprisal(logits_of, 151_936, torch.arange(50), [5] * 51, 1)
    assert asked == {12_672, 0}


def test_there_may_be_no_row_and_no_word_that_is_not_frequent():
    logits, logits_of = table(20)
    assert len(estimated_surprisal(logits_of, VOCAB, torch.arange(0), [1, 2, 3], 3)) == 0
    found = estimated_surprisal(logits_of, VOCAB, torch.arange(20), [*range(21)], 1)
    torch.testing.assert_close(found, by_hand(logits, [*range(21)], 1), rtol=1e-5, atol=1e-5)


def test_exact_logits_are_taken_a_few_rows_at_a_time():
    asked = []

    def logits_of(rows):
        asked.append(len(rows))
        return torch.zeros(len(rows), 8)

    values = token_surprisal(logits_of, torch.arange(150), torch.zeros(150, dtype=torch.int64))
    assert max(asked) <= 64
    torch.testing.assert_close(values, torch.full((150,), 8.0).log())
    assert len(token_surprisal(logits_of, torch.arange(0), torch.arange(0))) == 0


@pytest.mark.parametrize(("make", "kind", "changes"), DECODERS)
def test_some_logits_are_those_of_the_whole_head(make, kind, changes):
    decoder = make(kind, **changes)
    hidden, rows = states(decoder, 40), torch.tensor([3, 0, 39, 7, 8])
    every = decoder.logits(hidden, rows)
    for ids in ([0], [*range(4096)], [VOCAB - 1], [2, 3, 4800, 5000, VOCAB - 2], [*range(VOCAB)], []):
        found = decoder.some_logits(hidden, rows, torch.tensor(ids, dtype=torch.int64))
        expected = every[:, ids]
        if isinstance(decoder, PackedDecoder):
            assert torch.equal(found, expected)
        elif kind in ("f32", "f16"):
            error = 1e-4 if kind == "f32" else 4e-3
            torch.testing.assert_close(found, expected, rtol=error, atol=error)
        else:  # the table of inputs is not rounded to 8 bits
            assert ((found - expected).abs() < 0.1 * every.std()).all()


@pytest.mark.parametrize("vocab", [VOCAB, 97])
def test_of_logits_on_a_device_the_sums_are_taken_there(vocab, monkeypatch):
    tokens = prompt(300, vocab=vocab)
    logits, logits_of = table(280, vocab)
    expected = estimated_surprisal(logits_of, vocab, torch.arange(280), tokens, 20)
    with pretended_device(monkeypatch, {}):
        there = logits.to(DEVICE)
        found = estimated_surprisal(
            lambda some, ids: there[some][:, ids], vocab, torch.arange(280), tokens, 20
        )
    assert type(found) is torch.Tensor and torch.equal(found, expected)


class Heard:
    """All surprisal that recorders get of prompts, by the prompt's length."""

    def __init__(self, monkeypatch):
        self.values = defaultdict(dict)
        add = Recorder.add_surprisal

        def hear(recorder, first, values):
            of_prompt = self.values[recorder.content.stop]
            of_prompt.update(enumerate(values.tolist(), first))
            add(recorder, first, values)

        monkeypatch.setattr(Recorder, "add_surprisal", hear)


@needs_kernels
@pytest.mark.parametrize("kind", PACKED)
def test_chunks_batch_mates_and_threads_change_no_bit(kind, monkeypatch):
    prompts = [text_of(count, seed=count) for count in (600, 350, 90)]
    cache = CacheConfig(policy="sekv", budget=64, sinks=2, recent=4, window=6)

    heard = Heard(monkeypatch)

    def said(threads, chunk, together):
        heard.values.clear()
        config = EngineConfig(prefill_chunk=chunk, max_batch_tokens=600, tiers=TierConfig(warm="64MiB"))
        engine = Engine(packed(kind, threads), config, torch.float16, 32, (), keys_transposed=True)
        spoken = {}
        for some in [prompts] if together else [[one] for one in prompts]:
            ids = [engine.add(one, greedy(8), cache=cache)[0] for one in some]
            out = drain(engine).tokens
            spoken |= {len(one): out[i] for one, i in zip(some, ids, strict=True)}
        return dict(heard.values), spoken

    alone = said(1, 600, False)
    assert sorted(alone[0]) == [90, 350, 600]
    assert all(len(values) == length - 1 for length, values in alone[0].items())
    for threads, chunk, together in ((1, 37, False), (2, 256, True), (2, 64, True)):
        assert said(threads, chunk, together) == alone


@needs_kernels
def test_a_prompt_whose_beginning_is_found_has_the_same_values(monkeypatch):
    heard, tokens = Heard(monkeypatch), text_of(600)
    config = EngineConfig(tiers=TierConfig(warm="64MiB"))
    engine = Engine(packed("q4"), config, torch.float16, 32, (), keys_transposed=True)
    cache, values = CacheConfig(policy="sekv", budget=64, sinks=2, recent=4, window=6), []
    for _ in range(2):
        engine.add(tokens, greedy(4), cache=cache)
        drain(engine)
        values.append(dict(heard.values.pop(600)))
    assert values[0] == values[1]
    assert len(values[0]) == 599
    assert engine.storage.prefixes.prefix_tokens >= 256


@pytest.mark.parametrize("kind", ["f32", "q8"])
def test_plain_torch_gives_nearly_the_same_in_chunks_of_any_size(kind):
    decoder, tokens = plain(kind), text_of(500)
    hidden = states(decoder, 499)
    logits_of, rows = partial(decoder.some_logits, hidden), torch.arange(499)
    whole = estimated_surprisal(logits_of, VOCAB, rows, tokens, 1)
    parts = [estimated_surprisal(logits_of, VOCAB, some, tokens, int(some[0]) + 1) for some in rows.split(70)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def correlation(a, b):
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


@needs_kernels
def test_the_built_in_models_surprisal_and_anchors_are_nearly_the_exact_ones(smollm_path):
    probe = Probe.load(str(smollm_path), max_context=1024, max_seqs=1)
    ids = probe.tokenizer.encode(reference_prose())[:900]
    recorder, seq = probe.record(Evidence(surprisal=True), range(900)), probe.open()
    logits = probe.feed(seq, ids, "all", recorder)
    found = recorder.result().surprisal[1:]
    exact = -logits[:-1].log_softmax(1)[torch.arange(899), torch.tensor(ids[1:])]
    assert correlation(found, exact) > 0.99
    assert correlation(found.argsort().argsort().float(), exact.argsort().argsort().float()) > 0.985
    every = torch.ones(1, 899, dtype=torch.bool)
    ours, theirs = (anchors(values[None], every, Cutting()) for values in (found, exact))
    both = int((ours & theirs).sum())
    assert both > 0.9 * max(int(ours.sum()), int(theirs.sum())) > 40
