"""What the recorder keeps does not depend on chunks, and is what the queries were."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny import TINY, RandomWeights, prompt, tiny_decoder

from minikv.cache.evidence import Recorder
from minikv.cache.lanes import LaneStore
from minikv.cache.policies.base import Evidence
from minikv.cache.pool import PagePool
from minikv.cache.surprisal import token_surprisal
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope
from minikv.scheduler.batching import Rows, batch_of

HEADS = torch.tensor([[4, 1, 5], [0, 2, 3]])
EVERYTHING = Evidence(window=5, query_statistics=True, surprisal=True)


class Run:
    """Feeds a prompt to a tiny decoder chunk by chunk, as engine and probe do."""

    def __init__(self, decoder=None, pages=400):
        self.decoder = decoder or tiny_decoder()
        config = self.decoder.config
        pool = PagePool(pages, 4, config.head_dim, torch.float32)
        self.store = LaneStore(pool, 2, config.num_layers, config.num_kv_heads, 256)
        self.seq = self.store.open()
        self.done = 0

    def recorder(self, evidence, content, **options):
        return Recorder(evidence, self.decoder.config, self.decoder.rope, content, **options)

    def feed(self, ids, recorder, chunks, total=None):
        """Returns how many rows were captured."""
        captured = 0
        for count in chunks:
            part, first = ids[self.done : self.done + count], self.done
            wanted = recorder.wanted_rows(first, len(part))
            assert self.store.reserve(self.seq, len(part))
            rows = Rows(self.seq, part, first, total or len(ids), "none", wanted)
            batch = batch_of(self.store, [rows])
            hidden = self.decoder.hidden_states(batch)
            self.store.append(self.seq, len(part))
            self.done += len(part)
            if wanted is not None:
                captured += len(wanted)
                recorder.add(
                    batch.positions[wanted], batch.captured, batch.rope_lengths[wanted], batch.captured_norms
                )
            targets = torch.tensor(ids[first + 1 : first + 1 + len(part)])
            if recorder.wants_surprisal and len(targets):
                values = token_surprisal(
                    lambda rows, hidden=hidden: self.decoder.logits(hidden, rows),
                    torch.arange(len(targets)),
                    targets,
                )
                recorder.add_surprisal(first + 1, values)
        return captured


def recorded(evidence, content, chunks, ids=None, decoder=None, **options):
    run = Run(decoder)
    recorder = run.recorder(evidence, content, **options)
    run.feed(ids or prompt(60), recorder, chunks)
    return recorder.result()


def chunked(size, total=60):
    return [size] * (total // size) + ([total % size] if total % size else [])


@pytest.mark.parametrize("size", [1, 7, 16, 59])
def test_chunks_change_nothing_that_is_recorded(size):
    whole = recorded(EVERYTHING, range(52), [60])
    parts = recorded(EVERYTHING, range(52), chunked(size))
    assert parts.query_positions.tolist() == whole.query_positions.tolist() == [47, 48, 49, 50, 51]
    torch.testing.assert_close(parts.queries, whole.queries, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.covariance, whole.covariance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.surprisal, whole.surprisal, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_sums_are_the_same_bits_for_the_same_rows_whatever_the_chunks():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 700, 6, 16, generator=generator)
    rope = Rope(RopeConfig(), 16)
    results = []
    for sizes in ([700], [1] * 700, [300, 1, 399], [256, 256, 188]):
        recorder = Recorder(Evidence(query_statistics=True), TINY, rope, range(700))
        start = 0
        for size in sizes:
            recorder.add(torch.arange(start, start + size), rows[:, start : start + size])
            start += size
        results.append(recorder.result())
    for other in results[1:]:
        assert torch.equal(other.mean, results[0].mean)
        assert torch.equal(other.covariance, results[0].covariance)


def test_only_rows_that_somebody_wants_are_captured():
    run = Run()
    assert run.feed(prompt(60), run.recorder(Evidence(window=5), range(52)), chunked(8)) == 5
    run = Run()
    assert run.feed(prompt(60), run.recorder(Evidence(), range(52)), chunked(8)) == 0
    run = Run()
    # The first four tokens and the template's last eight do not count.
    assert run.feed(prompt(60), run.recorder(Evidence(query_statistics=True), range(52)), [60]) == 48


def test_statistics_of_a_long_content_are_taken_from_evenly_spaced_rows():
    recorder = Recorder(Evidence(query_statistics=True), TINY, Rope(RopeConfig(), 16), range(2000))
    rows = recorder.wanted_rows(0, 2000)
    assert 600 < len(rows) <= 768
    assert rows.diff().unique().tolist() == [3]
    parts = [recorder.wanted_rows(start, 100) + start for start in range(0, 2000, 100)]
    assert torch.equal(torch.cat(parts), rows)


def test_heads_are_those_asked_for_in_ascending_order():
    every = recorded(Evidence(window=5), range(60), [60])
    some = recorded(Evidence(window=5, heads=HEADS), range(60), [60])
    assert some.query_heads.tolist() == [[1, 4, 5], [0, 2, 3]]
    assert every.query_heads.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    for layer in range(2):
        assert torch.equal(some.queries[layer], every.queries[layer][some.query_heads[layer]])


ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig("linear", factor=2.0),
    "yarn": RopeConfig("yarn", factor=4.0, original_context=32, attention_factor=1.7),
    "dynamic": RopeConfig("dynamic", factor=4.0, original_context=32),
}


@pytest.mark.parametrize("kind", ROPES)
def test_statistics_are_those_of_the_unrotated_queries(kind):
    """Against queries made from the weights alone, in the first layer, where they are plain."""
    decoder = tiny_decoder(rope=ROPES[kind])
    ids = prompt(60)
    found = recorded(Evidence(query_statistics=True), range(52), chunked(16), ids, decoder)
    config, weights = decoder.config, RandomWeights(decoder.config)
    hidden = weights.load("model.embed_tokens.weight")[ids].double()
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    normed = normed * weights.load("model.layers.0.input_layernorm.weight").double()
    queries = normed @ weights.load("model.layers.0.self_attn.q_proj.weight").double().t()
    queries = queries.view(60, 6, 16)[4:52]
    mean = queries.mean(dim=0)
    centred = queries - mean
    covariance = torch.einsum("thd,the->hde", centred, centred) / len(queries)
    torch.testing.assert_close(found.mean[0].double(), mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.covariance[0].double(), covariance, rtol=1e-4, atol=1e-4)


def test_surprisal_is_the_models_own_log_probability():
    ids, decoder = prompt(60), tiny_decoder()
    found = recorded(Evidence(surprisal=True), range(60), chunked(16), ids, decoder).surprisal
    run = Run(decoder)
    assert run.store.reserve(run.seq, 60)
    batch = batch_of(run.store, [Rows(run.seq, ids, 0, 60, "all")])
    logits = decoder.forward(batch)
    expected = -logits.log_softmax(-1)[torch.arange(59), torch.tensor(ids[1:])]
    assert found[0].isnan()
    torch.testing.assert_close(found[1:], expected, rtol=1e-4, atol=1e-4)


def test_a_copy_goes_on_with_a_longer_content_and_leaves_the_first_alone():
    ids = prompt(60)
    run = Run()
    first = run.recorder(EVERYTHING, range(40))
    run.feed(ids[:40], first, [25, 15], total=60)
    before = first.result()
    longer = first.extended(range(43))
    run.feed(ids, longer, [20])
    whole = recorded(EVERYTHING, range(43), [60], ids)
    found = longer.result()
    assert found.query_positions.tolist() == [38, 39, 40, 41, 42]
    torch.testing.assert_close(found.queries, whole.queries, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-4, atol=1e-5)
    assert first.result().query_positions.tolist() == before.query_positions.tolist()
    assert torch.equal(first.result().mean, before.mean)
    assert len(first.result().surprisal) == 40


def test_tokens_that_the_model_produced_count_again_behind_a_templates_suffix():
    found = recorded(Evidence(window=5), range(40), chunked(7), resumes=57)
    assert found.query_positions.tolist() == [38, 39, 57, 58, 59]


def test_a_rolling_window_can_be_read_after_any_chunk():
    run = Run()
    recorder = run.recorder(Evidence(window=5), range(60), rolling=True)
    for end in (3, 10, 12):
        run.feed(prompt(60), recorder, [end - run.done])
        assert recorder.result().query_positions.tolist() == list(range(max(0, end - 5), end))


def test_nothing_recorded_is_said_by_none():
    run = Run()
    recorder = run.recorder(Evidence(window=5, query_statistics=True), range(50, 60))
    run.feed(prompt(60), recorder, [20])
    found = recorder.result()
    assert (found.queries, found.mean, found.covariance) == (None, None, None)
    assert not found.serves(recorder.evidence)
    assert found.serves(Evidence())


def test_the_next_turn_goes_on_and_fills_a_short_window_with_rows_of_the_turn_before():
    run = Run()
    first = run.recorder(Evidence(window=5), range(30))
    run.feed(prompt(60), first, [40])
    second = first.continued(range(40, 43), None, False)
    run.feed(prompt(60), second, [20])
    assert second.result().query_positions.tolist() == [28, 29, 40, 41, 42]


def test_what_is_taken_back_leaves_the_window_and_the_surprisal():
    run = Run(None)
    recorder = run.recorder(Evidence(window=5, surprisal=True), range(60))
    run.feed(prompt(60), recorder, chunked(7))
    recorder.forget(57)
    found = recorder.result()
    assert found.query_positions.tolist() == [55, 56]
    assert found.queries.shape[2] == 2
    assert len(found.surprisal) == 57
    recorder.forget(3)
    assert recorder.result().queries is None


# Queries for the future, and norms


@pytest.mark.parametrize("count", [4, 10, 100])
def test_queries_for_the_future_do_not_depend_on_chunks(count):
    evidence = Evidence(window=5, future=count)
    whole = recorded(evidence, range(52), [60])
    assert whole.future.shape == (2, 6, min(count, 48), 16)
    for size in (1, 7, 16, 59):
        parts = recorded(evidence, range(52), chunked(size))
        torch.testing.assert_close(parts.future, whole.future, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts.queries, whole.queries, rtol=1e-4, atol=1e-5)


def test_queries_for_the_future_are_spread_over_the_content_and_few_are_captured():
    ids = prompt(60)
    every = recorded(Evidence(future=1000), range(60), [60], ids).future
    some = recorded(Evidence(future=8), range(60), [60], ids).future
    places = [int((every - some[:, :, i : i + 1]).abs().sum(dim=(0, 1, 3)).argmin()) for i in range(8)]
    assert places == sorted(set(places))
    assert places[0] < 10 and places[-1] > 45
    assert max(b - a for a, b in pairwise(places)) <= 10
    run = Run()
    assert run.feed(prompt(60), run.recorder(Evidence(future=8), range(60)), [60]) <= 16


@pytest.mark.parametrize("kind", ROPES)
def test_queries_for_the_future_are_unrotated(kind):
    decoder = tiny_decoder(rope=ROPES[kind])
    found = recorded(Evidence(future=100, query_statistics=True), range(60), chunked(16), None, decoder)
    torch.testing.assert_close(found.future.mean(dim=2), found.mean, rtol=1e-4, atol=1e-4)


def test_queries_for_the_future_go_on_and_are_taken_back_with_their_tokens():
    ids = prompt(60)
    run = Run()
    first = run.recorder(Evidence(future=100), range(30))
    run.feed(ids, first, [30])
    longer = first.extended(range(60))
    run.feed(ids, longer, [30])
    whole = recorded(Evidence(future=100), range(60), [60], ids)
    torch.testing.assert_close(longer.result().future, whole.future, rtol=1e-4, atol=1e-5)
    assert first.result().future.shape[2] == 26
    longer.forget(34)
    assert longer.result().future.shape[2] == 30
    longer.forget(0)
    assert longer.result().future is None
    assert not longer.result().serves(Evidence(future=1))


def test_residual_norms_are_those_of_the_windows_rows_before_each_layer():
    decoder, ids = tiny_decoder(), prompt(60)
    run = Run(decoder)
    recorder = run.recorder(Evidence(window=5, residual_norms=True), range(52))
    run.feed(ids, recorder, chunked(7))
    found = recorder.result()
    assert found.residual_norms.shape == (2, 5)
    first = RandomWeights(decoder.config).load("model.embed_tokens.weight")[ids[47:52]].norm(dim=1)
    torch.testing.assert_close(found.residual_norms[0], first)
    recorder.forget(50)
    assert recorder.result().residual_norms.shape == (2, 3)
    plain = recorded(Evidence(window=5), range(52), [60], ids)
    assert plain.residual_norms is None and not plain.serves(Evidence(window=5, residual_norms=True))


def test_residual_norms_equal_those_of_a_plain_forward_pass():
    """In every layer, against the layers written out."""
    decoder, ids = tiny_decoder(), prompt(40)
    found = recorded(Evidence(window=5, residual_norms=True), range(40), [40], ids, decoder)
    hidden = decoder.embedding.lookup(torch.tensor(ids))
    for layer, norms in zip(decoder.layers, found.residual_norms, strict=True):
        torch.testing.assert_close(norms, hidden[-5:].norm(dim=1), rtol=1e-4, atol=1e-4)
        hidden = plain_layer(decoder, layer, hidden)


def plain_layer(decoder, layer, hidden):
    config, count = decoder.config, len(hidden)
    qkv = layer.qkv(decoder._normalised(hidden)).view(count, -1, config.head_dim)
    q, k, v = qkv.split([config.num_query_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    cos, sin = decoder.rope.cos_sin(torch.arange(count))

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    k, v = (x.repeat_interleave(config.group_size, dim=1).transpose(0, 1) for x in (turned(k), v))
    logits = turned(q).transpose(0, 1) @ k.transpose(1, 2) / config.head_dim**0.5
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    out = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    hidden = hidden + layer.output(out.transpose(0, 1).reshape(count, -1))
    gate, up = layer.gate_up(decoder._normalised(hidden)).chunk(2, dim=-1)
    return hidden + layer.down(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("evidence", [Evidence(query_statistics=True), Evidence(window=4, future=8)])
def test_a_resumed_recorder_still_knows_how_far_it_has_seen(evidence):
    decoder, ids = tiny_decoder(), prompt(60)
    run = Run(decoder)
    recorder = run.recorder(evidence, range(60))
    run.feed(ids, recorder, chunked(7))
    again = Run(decoder).recorder(evidence, range(60))
    again.resume(recorder.state())
    for each in (recorder, again):
        assert each.keeps_traces(59) and not each.keeps_traces(60)


def test_rows_captured_for_another_reason_do_not_wait_for_the_window():
    run = Run(tiny_decoder())
    recorder = run.recorder(Evidence(window=4, future=8), range(60))
    run.feed(prompt(60), recorder, chunked(7))
    assert recorder.state()["window.positions"].tolist() == [56, 57, 58, 59]
