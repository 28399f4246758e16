"""Trials: token ids of haystack, question and answer, with the answer's exact place in the haystack.

A prompt is encoded once, as a whole, and character offsets say which tokens are the answer, so nothing
is joined and nothing is searched for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from minikv.calibration.haystack import Haystack, hide, prose
from minikv.calibration.languages import LANGUAGES, Language
from minikv.calibration.needles import FORMATS, Needle, make_needle
from minikv.errors import MinikvError
from minikv.text.tokenizer import Tokenizer

NEEDLES = len(FORMATS)  # of one haystack, one per format
_PLACEHOLDER = "placeholder-of-the-content"
_ATTEMPTS = 8


@dataclass(frozen=True)
class Trial:
    """One question about a haystack.

    ids: prompt, reply and answer; the last `span[1] - span[0]` of them are the answer.
    span: [start, stop) in `ids`, the same tokens where they stand in the haystack.
    content, prompt: tokens up to the end of the user's text and up to the end of the prompt, which a chat
        template may end with words of its own; the reply begins there.
    """

    ids: tuple[int, ...]
    span: tuple[int, int]
    content: int
    prompt: int
    language: str
    format: str
    kind: str
    answer: str

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return self.span[1] - self.span[0]


@dataclass(frozen=True)
class Setting:
    """What varies between haystacks."""

    language: Language
    length: int
    chat: bool


@dataclass(frozen=True)
class Plan:
    """Haystacks without end, numbered: lengths in tokens, and the seed of all that is random."""

    lengths: tuple[int, ...]
    seed: int

    def setting(self, index: int, chat: bool) -> Setting:
        """Language, length and form of a haystack: all combinations, shuffled, again and again.

        `chat`: whether the model has a chat template; then every other combination uses it.
        """
        forms = (True, False) if chat else (False,)
        combinations = list(product(LANGUAGES, self.lengths, forms))
        round_, place = divmod(index, len(combinations))
        random.Random(f"{self.seed} order {round_}").shuffle(combinations)
        return Setting(*combinations[place])


def haystack_trials(tokenizer: Tokenizer, plan: Plan, index: int, limit: int) -> list[Trial]:
    """The trials of haystack `index`: one per format, each about another fact.

    Needles whose answer has no tokens of its own, or other ones in the reply, are made anew; a format
    for which that fails, and a trial of more than `limit` tokens, is left out.
    """
    around = template_text(tokenizer)
    setting = plan.setting(index, chat=around is not None)
    frame = Frame(setting.language, around if setting.chat else None)
    rng = random.Random(f"{plan.seed} haystack {index}")
    trials: list[Trial | None] = []
    for _ in range(_ATTEMPTS):
        facts = rng.sample(setting.language.facts, k=NEEDLES)
        needles = [make_needle(setting.language, *pair, rng) for pair in zip(facts, FORMATS, strict=True)]
        trials = _about(tokenizer, setting, frame, needles, rng)
        if None not in trials:
            break
    return [trial for trial in trials if trial is not None and len(trial.ids) <= limit]


def _about(
    tokenizer: Tokenizer, setting: Setting, frame: Frame, needles: list[Needle], rng: random.Random
) -> list[Trial | None]:
    """A trial per needle of one haystack, None where the tokens of the answer cannot be told."""

    def measure(text: str) -> int:
        return len(tokenizer.encode_rendered(text))

    hidden = sum(measure(needle.text) for needle in needles)
    asked = max(sum(map(measure, frame.parts("", needle))) for needle in needles)
    sentences = prose(setting.language, setting.length - hidden - asked, measure, rng)
    haystack = hide(sentences, needles, rng)
    pairs = zip(needles, haystack.spans, strict=True)
    return [_trial(tokenizer, frame, haystack, needle, span) for needle, span in pairs]


def template_text(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """What the chat template puts before and after a user's message; None without a template, or with
    one that does not take a single message as it is."""
    if not tokenizer.has_chat_template:
        return None
    try:
        parts = tokenizer.render_chat([{"role": "user", "content": _PLACEHOLDER}]).split(_PLACEHOLDER)
    except MinikvError:
        return None
    return (parts[0], parts[1]) if len(parts) == 2 else None


@dataclass(frozen=True)
class Frame:
    """The words around a haystack: the chat template's, if it is used, the task and the question."""

    language: Language
    template: tuple[str, str] | None

    def parts(self, haystack: str, needle: Needle) -> tuple[str, str, str, str]:
        """A trial's text: up to the haystack's end, the question, what the prompt ends with, and the reply
        with the answer."""
        language = self.language
        start, end = self.template or ("", f"\n{language.answer}: ")
        before = f"{start}{language.task}\n\n{haystack}"
        question = f"\n\n{language.question}: {needle.question}"
        if self.template is None:  # the model continues a text, and all of it is the user's
            question, end = question + end, ""
        return before, question, end, f"{needle.reply} {needle.answer}"


def _trial(
    tokenizer: Tokenizer, frame: Frame, haystack: Haystack, needle: Needle, span: tuple[int, int]
) -> Trial | None:
    before, question, end, reply = frame.parts(haystack.text, needle)
    ids, offsets = encode(tokenizer, before + question + end + reply)
    shift = len(before) - len(haystack.text)
    found = token_span(offsets, shift + span[0], shift + span[1])
    length = found[1] - found[0]
    tokens = ids[found[0] : found[1]]
    if not tokens or tokens != ids[-length:] or tokenizer.decode(tokens).strip() != needle.answer:
        return None
    content = len(before) + len(question)
    return Trial(
        ids=tuple(ids),
        span=found,
        content=sum(stop <= content for _, stop in offsets),
        prompt=sum(stop <= content + len(end) for _, stop in offsets),
        language=frame.language.code,
        format=needle.format,
        kind=needle.kind,
        answer=needle.answer,
    )


def encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a rendered prompt and the characters [start, stop) that each stands for. What the model
    wants before a raw prompt comes first, and stands for none."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    start = tokenizer.encode("")
    if encoding.ids[: len(start)] == start:
        start = []
    return start + encoding.ids, [(0, 0)] * len(start) + encoding.offsets


def token_span(offsets: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """The tokens [first, last) that stand for any of the characters [start, stop)."""
    touching = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
    return (touching[0], touching[-1] + 1) if touching else (0, 0)


def shared_length(trials: list[Trial]) -> int:
    """Tokens that a haystack's trials have in common at their start; less than any trial's prompt."""
    prompts = [trial.ids[: trial.content - 1] for trial in trials]
    low, high = min(prompts), max(prompts)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(map(len, prompts))
    )
