"""Calibration texts: languages, needles, and the exact place of every answer."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from model_files import CHAT_TEMPLATE
from tiny_tokenizers import BACKENDS, tiny_tokenizer

from minikv.calibration.haystack import hide, prose
from minikv.calibration.languages import LANGUAGES
from minikv.calibration.needles import FORMATS, make_needle
from minikv.calibration.trials import (
    NEEDLES,
    Plan,
    encode,
    haystack_trials,
    shared_length,
    template_text,
    token_span,
)

by_code = pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
LONG = 100_000


@by_code
def test_sentences_are_varied_and_leave_no_slot_open(language) -> None:
    rng = random.Random(1)
    sentences = [language.sentence(rng) for _ in range(400)]
    assert len(set(sentences)) > 300
    assert not any("{" in sentence or "  " in sentence for sentence in sentences)
    assert all(sentence[0] == sentence[0].upper() and sentence.endswith(".") for sentence in sentences)


@by_code
def test_every_fact_fits_every_format(language) -> None:
    assert len({fact.kind for fact in language.facts}) == len(language.facts) >= NEEDLES
    for fact in language.facts:
        for seed, format in enumerate(FORMATS * 4):
            needle = make_needle(language, fact, format, random.Random(seed))
            assert needle.text[needle.start :].startswith(needle.answer)
            assert needle.text[needle.start - 1] == " ", (
                "the answer must have the tokens it has after a blank"
            )
            assert needle.text.count(needle.answer) == 1, "a decoy has the same value"
            assert not any("{" in part for part in (needle.text.replace("{\n", ""), needle.reply))


@by_code
def test_needles_lie_where_the_haystack_says(language) -> None:
    rng = random.Random(3)
    needles = [make_needle(language, f, n, rng) for f, n in zip(language.facts, FORMATS, strict=False)]
    for size in (1, 20, 400):  # fewer words than needles as well
        haystack = hide(prose(language, size, lambda text: len(text.split()), rng), needles, rng)
        for needle, (start, stop) in zip(needles, haystack.spans, strict=True):
            assert haystack.text[start:stop] == needle.answer
            assert haystack.text[start - needle.start :].startswith(needle.text)


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE], ids=["raw", "chat"])
@pytest.mark.parametrize("family", BACKENDS)
def test_answers_are_the_same_tokens_in_haystack_and_reply(family: str, template: str | None) -> None:
    tokenizer = tiny_tokenizer(family, chat_template=template)
    plan = Plan((256, 800), seed=5)
    formats, languages = Counter(), Counter()
    for index in range(20):
        trials = haystack_trials(tokenizer, plan, index, LONG)
        shared = shared_length(trials)
        for trial in trials:
            start, stop = trial.span
            assert tokenizer.decode(trial.ids[start:stop]).strip() == trial.answer
            assert trial.ids[start:stop] == trial.ids[-trial.num_answer :]
            assert stop <= shared < trial.content <= trial.prompt < len(trial.ids) - trial.num_answer
            assert trial.ids[:shared] == trials[0].ids[:shared]
            formats[trial.format] += 1
            languages[trial.language] += 1
    assert set(formats) == set(FORMATS) and min(formats.values()) >= 15
    assert set(languages) == {language.code for language in LANGUAGES}


def test_the_template_ends_the_prompt_after_the_users_text() -> None:
    tokenizer = tiny_tokenizer("byte_level", chat_template=CHAT_TEMPLATE)
    plan = Plan((256,), seed=0)
    index = next(i for i in range(20) if plan.setting(i, True).chat)
    for trial in haystack_trials(tokenizer, plan, index, LONG):
        assert tokenizer.decode(trial.ids[trial.content : trial.prompt], skip_special=False) == (
            "<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_raw_prompt_begins_as_the_model_wants_and_only_once() -> None:
    tokenizer = tiny_tokenizer("sentencepiece", add_bos=True)
    for text in ("abc", "<s>abc"):
        ids, offsets = encode(tokenizer, text)
        assert ids[0] == 1 and ids.count(1) == 1 and len(ids) == len(offsets)


def test_a_template_that_changes_the_message_is_not_used() -> None:
    for template in ("{{ messages[0].content | upper }}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        assert template_text(tiny_tokenizer("byte_level", chat_template=template)) is None
    assert template_text(tiny_tokenizer("byte_level")) is None


def test_the_same_seed_gives_the_same_trials_and_another_seed_others() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    first, again = (haystack_trials(tokenizer, Plan((256,), seed=7), 2, LONG) for _ in range(2))
    assert first == again
    assert first != haystack_trials(tokenizer, Plan((256,), seed=8), 2, LONG)


def test_all_languages_lengths_and_forms_come_up_equally_often() -> None:
    plan = Plan((256, 512), seed=2)
    count = len(LANGUAGES) * 2 * 2
    settings = [plan.setting(index, chat=True) for index in range(2 * count)]
    for part in (settings[:count], settings[count:]):
        assert len({(s.language.code, s.length, s.chat) for s in part}) == count
    assert not any(plan.setting(index, chat=False).chat for index in range(count))


def test_trials_longer_than_the_context_are_left_out() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    plan = Plan((256,), seed=0)
    lengths = sorted(len(trial.ids) for trial in haystack_trials(tokenizer, plan, 0, LONG))
    kept = haystack_trials(tokenizer, plan, 0, lengths[2])
    assert sorted(len(trial.ids) for trial in kept) == lengths[:3]


def test_a_span_takes_in_tokens_that_touch_it() -> None:
    offsets = [(0, 0), (0, 3), (3, 7), (7, 9), (9, 12)]
    assert token_span(offsets, 4, 8) == (2, 4)
    assert token_span(offsets, 3, 7) == (2, 3)
    assert token_span(offsets, 20, 25) == (0, 0)
