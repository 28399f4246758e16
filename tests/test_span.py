"""Records of spans: bit-equal where exact, within the error elsewhere, and refused when a bit is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiering import DIM, EXACT, KV_DTYPES, MODEL, ROPE, entries, same, span

from minikv.cache.tiers.encode import Encoder, lengths_of
from minikv.cache.tiers.forms import floats_of, relative_error
from minikv.cache.tiers.span import (
    FORMS,
    HEADER_BYTES,
    Header,
    Owner,
    Span,
    SpanFault,
    fingerprint_of,
    owner_key,
)
from minikv.models.config import RopeConfig
from minikv.models.rope import Rope

OWNER = Owner(owner_key("test"), 3, 1)


def errors(one, other):
    """Relative errors of keys and values, lane by lane."""
    found = []
    for stored, scales in (("keys", "key_scales"), ("values", "value_scales")):
        pair = [floats_of(getattr(e.rows, stored), getattr(e.rows, scales)) for e in (one, other)]
        lanes = [rows.split(one.lengths.tolist()) for rows in pair]
        found += [relative_error(a, b) for a, b in zip(*lanes, strict=True)]
    return found


def test_a_body_gets_its_digest_when_its_record_is_asked_for():
    made = EXACT.encode(entries((3, 2), torch.float16), OWNER, 9)
    assert not made.header.body_digest
    made.verify()
    read = Span.from_bytes(made.to_bytes())
    assert read.header.body_digest == made.header.body_digest != b""
    changed = Span(made.header, made.body[:-1] + bytes([made.body[-1] ^ 1]))
    with pytest.raises(SpanFault):
        changed.verify()
    # What is made of another's header is not taken for it.
    assert Span.from_bytes(Span.of(made.header, changed.body).to_bytes()).body == changed.body


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_exact_rows_come_back_bit_for_bit_with_everything_that_belongs_to_them(dtype, merged):
    rows = entries((7, 0, 4), dtype, merged=merged)
    made = EXACT.encode(rows, OWNER, 40, merged_end=9)
    read = Span.from_bytes(made.to_bytes())
    assert read == made and len(made.to_bytes()) == made.nbytes == HEADER_BYTES + len(made.body)
    assert same(EXACT.decode(read), rows)
    assert lengths_of(read).tolist() == [7, 0, 4]
    header = read.header
    assert (header.owner, header.num_tokens, header.merged_end, header.error) == (OWNER, 40, 9, 0.0)
    assert (header.key_form, header.value_form, header.dtype) == ("exact", "exact", dtype)
    # Counts and masses take room only where they say something.
    assert (header.has_counts, header.has_mass) == (merged, merged)


def test_rows_that_are_not_numbers_stay_what_they_are():
    rows = entries(dtype=torch.float16)
    rows.rows.keys[0, 0], rows.rows.values[1, 1] = float("nan"), float("inf")
    found = Encoder(MODEL, ROPE, most_error=0.5).decode(
        Encoder(MODEL, ROPE, most_error=0.5).encode(rows, OWNER, 40)
    )
    for own, other in zip(rows.rows[:2], found.rows[:2], strict=True):
        assert torch.equal(own.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("most_error", [0.0, 1e-6, 0.004, 0.02, 0.1, 0.5])
def test_each_form_keeps_within_the_error_and_takes_no_more_than_the_rows(form, dtype, most_error):
    rows = entries((150, 90), dtype, rank=4)
    encoder = Encoder(MODEL, ROPE, most_error, (form,))
    made, raw = encoder.encode(rows, OWNER, 600), EXACT.encode(rows, OWNER, 600)
    found = encoder.decode(made)
    assert made.nbytes <= raw.nbytes
    worst = max(errors(rows, found))
    assert worst <= most_error and made.header.error == pytest.approx(worst)
    assert {made.header.key_form, made.header.value_form} <= {form, "exact"}
    if worst == 0:
        assert same(found, rows)
    # All but keys and values is exact in every form.
    assert torch.equal(found.rows.positions, rows.rows.positions)
    assert torch.equal(found.rows.log_mass, rows.rows.log_mass) and torch.equal(found.counts, rows.counts)
    if most_error == 0.1 and (form, dtype) != ("int8", torch.int8):
        assert (made.header.key_form, made.header.value_form) == (form, form)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_cheapest_form_that_keeps_within_the_error_is_taken(dtype):
    for options in ({"rank": 4, "lengths": (200, 180)}, {"lengths": (200, 180)}, {"lengths": (5, 3)}):
        rows = entries(dtype=dtype, **options)
        sizes = {form: Encoder(MODEL, ROPE, 0.05, (form,)).encode(rows, OWNER, 800).nbytes for form in FORMS}
        made = Encoder(MODEL, ROPE, 0.05).encode(rows, OWNER, 800)
        assert made.nbytes == min(sizes.values())
        if "rank" in options:
            assert made.header.key_form == made.header.value_form == "lowrank"
            assert made.nbytes < 0.55 * EXACT.encode(rows, OWNER, 800).nbytes
        else:
            assert made.header.key_form == ("exact" if dtype == torch.int8 else "int8")


def test_keys_and_values_each_get_a_form_of_their_own():
    near, far = entries((200,), rank=3), entries((200,), seed=1)
    rows = replace(near, rows=near.rows._replace(values=far.rows.values))
    made = Encoder(MODEL, ROPE, 0.05).encode(rows, OWNER, 800)
    assert (made.header.key_form, made.header.value_form) == ("lowrank", "int8")


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig("dynamic", factor=2.0, original_context=64),
        RopeConfig("yarn", factor=4.0, original_context=64),
        RopeConfig("linear", factor=2.0),
    ],
    ids=lambda rope: rope.kind,
)
def test_keys_are_factored_as_they_were_before_they_were_rotated(rope):
    from minikv.cache.tiers.encode import turning

    plain = torch.randn(300, 3) @ torch.randn(3, DIM)
    model = Rope(rope, DIM)
    rows = entries((300,))
    keys = turning(model, rows.rows.positions, [300], 1200)(plain, 0, False)
    rows = replace(rows, rows=rows.rows._replace(keys=keys))
    encoder = Encoder(MODEL, model, 0.02)
    made = encoder.encode(rows, OWNER, 1200)
    assert made.header.key_form == "lowrank"
    assert max(errors(rows, encoder.decode(made))) <= 0.02
    # Rotated, they lie near no few directions.
    unturned = Encoder(MODEL, None, 0.02).encode(rows, OWNER, 1200)
    assert unturned.header.key_form == "int8"


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any),
    st.sampled_from(KV_DTYPES),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([0.0, 0.003, 0.03, 0.3]),
    st.integers(0, 1000),
)
def test_any_rows_come_back_within_the_error(lengths, dtype, rank, most_error, seed):
    rows = entries(tuple(lengths), dtype, seed, rank)
    encoder = Encoder(MODEL, ROPE, most_error)
    made = encoder.encode(rows, OWNER, 400)
    assert max(errors(rows, encoder.decode(Span.from_bytes(made.to_bytes())))) <= most_error
    assert made.nbytes <= EXACT.encode(rows, OWNER, 400).nbytes


def test_a_span_with_any_bit_flipped_is_refused():
    data = span(lengths=(3, 2), dtype=torch.float16).to_bytes()
    for place in range(len(data)):
        for bit in (1, 128):
            wrong = bytearray(data)
            wrong[place] ^= bit
            with pytest.raises(SpanFault):
                Span.from_bytes(bytes(wrong))


def test_a_span_cut_short_or_with_bytes_too_many_is_refused():
    data = span(lengths=(3, 2)).to_bytes()
    for size in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(SpanFault):
            Span.from_bytes(data[:size])
    with pytest.raises(SpanFault):
        Span.from_bytes(data + b"\0")


def test_a_span_of_a_newer_format_is_refused(monkeypatch):
    monkeypatch.setattr("minikv.cache.tiers.span.VERSION", 2)
    data = span().to_bytes()
    monkeypatch.undo()
    with pytest.raises(SpanFault, match="format 2"):
        Header.from_bytes(data)


def test_the_fingerprint_tells_models_dtypes_and_rotations_apart():
    known = {
        fingerprint_of(model, dtype, rope)
        for model in ("a", "b")
        for dtype in KV_DTYPES
        for rope in (RopeConfig(), RopeConfig(theta=5e5), RopeConfig(frequency_factors=(1.0, 2.0)))
    }
    assert len(known) == 24
    assert fingerprint_of("a", torch.int8, RopeConfig()) == fingerprint_of("a", torch.int8, RopeConfig())


def test_owner_keys_tell_their_parts_apart():
    assert owner_key("ab", "c") != owner_key("a", "bc")
    assert owner_key("ab", b"\1\2") == owner_key(b"ab", b"\1\2")
    assert len(owner_key()) == 16
