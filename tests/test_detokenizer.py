"""Incremental decoding: the pieces are whole code points and add up to the full decode."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BACKENDS, texts, tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from minikv.text.detokenizer import IncrementalDetokenizer
from minikv.text.tokenizer import Tokenizer

FAMILIES = sorted(BACKENDS)
TOKENIZERS = {family: tiny_tokenizer(family) for family in FAMILIES}


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, prompt or [])
    return [*(stream.add(token_id) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts)
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_text_add_up_to_the_full_decode(family, text):
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode_rendered(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        # Valid text never shows a replacement character, not even for a moment.
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_pieces_of_random_ids_with_invalid_bytes_add_up_to_the_full_decode(family, data):
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(data=st.binary(max_size=12))
@settings(max_examples=400, deadline=None)
def test_any_bytes_one_per_token_add_up_to_the_full_decode(data):
    tokenizer = TOKENIZERS["byte_level"]
    byte_ids = _single_byte_ids(tokenizer)
    ids = [byte_ids[byte] for byte in data]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == data.decode("utf-8", "replace")


def _single_byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    char = {byte: chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)}
    return {byte: tokenizer.backend.token_to_id(char[byte]) for byte in range(256)}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_emoji_comes_out_whole_with_its_last_token(family):
    tokenizer = TOKENIZERS[family]
    ids = [*tokenizer.encode_rendered("😀"), tokenizer.encode_rendered("a")[-1]]
    pieces = pieces_of(tokenizer, ids)
    assert [piece for piece in pieces if piece and "😀" in piece]
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_at_the_end_comes_out_as_the_full_decode_prints_it():
    tokenizer = TOKENIZERS["byte_level"]
    byte_ids = _single_byte_ids(tokenizer)
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.add(byte_ids[byte]) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_text_streams_token_by_token_where_nothing_is_open():
    for family in FAMILIES:
        tokenizer = TOKENIZERS[family]
        ids = tokenizer.encode_rendered("The lazy dog")
        assert all(pieces_of(tokenizer, ids)[1:-1])


def test_valid_bytes_followed_by_a_stray_one_wait_for_the_end_of_their_run():
    tokenizer = TOKENIZERS["sentencepiece"]
    byte_ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "世".encode() + b"\xff"]
    # The decoder turns the whole run into U+FFFD because of its last byte.
    assert tokenizer.decode(byte_ids) == "\ufffd" * 4
    assert pieces_of(tokenizer, byte_ids) == ["", "", "", "", "\ufffd" * 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_special_and_unknown_tokens_are_left_out(family):
    tokenizer = TOKENIZERS[family]
    word = tokenizer.encode_rendered("dog")
    assert pieces_of(tokenizer, [2, 10_000_000, -1, 2]) == ["", "", "", "", ""]
    assert "".join(pieces_of(tokenizer, [2, *word, 2])) == "dog"


def test_with_a_prompt_the_text_continues_it_and_keeps_its_first_space():
    for family in ("metaspace", "sentencepiece"):
        tokenizer = TOKENIZERS[family]
        prompt, ids = tokenizer.encode_rendered("The lazy"), tokenizer.encode_rendered("dog")
        assert "".join(pieces_of(tokenizer, ids)) == "dog"
        assert "".join(pieces_of(tokenizer, ids, prompt)) == " dog"


@pytest.mark.parametrize("family", FAMILIES)
@given(prompt=texts, text=texts)
@settings(max_examples=60, deadline=None)
def test_prompt_and_continuation_add_up_to_the_decode_of_both(family, prompt, text):
    tokenizer = TOKENIZERS[family]
    prompt_ids = tokenizer.encode_rendered(prompt + "The")
    ids = tokenizer.encode_rendered(text)
    joined = tokenizer.decode(prompt_ids) + "".join(pieces_of(tokenizer, ids, prompt_ids))
    assert joined == tokenizer.decode(prompt_ids + ids)


def test_a_decoder_that_is_not_known_gives_its_text_at_the_end():
    backend = Backend.from_str(BACKENDS["metaspace"]().to_str())
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=())
    ids = tokenizer.encode_rendered("The lazy dog")
    pieces = pieces_of(tokenizer, ids)
    assert pieces[-1] == tokenizer.decode(ids)
    assert not any(pieces[:-1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", ["words", "bytes"])
def test_the_cost_per_token_does_not_grow_with_the_text(family, start):
    tokenizer = TOKENIZERS[family]
    head = tokenizer.encode_rendered("世" * 2000 if start == "bytes" else "a")
    stream = IncrementalDetokenizer(tokenizer)
    for token_id in head:
        stream.add(token_id)
    word = tokenizer.encode_rendered("The lazy dog")

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(100):
            for token_id in word:
                stream.add(token_id)
        return time.perf_counter() - began

    early = min(seconds() for _ in range(3))
    for _ in range(20):
        seconds()
    assert min(seconds() for _ in range(3)) < 5 * early + 0.01
    # 100 words of a few tokens, far from what decoding thousands of tokens each time would take
    assert early < 0.5


def test_the_real_model_vocabulary_keeps_the_invariant(smollm_path):
    from minikv.models.sources import open_model, resolve_model

    opened = open_model(resolve_model(str(smollm_path)))
    tokenizer = opened.tokenizer
    opened.weights.close()

    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=25), text=texts)
    @settings(max_examples=200, deadline=None)
    def check(ids, text):
        for sequence in (ids, tokenizer.encode_rendered(text), ids + tokenizer.encode_rendered(text)):
            assert "".join(pieces_of(tokenizer, sequence)) == tokenizer.decode(sequence)

    check()
