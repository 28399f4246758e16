"""Measures every policy and budget on every context: computed once, copied, compressed, asked.

    context --compute once--> full lanes --copy--> + question --copy--> compress --> answer   (aware)
                                         --copy--> compress --copy--> question, answer     (agnostic)

The evidence that policies want is recorded once, all of it; each policy is shown its part. What a further
question does to a copy: see `copies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.compress import evidence_for
from minikv.cache.evidence import Recorder
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.registry import make_policy
from minikv.cache.showing import joined
from minikv.evals.answers import Answer, Answers, Reference
from minikv.evals.copies import Copies, Copy, Variant
from minikv.evals.haystacks import KIND_OF_TASK, Writer
from minikv.evals.metrics import Measures, measure
from minikv.evals.plan import FULL, Budget, EvalPlan
from minikv.evals.questions import Dialogue, Haystack, Turn
from minikv.evals.records import MEASURES, Record

if TYPE_CHECKING:
    from minikv.cache.spans.router import Router
    from minikv.probe import Probe

# Measures of tasks that have not all of them: no answer is right, or only nearness to the full cache counts.
_APPLY = {"perplexity": ("token_accuracy", "nll"), "fidelity": ("kl", "top1")}


def variants_of(
    plan: EvalPlan, probe: Probe, profile: HeadProfile | None, router: Router | None = None
) -> list[Variant]:
    """The columns of a plan for a model, but for the full cache."""
    shape = probe.config
    made = []
    for name in plan.compressing:
        caches = [plan.cache(name, budget) for budget in plan.budgets]
        policy = make_policy(
            caches[0].policy,
            window=plan.window,
            num_layers=shape.num_layers,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            profile=profile if "compresskv" in name else None,
            rope=probe.model.rope,
            router=router,
        )
        columns = zip(plan.budgets, caches, strict=True)
        made += [Variant(name, budget, policy, cache) for budget, cache in columns]
    return made


class Sweep:
    """The samples of a plan on one model. `done` need not be computed again."""

    def __init__(
        self,
        probe: Probe,
        plan: EvalPlan,
        writer: Writer,
        variants: Sequence[Variant],
        done: Sequence[Record] = (),
    ) -> None:
        self._probe = probe
        self._plan = plan
        self._writer = writer
        self._variants = variants
        self._done = {record.key for record in done}
        self._evidence = joined([evidence_for(variant.policy, variant.cache) for variant in variants])
        self._copies = Copies(probe)
        self._answers = Answers(probe, self._copies)

    @property
    def kinds(self) -> list[str]:
        """Kinds of contexts that serve the tasks."""
        return list(dict.fromkeys(KIND_OF_TASK[task] for task in self._plan.tasks))

    def total(self) -> int:
        """Records of the whole plan. Raises ConfigError if a length leaves no room for a context."""
        answers = 0
        for length in self._plan.lengths:
            for kind in self.kinds:
                haystack = self._writer.write(kind, length, self._plan.seed)
                answers += sum(len(self._tasks(d)) * len(d.turns) for d in haystack.dialogues)
        return answers * self._plan.samples * (1 + len(self._variants))

    def records(self) -> Iterator[list[Record]]:
        """New records as they become known; what is done is left out."""
        for length in sorted(self._plan.lengths):
            for seed in self._plan.seeds:
                for kind in self.kinds:
                    haystack = self._writer.write(kind, length, seed)
                    for found in self._of_context(haystack, length, seed):
                        new = [record for record in found if record.key not in self._done]
                        if new:
                            yield new

    def _tasks(self, dialogue: Dialogue) -> list[str]:
        return [task for task in dialogue.tasks if task in self._plan.tasks]

    # One context

    def _of_context(self, haystack: Haystack, length: int, seed: int) -> Iterator[list[Record]]:
        form = _Form(self._plan, length, seed)
        missing = {d: self._missing(d, form) for d in haystack.dialogues if self._tasks(d)}
        missing = {dialogue: variants for dialogue, variants in missing.items() if variants is not None}
        if not missing:
            return
        base = self._probe.open()
        try:
            recorder = self._probe.record(self._evidence, range(len(haystack.ids)))
            self._probe.feed(base, haystack.ids, "none", recorder)
            if self._plan.agnostic:
                yield from self._agnostic(base, recorder, missing, form)
            else:
                for dialogue, variants in missing.items():
                    yield from self._aware(base, recorder, dialogue, variants, form)
        finally:
            self._probe.close(base)

    def _missing(self, dialogue: Dialogue, form: _Form) -> list[Variant] | None:
        """Variants that an earlier run has not measured; None if not even the full cache is missing."""

        def lacks(name: str, budget: Budget | None) -> bool:
            blanks = (
                form.record(task, turn, number, name, budget)
                for task in self._tasks(dialogue)
                for number, turn in enumerate(dialogue.turns, 1)
            )
            return any(blank.key not in self._done for blank in blanks)

        variants = [variant for variant in self._variants if lacks(variant.name, variant.budget)]
        return variants if variants or lacks(FULL, None) else None

    def _aware(
        self, base: int, recorder: Recorder, dialogue: Dialogue, variants: list[Variant], form: _Form
    ) -> Iterator[list[Record]]:
        """The first question is part of what is compressed, and its queries are in the window."""
        first = dialogue.turns[0]
        asked = self._probe.fork(base)
        try:
            if first.question:
                recorder = recorder.extended(range(recorder.content.stop + len(first.question)))
                self._probe.feed(asked, (*first.question, *first.suffix), "none", recorder)
            reference = self._answers.full(asked, dialogue, asked=True)
            yield self._of_full(dialogue, reference, form)
            rows = max(map(len, reference.golds))
            for group in self._copies.groups(asked, recorder, variants, rows, copies=1):
                answers = self._answers.compressed(group, dialogue, reference, asked=True)
                yield self._of_group(group, dialogue, reference, answers, form)
        finally:
            self._probe.close(asked)

    def _agnostic(
        self, base: int, recorder: Recorder, missing: dict[Dialogue, list[Variant]], form: _Form
    ) -> Iterator[list[Record]]:
        """All questions come after the compression and share it."""
        references: dict[Dialogue, Reference] = {}
        for dialogue in missing:
            references[dialogue] = self._answers.full(base, dialogue, asked=False)
            yield self._of_full(dialogue, references[dialogue], form)
        wanted = [v for v in self._variants if any(v in variants for variants in missing.values())]
        rows = max(len(gold) for reference in references.values() for gold in reference.golds)
        for group in self._copies.groups(base, recorder, wanted, rows, copies=2):
            for dialogue, reference in references.items():
                with self._copies.forked(group) as forks:
                    answers = self._answers.compressed(forks, dialogue, reference, asked=False)
                yield self._of_group(group, dialogue, reference, answers, form)

    # Records

    def _of_full(self, dialogue: Dialogue, reference: Reference, form: _Form) -> list[Record]:
        """The reference row: the full cache beside itself."""
        held = {"kv_bytes": reference.kv_bytes, "full_bytes": reference.kv_bytes}
        return [
            form.record(task, turn, number, FULL, None, _measures(reference, number), **held)
            for task in self._tasks(dialogue)
            for number, turn in enumerate(dialogue.turns, 1)
        ]

    def _of_group(
        self,
        group: Sequence[Copy],
        dialogue: Dialogue,
        reference: Reference,
        answers: list[list[Answer]],
        form: _Form,
    ) -> list[Record]:
        """Records of copies; `answers` per turn, of each copy."""
        found = []
        for place, copy in enumerate(group):
            name, budget = copy.variant.name, copy.variant.budget
            for number, turn in enumerate(dialogue.turns, 1):
                answer = answers[number - 1][place]
                held = {"kv_bytes": answer.held.kv_bytes, "full_bytes": answer.held.full_bytes}
                measures = _measures(reference, number, answer.logits)
                for task in self._tasks(dialogue):
                    record = form.record(
                        task, turn, number, name, budget, measures, **held, compress_s=answer.held.seconds
                    )
                    found.append(record)
        return found


@dataclass(frozen=True)
class _Form:
    """What all records of a context have in common."""

    plan: EvalPlan
    length: int
    seed: int

    def record(
        self,
        task: str,
        turn: Turn,
        number: int,
        policy: str,
        budget: Budget | None,
        measures: Measures | None = None,
        kv_bytes: int = 0,
        full_bytes: int = 0,
        compress_s: float | None = None,
    ) -> Record:
        """A record with the measures that apply to its task; without measures a blank, for its key."""
        values = {} if measures is None else asdict(measures)
        return Record(
            task=task,
            format=turn.format,
            policy=policy,
            budget=budget,
            length=self.length,
            seed=self.seed,
            depth=turn.depth,
            agnostic=self.plan.agnostic,
            turn=number,
            **{name: values.get(name) for name in MEASURES if name in _APPLY.get(task, MEASURES)},
            kv_bytes=kv_bytes,
            full_bytes=full_bytes,
            compress_s=compress_s,
        )


def _measures(reference: Reference, number: int, logits: Tensor | None = None) -> Measures:
    """Of the answer in turn `number`; without logits, those of the full cache itself."""
    gold, full = torch.tensor(reference.golds[number - 1]), reference.logits[number - 1]
    return measure(full if logits is None else logits, gold, full)
