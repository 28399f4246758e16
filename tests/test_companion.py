"""What is kept of a prompt besides its rows, so that a policy judges a prompt that was found as one that was
computed."""

from __future__ import annotations

import pytest
import torch
from tiny import TINY

from minikv.cache.companion import Companion, Tape, Traces
from minikv.cache.evidence import Recorder
from minikv.cache.policies.base import Evidence
from minikv.cache.tiers.encode import Encoder
from minikv.cache.tiers.span import Owner, Span, owner_key, raw_span
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

BLOCK = 8
SHAPE = (2, 6, 16)
EVIDENCE = {
    "window": (Evidence(window=5, residual_norms=True), True),
    "long window": (Evidence(window=20, residual_norms=True), True),
    "statistics": (Evidence(query_statistics=True), False),
    "future": (Evidence(future=6), False),
    "surprisal": (Evidence(surprisal=True), False),
    "all": (
        Evidence(window=5, query_statistics=True, surprisal=True, future=9, residual_norms=True),
        True,
    ),
    "all, exact": (Evidence(window=5, query_statistics=True, surprisal=True, future=9), False),
}


def feed(recorder, start, end, size, data, tape=None):
    """Give a recorder the tokens [start, end), in chunks that end with a block."""
    queries, norms, surprisal = data
    while start < end:
        count = min(size, BLOCK - start % BLOCK, end - start)
        rows = recorder.wanted_rows(start, count)
        for taker in [recorder] if tape is None else [recorder, tape]:
            if recorder.wants_surprisal:
                taker.add_surprisal(start + 1, surprisal[start + 1 : start + count + 1])
        if rows is not None:
            at = rows + start
            recorder.add(at, queries[:, at], at + 1, norms[:, at])
            if tape is not None:
                tape.add(at, queries[:, at], norms[:, at])
        start += count


@pytest.mark.parametrize("name", EVIDENCE)
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("other_size", [1, 5, 8])
def test_t7_a_recorder_is_left_as_if_all_had_been_computed(name, size, other_size):
    evidence, rolling = EVIDENCE[name]
    random = torch.Generator().manual_seed(0)
    data = (
        torch.randn(2, 90, 6, 16, generator=random),
        torch.rand(2, 90, generator=random),
        torch.rand(91, generator=random),
    )
    rope, content = Rope(RopeConfig(), 16), range(80)
    traces = Traces.of(evidence, content, rolling)
    assert traces is not None
    make = lambda: Recorder(evidence, TINY, rope, content, rolling=rolling)  # noqa: E731
    publisher, tape, blocks = make(), Tape(), []
    for start in range(0, 64, BLOCK):
        feed(publisher, start, start + BLOCK, size, data, tape)
        wanted = publisher.lasting_rows(start, BLOCK)
        block = tape.cut(start, start + BLOCK, wanted, traces)
        assert block is not None
        body = block.to_bytes()
        blocks.append(Companion.from_bytes(body, start, start + BLOCK, traces, SHAPE))
        with pytest.raises(ValueError, match="not of this block"):
            Companion.from_bytes(body + b"0000", start, start + BLOCK, traces, SHAPE)
    for found in (1, 5, 8):
        until = found * BLOCK - traces.surprisal
        taker, whole = make(), make()
        for index, block in enumerate(blocks[:found]):
            block.replay(taker, min((index + 1) * BLOCK, until), 90)
        reached, computed = until, 0
        # A window that ends before its block does is whole with the block's last row.
        for end in (until + (rolling and traces.surprisal), until + 3, 90):
            feed(taker, reached, end, other_size, data)
            feed(whole, computed, end, 100 - computed, data)
            reached = computed = end
            mine, theirs = taker.result(), whole.result()
            for field in ("queries", "query_positions", "mean", "covariance", "residual_norms", "future"):
                one, other = getattr(mine, field), getattr(theirs, field)
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other), field
            if evidence.surprisal:
                assert torch.equal(mine.surprisal, theirs.surprisal) or (
                    torch.equal(mine.surprisal.isnan(), theirs.surprisal.isnan())
                    and torch.equal(mine.surprisal[1:], theirs.surprisal[1:])
                )
    assert Traces.of(Evidence(window=5), content, False) is None


def test_what_depends_on_a_block_alone_has_the_same_bytes_however_it_was_computed():
    evidence, rolling = EVIDENCE["all"]
    data = torch.randn(2, 90, 6, 16), torch.rand(2, 90), torch.rand(91)
    traces = Traces.of(evidence, range(60), rolling)
    bodies = set()
    for size, end in ((1, 60), (3, 70), (8, 80)):
        recorder, tape = Recorder(evidence, TINY, Rope(RopeConfig(), 16), range(end), rolling=True), Tape()
        feed(recorder, 0, BLOCK, size, data, tape)
        bodies.add(tape.cut(0, BLOCK, recorder.lasting_rows(0, BLOCK), traces).to_bytes())
    assert len(bodies) == 1


def test_a_record_without_entries_is_a_span_that_no_encoder_reads():
    span = raw_span(Owner(owner_key("a"), 0), bytes(32), 8, b"anything")
    assert Span.from_bytes(span.to_bytes()) == span and span.header.num_tokens == 8
    with pytest.raises(AssertionError, match="no entries"):
        Encoder(bytes(32)).decode(span)


def test_estimates_of_another_kind_are_not_found(monkeypatch):
    with_it, without = (Traces.of(Evidence(surprisal=s, future=6), range(9), False) for s in (True, False))
    assert with_it is not None and without is not None
    before = with_it.name, without.name
    monkeypatch.setattr("minikv.cache.companion.ESTIMATE", "another")
    assert with_it.name != before[0]
    assert without.name == before[1]
