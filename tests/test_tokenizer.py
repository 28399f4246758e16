"""Tokenizers: BOS once, the EOS union, special tokens, and directories as models ship them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from tiny_tokenizers import BACKENDS, byte_level, metaspace, sentencepiece, texts, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from minikv.errors import ModelError, RequestError
from minikv.text.tokenizer import Tokenizer


def write_directory(path, backend=None, **files):
    """A model directory; `files` are JSON objects by stem, or texts by stem of a .jinja file."""
    (path / "tokenizer.json").write_text((backend or sentencepiece()).to_str(), encoding="utf-8")
    for stem, value in files.items():
        name = f"{stem}.jinja" if isinstance(value, str) else f"{stem}.json"
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


ROLES = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": "<unk>"}


def test_bos_is_added_to_raw_text_once():
    tokenizer = tiny_tokenizer("sentencepiece", add_bos=True)
    plain = tokenizer.encode_rendered("The dog")
    assert tokenizer.encode("The dog") == [1, *plain]
    assert tokenizer.encode("<s>The dog")[:2].count(1) == 1
    assert tokenizer.encode("") == [1]


def test_bos_is_never_added_to_a_rendered_template():
    tokenizer = tiny_tokenizer(
        "sentencepiece",
        add_bos=True,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        special_tokens={"bos_token": "<s>"},
    )
    ids = tokenizer.encode_rendered(tokenizer.render_chat([{"role": "user", "content": "dog"}]))
    assert ids.count(1) == 1
    assert 1 not in tokenizer.encode_rendered("dog")


def test_bos_is_not_added_where_the_model_wants_none():
    assert tiny_tokenizer("sentencepiece").encode("dog")[0] != 1
    assert tiny_tokenizer("byte_level", add_bos=True, bos_token_id=None).encode("dog")[0] != 0


def test_eos_ids_are_a_union_in_order_of_mention():
    assert tiny_tokenizer("byte_level", eos_token_ids=[7, 2, 7, 0]).eos_token_ids == (7, 2, 0)


def test_special_tokens_are_parsed_and_left_out_of_decoding():
    tokenizer = tiny_tokenizer("byte_level")
    ids = tokenizer.encode("<|im_start|>dog<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "dog"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>dog<|im_end|>"
    assert [tokenizer.is_special(token_id) for token_id in (0, 2, ids[1], 10**6)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("family", BACKENDS)
def test_token_text_reads_as_in_the_middle_of_a_line(family):
    tokenizer = tiny_tokenizer(family)
    shown = "".join(tokenizer.token_text(token_id) for token_id in tokenizer.encode(" The dog"))
    assert shown.lstrip() == "The dog"
    assert tokenizer.token_text(2) in ("</s>", "<|im_end|>")
    assert tokenizer.token_text(10**7) == tokenizer.token_text(-1) == ""


def test_ids_outside_the_vocabulary_decode_to_nothing():
    tokenizer = tiny_tokenizer("byte_level")
    dog = tokenizer.encode("dog")
    assert tokenizer.decode([-1, *dog, tokenizer.vocab_size + 5, 2**40]) == "dog"


def test_truncation_and_padding_of_the_training_run_are_switched_off():
    backend = byte_level()
    try:
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
        tokenizer = tiny_tokenizer("byte_level")
    finally:
        backend.no_truncation()
        backend.no_padding()
    assert (
        tokenizer.decode(tokenizer.encode("a much longer text than that")) == "a much longer text than that"
    )
    assert len(tokenizer.encode("a")) == 1


def test_half_a_surrogate_pair_is_refused_by_name():
    with pytest.raises(RequestError, match=r"U\+D83D"):
        tiny_tokenizer("byte_level").encode("broken \ud83d emoji")
    with pytest.raises(RequestError, match="must be text, not int"):
        tiny_tokenizer("byte_level").encode(5)  # type: ignore[arg-type]


@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_byte_level_text_survives_encoding(text):
    tokenizer = tiny_tokenizer("byte_level")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_directory_is_read_with_its_bos_rule_and_roles(tmp_path):
    write_directory(tmp_path, tokenizer_config=ROLES | {"chat_template": "{{ eos_token }}"})
    tokenizer = Tokenizer.from_directory(tmp_path, extra_eos=[9, 2])
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2, 9)
    assert tokenizer.encode("dog")[0] == 1, "the post-processor of tokenizer.json adds BOS"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "</s>"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("rule", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("make", [metaspace, sentencepiece])
def test_the_bos_rule_and_raw_ids_equal_transformers(tmp_path, make, rule):
    write_directory(tmp_path, make(), tokenizer_config=ROLES | rule | {"eos_token": "</s>"})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path).encode("The lazy dog")
    assert ours == theirs("The lazy dog")["input_ids"]
    assert (ours[0] == 1) is (make is sentencepiece)


def test_the_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    write_directory(tmp_path, special_tokens_map=ROLES, tokenizer_config={"eos_token": "<unk>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (0,)


def test_a_directory_with_only_a_tokenizer_file_works(tmp_path):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, byte_level()), extra_eos=[2])
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == (2,)
    assert not tokenizer.has_chat_template


def test_tokens_listed_only_in_the_config_are_added_at_their_ids(tmp_path):
    size = byte_level().get_vocab_size()
    listed = {str(size): {"content": "<|eot|>", "special": True}, str(size + 1): {"content": "<note>"}}
    write_directory(
        tmp_path, byte_level(), tokenizer_config={"eos_token": "<|eot|>", "added_tokens_decoder": listed}
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_ids == (size,)
    assert tokenizer.encode("<|eot|><note>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<note>"


def test_a_listed_token_at_an_impossible_id_is_refused(tmp_path):
    write_directory(
        tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": {"9999": {"content": "<x>"}}}
    )
    with pytest.raises(ModelError, match="'<x>' the id 9999"):
        Tokenizer.from_directory(tmp_path)


def test_a_role_token_of_the_vocabulary_becomes_special(tmp_path):
    write_directory(tmp_path, byte_level(), tokenizer_config={"eos_token": "<think>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.is_special(tokenizer.eos_token_ids[0])
    assert tokenizer.decode(tokenizer.encode("<think>dog")) == "dog"


MESSAGE = [{"role": "user", "content": "x"}]


def test_a_template_file_takes_precedence(tmp_path):
    write_directory(tmp_path, tokenizer_config={"chat_template": "old"}, chat_template="new")
    assert Tokenizer.from_directory(tmp_path).render_chat(MESSAGE) == "new"


def test_named_templates_are_read_from_a_list_and_a_folder(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_directory(tmp_path, tokenizer_config={"chat_template": named})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("u")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.render_chat(MESSAGE) == "d"
    assert tokenizer.render_chat(MESSAGE, tools=[]) == "u"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "", "not a usable tokenizer"),
        ("tokenizer.json", "{}", "not a usable tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object, not list"),
        ("tokenizer_config.json", '{"chat_template": [{"template": "x"}]}', "without a name"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": {}}}', "not a map of ids to tokens"),
        ("special_tokens_map.json", b"\xff\xfe", "cannot be read"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, words):
    write_directory(tmp_path)
    file = tmp_path / name
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_directory(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
