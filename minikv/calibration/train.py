"""Training of a router: one text after the other, each noted in the journal with all that the next needs.

There are two targets: the attention that tokens draw with the full cache (`spans`), and what the model says
next with it (`answers`).

The state after a text depends on the settings and the texts before alone, so a run that was stopped and gone
on with ends with the same router, bit for bit.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.spans.router import Router
from minikv.calibration.answers import answers, divergence
from minikv.calibration.frozen import Frozen
from minikv.calibration.journal import Journal, pack, unpack
from minikv.calibration.measure import Continuation
from minikv.calibration.spans import Lesson, loss_of, make_lesson, recall_of
from minikv.calibration.trials import Plan, haystack_trials
from minikv.errors import ConfigError, shown
from minikv.probe import Probe

MOST_PARAMETERS = 0.0005
"""Of the model's, that a router may have."""

_REST = 48  # of a text's end, whose queries are learned from
_BUDGETS = (0.1, 0.05, 0.2)
_BETAS = (0.9, 0.99)
# Source code that lies in every installation, and is not what evaluations read.
_MODULES = (
    *("argparse", "ast", "calendar", "configparser", "csv", "datetime", "decimal", "difflib", "fractions"),
    *(
        "heapq",
        "http.client",
        "inspect",
        "json.decoder",
        "logging",
        "optparse",
        "pathlib",
        "pickle",
        "shutil",
    ),
    *("smtplib", "statistics", "subprocess", "tarfile", "textwrap", "urllib.request"),
)


@dataclass(frozen=True)
class RouterSettings:
    """What decides a router, besides the model.

    texts: learned from; held: measured alone, before and after. length: tokens of each. steps: with each
    text. rate: of learning at the start, falling to nothing as a cosine. shares, logits: weights of the two
    targets, by direction alone; 0 leaves one out.
    """

    texts: int = 32
    held: int = 6
    length: int = 1024
    steps: int = 10
    rate: float = 0.01
    shares: float = 1.0
    logits: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "held", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {shown(getattr(self, name))}.")
        if self.length < 256:
            raise ConfigError(f"length must be at least 256 tokens, not {shown(self.length)}.")
        if not 0 < self.rate < 1:
            raise ConfigError(f"rate must be a number above 0 and below 1, not {shown(self.rate)}.")
        for name in ("shares", "logits"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number from 0 up, not {shown(getattr(self, name))}.")
        if not self.shares + self.logits:
            raise ConfigError("shares and logits are both 0; one of the two has to be learned from.")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, not {shown(self.seed)}.")


@dataclass(frozen=True)
class Quality:
    """Of a router on a text: KL divergence of shares, recall of true mass, and KL divergence of next-token
    distributions, None where logits are not learned from."""

    loss: float
    recall: float
    answers: float | None


@dataclass(frozen=True)
class Comparison:
    """Of one held text: codes alone, and the router."""

    plain: Quality
    trained: Quality


class Training:
    """Trains one model's router; `steps` does the work.

    frozen: the model of the probe, which learning from logits needs. Raises ConfigError when a text does not
    fit the context, or when the router would have too many parameters for the model.
    """

    def __init__(
        self, probe: Probe, settings: RouterSettings, journal: Journal, frozen: Frozen | None = None
    ) -> None:
        assert frozen is not None or not settings.logits
        self._frozen = frozen if settings.logits else None
        shape = probe.config
        self._probe, self.settings, self._journal = probe, settings, journal
        self._plain = Router.plain(shape.num_layers, shape.num_query_heads, shape.head_dim)
        if settings.length > probe.max_context:
            raise ConfigError(
                f"length must be at most the context of {probe.max_context:,} tokens, not "
                f"{settings.length:,}."
            )
        if self.share >= MOST_PARAMETERS:
            raise ConfigError(
                f"A router of {self.num_parameters:,} parameters would be {100 * self.share:.3f}% of this "
                f"model; it may be {100 * MOST_PARAMETERS}%."
            )

    @property
    def num_parameters(self) -> int:
        """Numbers that are learned."""
        return self._plain.num_parameters

    @property
    def share(self) -> float:
        """Of the model's parameters."""
        return self.num_parameters / self._probe.config.num_parameters()

    @property
    def total(self) -> int:
        """Texts of the whole run, those of an earlier part included."""
        return self.settings.texts + self.settings.held

    @property
    def done(self) -> int:
        """Texts that are in the journal."""
        return len(self._journal.entries)

    def steps(self) -> Iterator[None]:
        """Take the texts that the journal lacks; returns control after each."""
        for index in range(self.settings.texts):
            if f"text {index}" not in self._journal.entries:
                state = self._learn(self._lesson(index), index)
                self._journal.add(f"text {index}", {name: pack(part) for name, part in state.items()})
                yield
        router = self.router()
        for index in range(self.settings.held):
            if f"held {index}" not in self._journal.entries:
                lesson = self._lesson(self.settings.texts + index)
                found = self._compared(router, lesson)
                self._journal.add(f"held {index}", asdict(found))
                yield

    def router(self) -> Router:
        """What has been learned from all texts."""
        return self._router(self._state(self.settings.texts)["parameters"])

    def comparisons(self) -> list[Comparison]:
        """Of all held texts."""
        entries = (self._journal.entries[f"held {index}"] for index in range(self.settings.held))
        return [Comparison(**{name: Quality(**entry[name]) for name in entry}) for entry in entries]

    def _state(self, texts: int) -> dict[str, Tensor]:
        """Parameters and moments after so many texts, flat."""
        if texts:
            entry = self._journal.entries[f"text {texts - 1}"]
            return {name: unpack(entry[name]) for name in ("parameters", "first", "second")}
        flat = torch.cat([part.flatten() for part in vars(self._plain).values()])
        return {"parameters": flat, "first": torch.zeros_like(flat), "second": torch.zeros_like(flat)}

    def _router(self, flat: Tensor) -> Router:
        scale, bias = flat.split([self._plain.scale.numel(), self._plain.bias.numel()])
        # Learned in units of a score after it is divided, so that one rate suits both.
        root = math.sqrt(self._probe.config.head_dim)
        return Router(scale.view_as(self._plain.scale), root * bias.view_as(self._plain.bias))

    def _learn(self, lesson: Lesson, index: int) -> dict[str, Tensor]:
        """Adam, by hand: its whole state is in the journal."""
        state, settings = self._state(index), self.settings
        full = self._full(lesson)
        parameters, first, second = (state[name].clone() for name in ("parameters", "first", "second"))
        for step in range(settings.steps):
            number = index * settings.steps + step
            gradient = self._gradient(parameters, lesson, full)
            first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient.square()
            rate = settings.rate * (1 + math.cos(math.pi * number / (settings.texts * settings.steps))) / 2
            size = (second / (1 - _BETAS[1] ** (number + 1))).sqrt() + 1e-8
            parameters = parameters - rate * first / (1 - _BETAS[0] ** (number + 1)) / size
        return {"parameters": parameters, "first": first, "second": second}

    @torch.no_grad()
    def _full(self, lesson: Lesson) -> Tensor | None:
        """What the full cache says, if it is learned from."""
        return None if self._frozen is None else answers(self._frozen, lesson, None)

    def _gradient(self, flat: Tensor, lesson: Lesson, full: Tensor | None) -> Tensor:
        """Of both targets, the direction of each alone: their sizes say nothing of each other, nor of how
        much a text has to teach."""
        flat = flat.detach().requires_grad_(True)
        router, total = self._router(flat), torch.zeros_like(flat)
        if self.settings.shares:
            total += self.settings.shares * _direction(loss_of(router, lesson), flat)
        if self._frozen is not None and full is not None:
            loss = divergence(full, answers(self._frozen, lesson, router))
            total += self.settings.logits * _direction(loss, flat)
        return total

    @torch.no_grad()
    def _compared(self, router: Router, lesson: Lesson) -> Comparison:
        full = self._full(lesson)

        def quality(one: Router) -> Quality:
            said = None
            if self._frozen is not None and full is not None:
                said = float(divergence(full, answers(self._frozen, lesson, one)))
            return Quality(float(loss_of(one, lesson)), recall_of(one, lesson), said)

        return Comparison(quality(self._plain), quality(router))

    def _lesson(self, index: int) -> Lesson:
        return make_lesson(self._probe, self._text(index), _BUDGETS[index % len(_BUDGETS)])

    def _text(self, index: int) -> Continuation:
        """By turns a question about a text with its answer, and source code."""
        settings, tokenizer = self.settings, self._probe.tokenizer
        if index % 2 == 0:
            plan = Plan((settings.length,), settings.seed)
            trials = haystack_trials(tokenizer, plan, index // 2, self._probe.max_context)
            if trials:
                trial = trials[index // 2 % len(trials)]
                return _continued(list(trial.ids), min(_REST, len(trial.ids) - trial.content))
        rng = random.Random(f"{settings.seed} source {index}")
        ids = tokenizer.encode_rendered(inspect.getsource(import_module(rng.choice(_MODULES))))
        start = rng.randrange(max(1, len(ids) - settings.length))
        return _continued(ids[start : start + settings.length], _REST)


def _continued(ids: list[int], rest: int) -> Continuation:
    return Continuation(ids[:-rest], len(ids) - rest, ids[-rest:])


def _direction(loss: Tensor, parameters: Tensor) -> Tensor:
    """The gradient with length 1."""
    (gradient,) = torch.autograd.grad(loss, parameters, retain_graph=True)
    return F.normalize(gradient, dim=0)
