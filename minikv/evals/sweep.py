"""Measures every policy and budget on every context: computed once, copied, compressed, asked.

    context --compute once--> full lanes --copy--> + question --copy--> compress --> answer   (aware)
                                         --copy--> compress --copy--> question, answer     (agnostic)

The evidence that policies want is recorded once, all of it; each policy is shown its part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.cache.compress import evidence_for
from minikv.cache.evidence import Recorded, Recorder
from minikv.cache.merging import is_merging
from minikv.cache.policies.base import AnyPolicy, LayerView, MergingPolicy, Policy
from minikv.cache.policies.profile import HeadProfile
from minikv.cache.policies.registry import make_policy
from minikv.cache.showing import joined
from minikv.config import CacheConfig
from minikv.evals.answers import Answers, Reference
from minikv.evals.haystacks import KIND_OF_TASK, Writer
from minikv.evals.metrics import Measures, measure
from minikv.evals.plan import FULL, Budget, EvalPlan, with_refit
from minikv.evals.questions import Dialogue, Haystack, Turn
from minikv.evals.records import MEASURES, Record

if TYPE_CHECKING:
    from minikv.probe import Probe

# The context, the context with a question, and copies that are compressed and answer together.
SEQUENCES = 12
_LOGIT_BYTES = 128 << 20  # of the answers that are computed in one pass
# Measures of tasks that have not all of them: no answer is right, or only nearness to the full cache counts.
_APPLY = {"perplexity": ("token_accuracy", "nll"), "fidelity": ("kl", "top1")}
_MOST_ANSWER = 256  # tokens of questions and answers that a copy has to have room for


@dataclass(frozen=True)
class Variant:
    """A policy of either kind under a budget."""

    name: str
    budget: Budget
    policy: AnyPolicy
    cache: CacheConfig


class _ScoredOnce:
    """A policy on copies of one context: a layer's scores do not depend on the budget, so they are
    computed for the first copy only. spared: seconds that this has saved so far."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.evidence = policy.evidence
        self.refit_from = getattr(policy, "refit_from", None)
        self.allocate = policy.allocate
        self.spared = 0.0
        self._policy = policy
        self._scores: dict[int, tuple[Tensor, float]] = {}

    def score(self, view: LayerView) -> Tensor:
        if view.layer in self._scores:
            scores, seconds = self._scores[view.layer]
            self.spared += seconds
            return scores
        started = time.perf_counter()
        scores = self._policy.score(view)
        self._scores[view.layer] = scores, time.perf_counter() - started
        return scores


class _MeasuredOnce:
    """The same of a merging policy and what it measures, which depends on what is protected as well."""

    def __init__(self, policy: MergingPolicy) -> None:
        self.name = policy.name
        self.evidence = policy.evidence
        self.refit_from = getattr(policy, "refit_from", None)
        self.assign = policy.assign
        self.merge = policy.merge
        self.spared = 0.0
        self._policy = policy
        self._measured: dict[int, tuple[Tensor, Any, float]] = {}

    def measure(self, view: LayerView, protected: Tensor) -> Any:
        if view.layer in self._measured:
            before, measured, seconds = self._measured[view.layer]
            if torch.equal(before, protected):
                self.spared += seconds
                return measured
        started = time.perf_counter()
        measured = self._policy.measure(view, protected)
        self._measured[view.layer] = protected, measured, time.perf_counter() - started
        return measured


_Once = _ScoredOnce | _MeasuredOnce


def _once(policy: Any) -> _Once:
    return _MeasuredOnce(policy) if is_merging(policy) else _ScoredOnce(policy)


@dataclass(frozen=True)
class _Copy:
    """A compressed copy of a context, and what compressing it did."""

    variant: Variant
    seq: int
    unchanged: bool
    kv_bytes: int
    full_bytes: int
    seconds: float


def variants_of(plan: EvalPlan, probe: Probe, profile: HeadProfile | None) -> list[Variant]:
    """The columns of a plan for a model, but for the full cache."""
    shape = probe.config
    made = []
    for name in plan.compressing:
        policy = make_policy(
            with_refit(name)[0],
            window=plan.window,
            num_layers=shape.num_layers,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            profile=profile if "compresskv" in name else None,
            rope=probe.model.rope,
        )
        made += [Variant(name, budget, policy, plan.cache(name, budget)) for budget in plan.budgets]
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
        self._answers = Answers(probe)

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
            for group in self._compressed(asked, recorder.result(), variants, rows, copies=1):
                seqs = [copy.seq for copy in group if not copy.unchanged]
                answers = self._answers.compressed(seqs, dialogue, reference, asked=True)
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
        for group in self._compressed(base, recorder.result(), wanted, rows, copies=2):
            for dialogue, reference in references.items():
                seqs = [self._probe.fork(copy.seq) for copy in group if not copy.unchanged]
                try:
                    answers = self._answers.compressed(seqs, dialogue, reference, asked=False)
                finally:
                    for seq in seqs:
                        self._probe.close(seq)
                yield self._of_group(group, dialogue, reference, answers, form)

    # Copies

    def _compressed(
        self, source: int, recorded: Recorded, variants: Sequence[Variant], rows: int, copies: int
    ) -> Iterator[list[_Copy]]:
        """Compressed copies of a sequence, in groups that can answer `rows` tokens in one pass; they are
        closed after their turn. copies: sequences that each takes with what is copied from it."""
        most = min((SEQUENCES - 2) // copies, _LOGIT_BYTES // (4 * rows * self._probe.config.vocab_size))
        policies = {variant.name: _once(variant.policy) for variant in variants}
        group: list[_Copy] = []
        try:
            for variant in variants:
                if len(group) >= max(1, most) or (group and not self._room_for(source, group, copies)):
                    yield group
                    self._close(group)
                group.append(self._compress(source, recorded, variant, policies[variant.name]))
            if group:
                yield group
        finally:
            self._close(group)

    def _compress(self, source: int, recorded: Recorded, variant: Variant, policy: _Once) -> _Copy:
        spared = policy.spared
        seq = self._probe.fork(source)
        try:
            report = self._probe.compress(seq, policy, variant.cache, recorded)
        except BaseException:
            self._probe.close(seq)
            raise
        before, after = report.bytes
        unchanged = report.entries[0] == report.entries[1]
        # A copy for which nothing was scored has to be charged what its scores would have taken.
        seconds = report.seconds + policy.spared - spared
        return _Copy(variant, seq, unchanged, after, before, seconds)

    def _room_for(self, source: int, group: list[_Copy], copies: int) -> bool:
        """Whether another full copy fits beside a group and all that is yet to come of it."""
        store = self._probe.store
        held = sum(store.pages_of(copy.seq) for copy in group)
        answers = (len(group) + 1) * store.pages_for(_MOST_ANSWER)
        return store.pool.num_free >= store.pages_of(source) + (copies - 1) * held + answers

    def _close(self, group: list[_Copy]) -> None:
        while group:
            self._probe.close(group.pop().seq)

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
        group: Sequence[_Copy],
        dialogue: Dialogue,
        reference: Reference,
        answers: list[list[Tensor]],
        form: _Form,
    ) -> list[Record]:
        """Records of copies; `answers` per turn are those of the copies that are not unchanged."""
        found = []
        left = [iter(of_turn) for of_turn in answers]
        for copy in group:
            held = {"kv_bytes": copy.kv_bytes, "full_bytes": copy.full_bytes, "compress_s": copy.seconds}
            name, budget = copy.variant.name, copy.variant.budget
            for number, turn in enumerate(dialogue.turns, 1):
                # What nothing was taken from is the full cache, and answers like it.
                logits = None if copy.unchanged else next(left[number - 1])
                measures = _measures(reference, number, logits)
                for task in self._tasks(dialogue):
                    found.append(form.record(task, turn, number, name, budget, measures, **held))
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
