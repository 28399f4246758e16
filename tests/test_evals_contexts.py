"""What an evaluation asks: every answer stands in its context, at its depth, and a copying model finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eval_tools import CopyingProbe, word_tokenizer, word_writer

from minikv.cache.policies.base import Evidence
from minikv.config import CacheConfig
from minikv.errors import ConfigError, TemplateError
from minikv.evals.copies import Variant
from minikv.evals.frame import Frame
from minikv.evals.haystacks import KIND_OF_TASK
from minikv.evals.plan import TASKS, EvalPlan
from minikv.evals.scored_once import score_once
from minikv.evals.sweep import Sweep
from minikv.evals.text import Prose, reference_prose, text_hash

ANSWERED = ("needle", "multi-needle", "kv-lookup", "multi-turn", "quote")
KINDS = tuple(dict.fromkeys(KIND_OF_TASK.values()))


def turns(kind: str, length: int, seed: int):
    context = word_writer().write(kind, length, seed)
    return context, [(d.tasks, turn) for d in context.dialogues for turn in d.turns]


def depths_of(gold: tuple[int, ...], ids: tuple[int, ...]) -> list[float]:
    return [i / len(ids) for i in range(len(ids)) if ids[i : i + len(gold)] == gold]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1500, 4000])
def test_answers_stand_in_the_context_at_their_depth(kind: str, length: int) -> None:
    for seed in range(3):
        context, asked = turns(kind, length, seed)
        for tasks, turn in asked:
            if tasks[0] in ANSWERED:
                depths = depths_of(turn.gold, context.ids)
                assert any(depth == pytest.approx(turn.depth, abs=0.1) for depth in depths), (turn, depths)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_fits_its_length_and_leaves_little_of_it(kind: str) -> None:
    for length in (1500, 2000):
        context, _ = turns(kind, length, 5)
        whole = len(context.ids) + max(dialogue.num_tokens for dialogue in context.dialogues)
        assert length - 60 <= whole <= length + 1


def test_every_task_has_questions_and_needles_every_format() -> None:
    found = {task for kind in KINDS for tasks, _ in turns(kind, 2000, 0)[1] for task in tasks}
    assert found == set(TASKS) == set(KIND_OF_TASK)
    _, asked = turns("mixed", 2000, 0)
    needles = [turn for tasks, turn in asked if tasks == ("needle",)]
    assert {turn.format for turn in needles} == {"ruler7", "sandwich", "treasure", "city", "phone7"}
    assert len({turn.depth for turn in needles}) == 5
    depths = {
        turn.depth for seed in range(20) for _, turn in turns("mixed", 1500, seed)[1] if turn.format == "city"
    }
    assert len(depths) == 5, "a format must not be tied to a depth"


def test_contexts_follow_from_the_seed_alone() -> None:
    writer = word_writer()
    assert writer.write("mixed", 1500, 7) == writer.write("mixed", 1500, 7)
    assert writer.write("mixed", 1500, 7).ids != writer.write("mixed", 1500, 8).ids
    short, long = (writer.write("mixed", n, 7).dialogues for n in (1500, 3000))
    assert [d.turns[0].gold for d in short[:9]] == [d.turns[0].gold for d in long[:9]]


def test_the_second_turn_asks_for_what_the_first_did_not() -> None:
    for seed in range(5):
        _, asked = turns("mixed", 1500, seed)
        pairs = [turn.format for tasks, turn in asked if tasks == ("multi-turn",)]
        assert len(pairs) == len(set(pairs)) == 4


def test_a_length_without_room_is_refused_with_the_least_that_has() -> None:
    with pytest.raises(ConfigError, match="must be at least") as caught:
        word_writer().write("mixed", 300, 0)
    least = int(str(caught.value).split()[-1].rstrip("."))
    assert word_writer().write("mixed", least, 0)
    with pytest.raises(ConfigError, match="there is text for"):
        word_writer().write("mixed", 10**6, 0)
    with pytest.raises(ConfigError, match="no room for the records"):
        word_writer().write("records", 60, 0)


def test_text_is_a_circle_with_breaks_between_sentences() -> None:
    tokenizer = word_tokenizer()
    prose = Prose("One two. Three! Four\n\nFive os.path six? Seven", tokenizer)
    passage = prose.passage(-3, len(prose.ids))
    assert passage.ids == (*prose.ids[-3:], *prose.ids[:-3])
    pieces = [tokenizer.decode(prose.ids[i:])[:6] for i in prose.passage(0, len(prose.ids)).breaks]
    assert pieces == [" Three", " Four\n", "\n\nFive", " Seven"]
    assert text_hash(reference_prose()) == text_hash(reference_prose())


# Running them


def plan(**changes) -> EvalPlan:
    return EvalPlan(**({"tasks": TASKS, "policies": ("full",), "lengths": (1500,), "samples": 2} | changes))


def records(probe: CopyingProbe, wanted: EvalPlan, variants: list[Variant] | None = None):
    sweep = Sweep(probe, wanted, word_writer(), variants or [], [])  # type: ignore[arg-type]
    found = [record for part in sweep.records() for record in part]
    assert len(found) == sweep.total()
    assert probe.num_open == 0
    return found


def variant(budget: float) -> Variant:
    policy = SimpleNamespace(name="half", evidence=Evidence(), allocate=None)
    return Variant("half", budget, policy, CacheConfig())


@pytest.mark.parametrize("agnostic", [False, True])
def test_a_model_that_copies_answers_everything(agnostic: bool) -> None:
    found = records(CopyingProbe(word_tokenizer()), plan(agnostic=agnostic))
    wrong = {(r.task, r.format, r.depth, r.turn) for r in found if r.task in ANSWERED and not r.exact}
    assert not wrong
    assert all(r.kl == 0 and r.top1 == 1 for r in found if r.kl is not None)


@pytest.mark.parametrize("agnostic", [False, True])
def test_what_was_dropped_is_not_found(agnostic: bool) -> None:
    probe = CopyingProbe(word_tokenizer(), keep=lambda ids: ids[len(ids) // 2 :])
    wanted = plan(tasks=("needle",), samples=1, agnostic=agnostic)
    for record in records(probe, wanted, [variant(0.5)]):
        assert record.depth is not None
        assert record.exact is (record.policy == "full" or record.depth > 0.5), record
        if record.policy == "half":
            assert record.kv_bytes == pytest.approx(record.full_bytes / 2, abs=100)
            assert record.compress_s == 0.25


def test_one_prefill_serves_all_and_agnostic_compresses_without_the_question() -> None:
    for agnostic in (False, True):
        probe = CopyingProbe(word_tokenizer(), keep=lambda ids: ids[9:])
        records(probe, plan(samples=1, agnostic=agnostic), [variant(0.5), variant(0.25)])
        contexts = [word_writer().write(kind, 1500, 0) for kind in KINDS]
        sizes = [len(context.ids) for context in contexts]
        assert [count for name, count in probe.log if name == "feed" and count > 500] == sizes
        compressed = [count for name, count in probe.log if name == "compress"]
        if agnostic:
            assert compressed == [size for size in sizes for _ in range(2)]
        else:
            questions = [d.turns[0] for context in contexts for d in context.dialogues]
            assert len(compressed) == 2 * len(questions)
            assert all(count >= min(sizes) for count in compressed)


def test_a_model_without_a_template_gets_plain_lines() -> None:
    tokenizer = word_tokenizer(None)
    frame = Frame.of(tokenizer)
    assert tokenizer.decode(frame.tail) == "\nAnswer:"
    probe = CopyingProbe(tokenizer)
    sweep = Sweep(probe, plan(tasks=("needle",), samples=1), word_writer(None), [], [])  # type: ignore[arg-type]
    assert all(record.exact for part in sweep.records() for record in part)


def test_a_template_that_hides_messages_is_refused() -> None:
    with pytest.raises(TemplateError, match="does not show a message"):
        Frame.of(word_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}"))


def test_what_is_measured_once_is_measured_again_only_where_something_else_is_protected() -> None:
    calls = []

    class Merging:
        name, evidence, assign, merge = "merging", Evidence(), None, None

        def measure(self, view: object, protected: torch.Tensor) -> int:
            calls.append(protected)
            return len(calls)

    measured = score_once(Merging())
    view: Any = SimpleNamespace(layer=0)
    some, more = torch.tensor([[True, False]]), torch.tensor([[True, True]])
    assert [measured.measure(view, held) for held in (some, some, more, more, some)] == [1, 1, 2, 2, 3]
    assert measured.spared > 0


def test_the_text_goes_on_where_the_context_ends() -> None:
    writer = word_writer()
    circle = (*writer.prose.ids, *writer.prose.ids[:300])
    context = writer.write("mixed", 1500, 4)
    (turn,) = next(d.turns for d in context.dialogues if "perplexity" in d.tasks)
    passage = (*context.ids[-20:], *turn.prefix, *turn.gold)
    assert any(circle[i : i + len(passage)] == passage for i in range(len(writer.prose.ids)))


class _NotesWindows(CopyingProbe):
    """A copying probe that logs where the evidence of a question ends."""

    def record(self, evidence: object, content: range) -> SimpleNamespace:
        recorder = super().record(evidence, content)

        def extended(longer: range) -> SimpleNamespace:
            self.log.append(("extended", longer.stop))
            return recorder

        recorder.extended = extended
        return recorder


def test_query_aware_evidence_ends_with_the_question_and_before_the_template() -> None:
    probe = _NotesWindows(word_tokenizer())
    records(probe, plan(tasks=("needle", "multi-turn"), samples=1))
    context = word_writer().write("mixed", 1500, 0)
    asked = [d.turns[0] for d in context.dialogues if d.tasks[0] in ("needle", "multi-turn")]
    ends = [stop for name, stop in probe.log if name == "extended"]
    assert ends == [len(context.ids) + len(turn.question) for turn in asked]
