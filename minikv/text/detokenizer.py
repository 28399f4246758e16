"""Token ids to text, one token at a time, equal in the end to decoding all of them at once.

Decoding is not local: characters span tokens, and some decoders treat the start of a text in a
special way. Each stream below emits text only when no later token can change it.

`tokenizers.decoders.DecodeStream` does not do here: it cannot flush, so an unfinished character at
the end is lost, and it raises when a later byte token changes what a run of them decodes to.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from minikv.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDetokenizer:
    """Text of one growing sequence of generated tokens.

    The pieces that `add` returns, followed by `flush`, are `tokenizer.decode(ids)`: whole code
    points, special tokens left out, invalid bytes exactly as the full decode prints them. The cost
    per token does not grow with the text. With `prompt_ids` the text continues the prompt instead
    of starting afresh, so that a decoder which strips the first space of a text keeps it here.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = _open_stream(tokenizer, prompt_ids)

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain ("" if none)."""
        if self._tokenizer.is_special(token_id):
            return ""
        token = self._tokenizer.vocabulary_entry(token_id)
        return "" if token is None else self._stream.add(token_id, token)

    def flush(self) -> str:
        """The rest of the text, at the end: nothing may be added after it."""
        return self._stream.flush()


class _Stream(Protocol):
    def add(self, token_id: int, token: str) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelStream:
    """Tokens are byte strings in GPT-2's printable alphabet; the text is their UTF-8 decoding.

    Python's incremental decoder and the library agree on how many U+FFFD an invalid run gives:
    one for each maximal part that could have begun a character.
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = _byte_alphabet()

    def add(self, token_id: int, token: str) -> str:
        try:
            data = bytes(self._bytes[char] for char in token)
        except KeyError:
            data = token.encode()  # an added token, stored as plain text
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SegmentStream:
    """SentencePiece-like decoders, which are local but for two things.

    A run of byte tokens is decoded as a whole and comes out as U+FFFD throughout if any of it is
    invalid, so text is cut only after a token that is not a byte. And the start of a text is
    treated in a special way, so later segments are decoded behind a `head` of real tokens that
    already has text, and the head's text is taken off again.
    """

    def __init__(self, tokenizer: Tokenizer, head: Sequence[int], byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = byte_fallback
        self._head = list(head)
        self._head_text = tokenizer.decode(self._head)
        self._pending: list[int] = []

    def add(self, token_id: int, token: str) -> str:
        self._pending.append(token_id)
        return "" if self._byte_fallback and _BYTE_TOKEN.fullmatch(token) else self.flush()

    def flush(self) -> str:
        text = self._tokenizer.decode(self._head + self._pending)[len(self._head_text) :]
        if not self._head_text:
            # Until there is text, the start is not over and all tokens so far are needed.
            self._head += self._pending
            self._head = _short_head(self._tokenizer, self._head, self._byte_fallback) or self._head
            self._head_text = self._tokenizer.decode(self._head)
        self._pending = []
        return text


class _WholeStream:
    """Any other decoder: nothing is known of it, so the text comes out whole at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def add(self, token_id: int, token: str) -> str:
        self._ids.append(token_id)
        return ""

    def flush(self) -> str:
        ids, self._ids = self._ids, []
        return self._tokenizer.decode(ids)


def _open_stream(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> _Stream:
    chain = _decoder_chain(tokenizer)
    kinds = [step["type"] for step in chain]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream()
    if not _is_local(chain):
        return _WholeStream(tokenizer)
    byte_fallback = "ByteFallback" in kinds
    return _SegmentStream(tokenizer, _short_head(tokenizer, prompt_ids, byte_fallback), byte_fallback)


def _decoder_chain(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as tokenizer.json describes them; empty if it has none."""
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    description = json.loads(decoder.__getstate__())
    return description["decoders"] if description["type"] == "Sequence" else [description]


def _is_local(chain: Sequence[dict[str, Any]]) -> bool:
    """Whether only byte runs and the start of the text make one token's text depend on another's.

    Steps before `Fuse` see single tokens. After it only a strip of the start is harmless: a
    replacement could match across tokens, and a strip of the end needs the last token.
    """
    kinds = [step["type"] for step in chain]
    fuse = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    before, after = kinds[:fuse], kinds[fuse + 1 :]
    if any(step["stop"] for step in chain[fuse + 1 :] if step["type"] == "Strip"):
        return False
    known = {"Replace", "Metaspace", "ByteFallback", "Strip"}
    return bool(chain) and known.issuperset(before) and {"Strip"}.issuperset(after)


def _short_head(tokenizer: Tokenizer, ids: Sequence[int], byte_fallback: bool) -> list[int]:
    """The fewest last tokens of `ids`, bytes left out, that together have text; [] if none have."""
    head: list[int] = []
    for token_id in reversed(ids):
        token = tokenizer.vocabulary_entry(token_id)
        if token is None or tokenizer.is_special(token_id):
            continue
        if byte_fallback and _BYTE_TOKEN.fullmatch(token):
            continue
        head.insert(0, token_id)
        if tokenizer.decode(head):
            return head
    return []


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the rest follow U+0100."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}
