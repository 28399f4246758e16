"""The tokenizer of a GGUF file against ones put together independently."""

from __future__ import annotations

import json

import pytest
import tokenizers
from gguf import TokenType
from model_files import MERGES, SPECIAL, TOKENS, byte_level_tokenizer, gguf_metadata, hf_config
from tokenizers import pre_tokenizers

from minikv.errors import ModelError
from minikv.models.gguf_file import GGUFFile
from minikv.models.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "The cat sat on the mat, didn't it? I'LL say 1234567 times.",
    "  two  spaces\n\n\ttabs \r\n and trailing   ",
    "Съешь ещё этих мягких французских булок",
    "今天天气很好。日本語のテキスト 2026年",
    "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 👍🏽 naïve café",
    "<|im_start|>user\nhello<|im_end|>\n",
    "x" * 300,
    "",
]
# As the published tokenizer.json of each family has it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def metadata(**changes):
    return gguf_metadata(hf_config(), **changes)


def from_json(
    pre: list[dict], *, vocab, merges, special, ignore_merges=False, normalizer=None
) -> tokenizers.Tokenizer:
    """A tokenizer.json written by hand."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token} | flags for i, token in special],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
        },
    }
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def byte_level(use_regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


STYLES = {
    "gpt-2": {"pre": [byte_level(True)]},
    "smollm": {"pre": [{"type": "Digits", "individual_digits": True}, byte_level(True)]},
    "llama-bpe": {"pre": [split(LLAMA3), byte_level(False)], "ignore_merges": True},
    "qwen2": {"pre": [split(QWEN2), byte_level(False)], "normalizer": {"type": "NFC"}},
}


@pytest.mark.parametrize("name", STYLES)
def test_ids_equal_those_of_the_familys_own_tokenizer(name):
    ours = tokenizer_from_gguf(metadata(tokenizer__ggml__pre=name, tokenizer__ggml__add_bos_token=False))
    vocab = {token: i for i, token in enumerate(TOKENS)}
    peer = from_json(vocab=vocab, merges=MERGES, special=list(enumerate(SPECIAL)), **STYLES[name])
    for text in [*TEXTS, "e\u0301 and \u00e9", "abc123456", "12 1 2"]:
        expected = peer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected
        assert ours.decode(expected) == peer.decode(expected)


def test_smollm_tokenizer_of_the_real_model(smollm_path):
    values = GGUFFile(smollm_path).metadata
    ours = tokenizer_from_gguf(values)
    tokens = values["tokenizer.ggml.tokens"]
    peer = from_json(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        special=list(enumerate(tokens[:17])),
        **STYLES["smollm"],
    )
    for text in TEXTS:
        expected = peer.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected
        assert ours.decode(expected, skip_special=False) == text
    assert [i for i in range(len(tokens)) if ours.is_special(i)] == list(range(17))
    digits = ours.encode("80412")
    assert [ours.token_text(i) for i in digits] == list("80412")
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (1, (2, 0), 49152)
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    rendered = ours.render_chat([{"role": "user", "content": "Hi"}])
    assert ours.encode_rendered(rendered)[0] == 1
    assert rendered.endswith("<|im_start|>assistant\n")


def test_control_tokens_are_parsed_and_user_tokens_are_text():
    tokens = [*TOKENS, "<think>", "[PAD1]", "[PAD2]"]
    types = [TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in TOKENS]
    types += [TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED]
    ours = tokenizer_from_gguf(
        metadata(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=[int(t) for t in types])
    )
    ids = ours.encode("a<think>b<|im_end|>")
    assert ids[1] == len(TOKENS)
    assert ids[-1] == 2
    assert ours.decode(ids) == "a<think>b"
    assert ours.vocab_size == len(TOKENS) + 1
    assert ours.decode([len(TOKENS) + 1]) == ""


def test_llama3_adds_bos_unless_the_file_says_otherwise():
    assert tokenizer_from_gguf(metadata(tokenizer__ggml__pre="llama-bpe")).encode("a")[0] == 1
    plain = {"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}
    assert tokenizer_from_gguf(metadata(**plain)).encode("a")[0] != 1
    assert tokenizer_from_gguf(metadata()).encode("a")[0] != 1


def test_end_tokens_join_metadata_and_well_known_control_tokens():
    tokens = [*TOKENS, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</turn>"]
    types = [int(TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL) for t in TOKENS]
    types += [int(TokenType.CONTROL), int(TokenType.NORMAL), int(TokenType.CONTROL), int(TokenType.CONTROL)]
    ours = tokenizer_from_gguf(
        metadata(
            tokenizer__ggml__tokens=tokens,
            tokenizer__ggml__token_type=types,
            tokenizer__ggml__eot_token_id=len(tokens) - 1,
        )
    )
    count = len(TOKENS)
    assert ours.eos_token_ids[0] == 2
    assert set(ours.eos_token_ids) == {2, 0, count, count + 2, count + 3}


def test_several_chat_templates():
    named = metadata(tokenizer__chat_templates=["tool_use"])
    named["tokenizer.chat_template.tool_use"] = "tools"
    assert tokenizer_from_gguf(named).has_chat_template
    assert not tokenizer_from_gguf(metadata(tokenizer__chat_template=...)).has_chat_template


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"tokenizer__ggml__model": "llama"}, ["tokenizer.ggml.model", "llama"]),
        ({"tokenizer__ggml__model": ...}, ["lacks tokenizer.ggml.model"]),
        ({"tokenizer__ggml__pre": "tekken"}, ["tokenizer.ggml.pre", "tekken"]),
        ({"tokenizer__ggml__pre": "default"}, ["tokenizer.ggml.pre", "default"]),
        ({"tokenizer__ggml__pre": ...}, ["lacks tokenizer.ggml.pre"]),
        ({"tokenizer__ggml__tokens": ...}, ["lacks tokenizer.ggml.tokens"]),
        ({"tokenizer__ggml__token_type": ...}, ["lacks tokenizer.ggml.token_type"]),
        ({"tokenizer__ggml__token_type": [1, 1]}, ["2 token types"]),
        ({"tokenizer__ggml__merges": ["a b c"]}, ["tokenizer.ggml.merges"]),
        ({"tokenizer__ggml__merges": ["qq zz"]}, ["merges"]),
        ({"tokenizer__ggml__merges": ...}, ["lacks tokenizer.ggml.merges"]),
        ({"tokenizer__ggml__eos_token_id": 5000}, ["tokenizer.ggml.eos_token_id", "5000"]),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "!"]}, ["twice", '"!"']),
    ],
)
def test_tokenizers_that_cannot_be_used_are_refused_by_name(changes, fragments):
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(metadata(**changes))
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value
    assert "\n" not in str(caught.value)


def test_the_test_tokenizer_itself_covers_all_bytes():
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(TOKENS)
    assert byte_level_tokenizer().encode("the").ids == [TOKENS.index("the")]
