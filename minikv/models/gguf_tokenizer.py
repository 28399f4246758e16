"""The tokenizer inside a GGUF file: byte-level BPE, special tokens, end tokens, chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minikv.errors import ModelError
from minikv.models.fields import Fields, shorten

if TYPE_CHECKING:
    from minikv.text.tokenizer import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_DIGITS = (
    _CONTRACTIONS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Control tokens that end a turn or a text, whichever of them the metadata names.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
_ROLES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before merging, as the original tokenizer of a model family does it.

    `pattern` None is the GPT-2 pattern that ByteLevel has built in.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a piece that is a token is taken whole, without merging
    add_bos: bool = False


_LLAMA3 = _PreTokenizer(_WORDS_AND_DIGITS.format(digits=r"\p{N}{1,3}"), whole_words=True, add_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer(_WORDS_AND_DIGITS.format(digits=r"\p{N}"), nfc=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str = "The GGUF file") -> Tokenizer:
    """The tokenizer that `metadata` describes; `origin` is the file's name in messages.

    Raises ModelError when it is missing, malformed, or not a known byte-level BPE.
    """
    from minikv.text.tokenizer import Tokenizer

    fields = Fields(metadata, origin)
    style = _style(fields)
    tokens, types = _vocabulary(fields)
    ids = {role: _known_id(fields, f"tokenizer.ggml.{role}_token_id", len(tokens)) for role in _ROLES}
    bos = ids["bos"]
    return Tokenizer(
        _backend(fields, style, tokens, types),
        bos_token_id=bos,
        eos_token_ids=_end_tokens(fields, tokens, types),
        add_bos=fields.flag("tokenizer.ggml.add_bos_token", style.add_bos),
        chat_template=_chat_templates(fields),
        special_tokens={f"{_ROLES[role]}_token": tokens[i] for role, i in ids.items() if i is not None},
    )


def _style(fields: Fields) -> _PreTokenizer:
    if fields.text("tokenizer.ggml.model") != "gpt2":
        fields.refuse(
            "tokenizer.ggml.model", "but only byte-level BPE (gpt2) is supported; use the safetensors model"
        )
    pre = fields.text("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        fields.refuse(
            "tokenizer.ggml.pre",
            f"but only {', '.join(_PRE_TOKENIZERS)} are known; use the safetensors model",
        )
    return _PRE_TOKENIZERS[pre]


def _vocabulary(fields: Fields) -> tuple[list[str], list[int]]:
    tokens, types = (
        _list(fields, f"tokenizer.ggml.{key}", kind) for key, kind in (("tokens", str), ("token_type", int))
    )
    if not tokens or len(types) != len(tokens):
        raise ModelError(
            f"{fields.origin} has {len(tokens)} tokens and {len(types)} token types, which must be as many."
        )
    return tokens, types


def _backend(fields: Fields, style: _PreTokenizer, tokens: Sequence[str], types: Sequence[int]) -> Backend:
    """The tokenizers object. Padding rows of the embedding (type UNUSED) are no tokens."""
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    if len(vocab) != len(tokens) - list(types).count(TokenType.UNUSED):
        repeated = next(token for i, token in enumerate(tokens) if vocab.get(token, i) != i)
        raise ModelError(
            f"{fields.origin} lists the token {shorten(repeated)} twice in tokenizer.ggml.tokens."
        )
    merges = [tuple(merge.split(" ")) for merge in _list(fields, "tokenizer.ggml.merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(
            f"{fields.origin} has an entry in tokenizer.ggml.merges that is not a pair of tokens."
        )
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=style.whole_words))
    except Exception as error:  # the library raises a bare Exception for a merge of unknown tokens
        raise ModelError(f"{fields.origin} has merges that do not fit its tokens ({error}).") from error
    if style.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(style)
    backend.decoder = decoders.ByteLevel()
    for kind, add in (
        (TokenType.CONTROL, backend.add_special_tokens),
        (TokenType.USER_DEFINED, backend.add_tokens),
    ):
        special = kind == TokenType.CONTROL
        add(
            [
                AddedToken(t, normalized=False, special=special)
                for i, t in enumerate(tokens)
                if types[i] == kind
            ]
        )
    return backend


def _pre_tokenizer(style: _PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if style.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if style.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(style.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _end_tokens(fields: Fields, tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    named = [
        _known_id(fields, f"tokenizer.ggml.{role}_token_id", len(tokens)) for role in ("eos", "eot", "eom")
    ]
    known = [i for i, token in enumerate(tokens) if token in END_TOKENS and types[i] == TokenType.CONTROL]
    return [token_id for token_id in (*named, *known) if token_id is not None]


def _chat_templates(fields: Fields) -> str | dict[str, str] | None:
    default = fields.text("tokenizer.chat_template", "")
    names = _list(fields, "tokenizer.chat_templates", str) if fields.get("tokenizer.chat_templates") else []
    named = {name: fields.text(f"tokenizer.chat_template.{name}") for name in names}
    if not named:
        return default or None
    return {"default": default, **named} if default else named


def _known_id(fields: Fields, key: str, vocab_size: int) -> int | None:
    token_id = fields.token_id(key)
    if token_id is not None and token_id >= vocab_size:
        fields.refuse(key, f"which is outside the vocabulary of {vocab_size} tokens")
    return token_id


def _list(fields: Fields, key: str, kind: type) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ModelError(f"{fields.origin} lacks {key}, which must be a list; use a complete model file.")
    return value
