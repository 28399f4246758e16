"""A whole calibration: all trials, then all texts, each measured once and noted in the journal.

What a unit measures depends on the settings and its number alone, so a run that was stopped and gone
on with ends with the same profile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from minikv.calibration.journal import Journal, pack, unpack
from minikv.calibration.measure import Continuation, layer_errors, score_trial
from minikv.calibration.profile import Measurement
from minikv.calibration.scores import stability
from minikv.calibration.trials import NEEDLES, Plan, Trial, haystack_trials, shared_length
from minikv.errors import ConfigError, shown
from minikv.probe import Probe

_MIN_LENGTH = 256
_PROSE_ROWS = 48  # of a text's end that are fed as its continuation
_RESAMPLES = 1000


@dataclass(frozen=True)
class Settings:
    """What decides a calibration's result, besides the model.

    trials: questions asked. lengths: tokens of their prompts. texts: measured for layer errors.
    max_nll: a trial counts if the mean -log p of the answer's tokens is at most this; ln 2 = 0.69 is a
    probability of one half per token. top_heads: heads per layer that CompressKV is to read.
    """

    trials: int = 300
    lengths: tuple[int, ...] = (512, 1024, 2048)
    texts: int = 30
    seed: int = 0
    max_nll: float = 0.7
    top_heads: int = 4

    def __post_init__(self) -> None:
        for name in ("trials", "texts", "top_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {shown(getattr(self, name))}.")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, not {shown(self.seed)}.")
        if not self.lengths or min(self.lengths) < _MIN_LENGTH:
            raise ConfigError(
                f"lengths must be numbers of at least {_MIN_LENGTH} tokens, not {shown(self.lengths)}."
            )
        if not 0 < self.max_nll < float("inf"):
            raise ConfigError(f"max_nll must be a number above 0, not {shown(self.max_nll)}.")


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    language: str
    format: str
    kind: str
    counted: bool
    exact: bool


class Calibration:
    """Measures one model. `steps` does the work, `measurement` and `outcomes` tell what came of it.

    Raises ConfigError when the lengths do not fit the model's context.
    """

    def __init__(self, probe: Probe, settings: Settings, journal: Journal):
        limit = probe.max_context
        if max(settings.lengths) > limit:
            raise ConfigError(
                f"lengths must be at most the context of {limit:,} tokens, not {max(settings.lengths):,}."
            )
        self.settings = settings
        self._probe = probe
        self._journal = journal
        self._plan = Plan(settings.lengths, settings.seed)
        self._limit = limit

    @property
    def total(self) -> int:
        """Measurements of the whole run, those of an earlier part included."""
        return sum(map(len, self._trials)) + self.settings.texts

    @property
    def done(self) -> int:
        """Measurements that are in the journal."""
        return len(self._journal.entries)

    def steps(self) -> Iterator[None]:
        """Make the measurements that the journal lacks; returns control after each.

        Raises ConfigError when the model answered no question, so that no head can be told.
        """
        for index in range(len(self._trials)):
            yield from self._haystack(index)
        retrieval = self._mean("retrieval")
        for index in range(self.settings.texts):
            key = f"text {index}"
            if key not in self._journal.entries:
                errors = layer_errors(self._probe, self._text(index), retrieval, self.settings.top_heads)
                self._journal.add(key, {"errors": pack(errors)})
                yield

    def _haystack(self, index: int) -> Iterator[None]:
        """The trials of one haystack, which is computed once."""
        trials = self._trials[index]
        wanted = [n for n in range(len(trials)) if f"trial {index} {n}" not in self._journal.entries]
        if not wanted:
            return
        shared = shared_length(trials)
        seq = self._probe.open()
        try:
            self._probe.feed(seq, list(trials[0].ids[:shared]), logits="none")
            for n in wanted:
                scores = score_trial(self._probe, seq, shared, trials[n])
                entry = {
                    "nll": scores.nll,
                    "exact": scores.exact,
                    "retrieval": pack(scores.retrieval),
                    "copy": pack(scores.copy),
                }
                self._journal.add(f"trial {index} {n}", entry)
                yield
        finally:
            self._probe.close(seq)

    @cached_property
    def _trials(self) -> list[list[Trial]]:
        """Trials by haystack; together `settings.trials` of them, or less where answers have no tokens
        of their own."""
        wanted = self.settings.trials
        haystacks = range(-(-wanted // NEEDLES))
        trials = [self._make(index)[: wanted - index * NEEDLES] for index in haystacks]
        if not any(trials):
            raise self._nothing_to_ask()
        return trials

    def _make(self, index: int) -> list[Trial]:
        return haystack_trials(self._probe.tokenizer, self._plan, index, self._limit)

    def _nothing_to_ask(self) -> ConfigError:
        return ConfigError(
            f"No calibration question can be asked: lengths of {shown(self.settings.lengths)} leave no room "
            f"in the context of {self._limit:,} tokens, or the tokenizer splits no answer as it should."
        )

    def _text(self, index: int) -> Continuation:
        """A text of its own: by turns a question with its answer, and prose with more prose."""
        trials = self._make(len(self._trials) + index)
        if not trials:
            raise self._nothing_to_ask()
        trial = trials[index % len(trials)]
        ids = list(trial.ids)
        if index % 2 == 0:
            return Continuation(ids[: trial.prompt], trial.content, ids[trial.prompt :])
        end = shared_length(trials)
        start = end - _PROSE_ROWS
        return Continuation(ids[:start], start, ids[start:end])

    # Results

    @property
    def outcomes(self) -> list[Outcome]:
        """Of every trial, in order."""
        return [
            Outcome(
                trial.language,
                trial.format,
                trial.kind,
                entry["nll"] <= self.settings.max_nll,
                entry["exact"],
            )
            for trial, entry in self._scored()
        ]

    def _scored(self) -> Iterator[tuple[Trial, dict]]:
        for index, trials in enumerate(self._trials):
            for n, trial in enumerate(trials):
                yield trial, self._journal.entries[f"trial {index} {n}"]

    def _counted(self, name: str) -> Tensor:
        """Scores of the trials that count: [trials, layers, query_heads]."""
        config = self._probe.config
        rows = [unpack(entry[name]) for _, entry in self._scored() if entry["nll"] <= self.settings.max_nll]
        if not rows:
            raise ConfigError(
                f"{self._probe.name} answered none of {len(self.outcomes)} questions about calibration "
                "texts, so its retrieval heads cannot be told; try shorter lengths or a higher max_nll."
            )
        return torch.stack(rows).view(-1, config.num_layers, config.num_query_heads)

    def _mean(self, name: str) -> Tensor:
        return self._counted(name).mean(dim=0)

    def measurement(self) -> Measurement:
        """The profile's numbers, once `steps` is through."""
        retrieval = self._counted("retrieval")
        top = min(self.settings.top_heads, self._probe.config.num_query_heads)
        entries = (self._journal.entries[f"text {index}"] for index in range(self.settings.texts))
        errors = torch.stack([unpack(entry["errors"]) for entry in entries])
        errors = errors / errors.sum(dim=1, keepdim=True)
        return Measurement(
            retrieval=retrieval.mean(dim=0),
            copy=self._mean("copy"),
            stability=stability(retrieval, top, _RESAMPLES, self.settings.seed),
            layer_errors=errors.mean(dim=0),
            layer_spread=errors.std(dim=0, correction=0),
            top_heads=top,
        )

    def facts(self) -> dict[str, object]:
        """What the profile's metadata say of how it was made."""
        counted = Counter(outcome.counted for outcome in self.outcomes)
        own = {name: value for name, value in asdict(self.settings).items() if name != "top_heads"}
        lengths = ",".join(map(str, self.settings.lengths))
        return {**own, "lengths": lengths, "trials": counted.total(), "trials_counted": counted[True]}
