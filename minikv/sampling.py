"""From one row of logits to one token.

Every request has its own `Sampler` with its own random generator, so that a result depends on the
request alone and never on its batch mates. The order of operations is: logit bias, penalties,
temperature, top-k, top-p, min-p, draw. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minikv.errors import ConfigError, RequestError, shown
from minikv.results import TokenLogprob

MAX_COMPLETIONS = 128
"""Most completions of one prompt."""

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Impossible values raise ConfigError.

    temperature: 0 (or under a millionth) is greedy; ties go to the lowest token id.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the fewest likeliest tokens whose probabilities reach top_p; 1 keeps all.
    min_p: drop tokens less likely than min_p times the likeliest one; 0 drops none.
    repetition_penalty: above 1 makes tokens of prompt and output less likely; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that is in the output,
        once and per occurrence; 0 is off.
    logit_bias: added to the logits of these token ids.
    seed: makes draws reproducible; None takes one from the operating system.
    logprobs: None for none, 0 for the chosen token's, n for those of the n likeliest as well.
    n: completions per prompt; completion i draws with seed + i.
    max_tokens: most tokens to produce; None goes on to the end of the context.
    stop: strings that end the text, which is cut before them; kept as a tuple.
    stop_token_ids: ids that end the text, besides the model's own; kept as a tuple.
    ignore_eos: do not end at the model's own end-of-turn tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_whole("top_k", self.top_k, 0, hint=" (0 turns it off)")
        _check_number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_whole("n", self.n, 1)
        if self.n > MAX_COMPLETIONS:
            raise ConfigError(f"n must be at most {MAX_COMPLETIONS}, not {shown(self.n)}.")
        for name, low in (("seed", 0), ("logprobs", 0), ("max_tokens", 1)):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), low, hint=" or None")
        if self.seed is not None and self.seed >= 2**63:
            raise ConfigError(f"seed must be below 2**63, not {shown(self.seed)}.")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be true or false, not {shown(self.ignore_eos)}.")
        # Copies, so that the caller's lists cannot change a frozen object.
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no randomness is involved."""
        return self.temperature < 1e-6


@dataclass(frozen=True)
class Sample:
    """A chosen token, with its log-probability if the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Chooses the tokens of one completion and remembers what its penalties need.

    `prompt_ids` count for the repetition penalty only. `index` is the completion's number among
    the `n` of its request. Raises ConfigError if `logit_bias` names an id outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, index: int = 0
    ) -> None:
        for token_id in params.logit_bias:
            if token_id >= vocab_size:
                raise ConfigError(
                    f"logit_bias names the token id {token_id}, but the vocabulary ends at {vocab_size - 1}."
                )
        self.params = params
        self._generator: torch.Generator | None = None
        if not params.is_greedy:
            self._generator = _make_generator(params.seed, index)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._seen: Tensor | None = None  # [vocab] bool: in prompt or output
        if params.repetition_penalty != 1:
            seen = torch.tensor(prompt_ids, dtype=torch.int64)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, seen, True)
        self._counts: Tensor | None = None  # [vocab] float32: occurrences in the output
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32)

    @property
    def is_plain(self) -> bool:
        """Whether sampling is nothing but the argmax of the raw logits."""
        changes = self._seen is not None or self._counts is not None or self.params.logit_bias
        return self.params.is_greedy and self.params.logprobs is None and not changes

    def observe(self, token_id: int) -> None:
        """Count a token that joined the output without being sampled here."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def sample(self, logits: Tensor) -> Sample:
        """Choose a token from `logits` [vocab] float32, left unchanged, and observe it.

        Raises RequestError if the model produced no usable number; the sampler is then unchanged.
        """
        # The generator and the counts live on the CPU: one seed, one result on every device.
        raw = logits.detach().to("cpu", torch.float32)
        _check_peak(raw.numpy().max())
        if self.is_plain:
            return Sample(int(raw.numpy().argmax()))
        adjusted = self._adjust(raw)
        token_id = int(adjusted.argmax()) if self.params.is_greedy else self._draw(adjusted)
        self.observe(token_id)
        count = self.params.logprobs
        return Sample(token_id, None if count is None else token_logprob(raw, token_id, count))

    def _adjust(self, logits: Tensor) -> Tensor:
        """Apply bias and penalties; the result may be `logits` itself."""
        if self.params.logit_bias:
            logits = logits.index_add(0, self._bias_ids, self._bias)
        if self._seen is not None:
            penalty = self.params.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen, penalised, logits)
        if self._counts is not None:
            logits = logits - self.params.frequency_penalty * self._counts
            logits -= self.params.presence_penalty * (self._counts > 0)
        return logits

    def _draw(self, logits: Tensor) -> int:
        params = self.params
        # In numpy: waking torch's threads for so few numbers takes longer than the work.
        values = logits.numpy()
        ids: np.ndarray | None = None  # None: all of the vocabulary, in order
        if 0 < params.top_k < len(values):
            ids = np.sort(top_ids(logits, params.top_k).numpy())
            values = values[ids]
        # Peak first: dividing by a tiny temperature must not overflow.
        probs = np.exp((values - values.max()) / np.float32(params.temperature))
        probs /= probs.sum()
        if params.top_p < 1:
            kept = nucleus(probs, params.top_p)
            ids, probs = kept if ids is None else ids[kept], probs[kept]
        if params.min_p > 0:
            probs = np.where(probs >= params.min_p * probs.max(), probs, np.float32(0.0))
        # One uniform number per token, whatever was kept: the stream of draws stays aligned.
        cumulative = np.cumsum(probs, dtype=np.float64)
        uniform = torch.rand(1, generator=self._generator, dtype=torch.float64).item()
        place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return place if ids is None else int(ids[place])


def sample_batch(
    logits: Tensor, samplers: Sequence[Sampler], likeliest: Tensor | None = None
) -> list[Sample | RequestError]:
    """Sample every row of `logits` [rows, vocab], as `Sampler.sample` would row by row.

    likeliest: [rows], the token of the largest logit where that is known already, -1 where a logit is
    not finite. A row without usable numbers gets its error in place of a sample, so that its batch
    mates, whose generators have moved on, are not lost with it.
    """
    assert len(logits) == len(samplers)
    plain = [sampler.is_plain for sampler in samplers]
    best: list[int] = []
    if any(plain):
        best = (_likeliest(logits) if likeliest is None else likeliest).tolist()
    out: list[Sample | RequestError] = []
    for row, sampler in enumerate(samplers):
        if plain[row] and best[row] >= 0:
            out.append(Sample(best[row]))
            continue
        try:
            out.append(sampler.sample(logits[row]))
        except RequestError as error:
            out.append(error)
    return out


def _likeliest(logits: Tensor) -> np.ndarray:
    """Argmax of each row, -1 for one that `Sampler.sample` has to refuse."""
    # numpy's argmax is ten times as fast as torch's on a CPU, and like it takes the lowest of
    # equals and a NaN before any number.
    values = logits.detach().to("cpu", torch.float32).numpy()
    best = values.argmax(axis=-1)
    peaks = values[np.arange(len(best)), best]
    return np.where(np.isfinite(peaks), best, -1)


def token_logprob(logits: Tensor, token_id: int, count: int) -> TokenLogprob:
    """Log-probability of `token_id` under `logits` [vocab], with the `count` likeliest tokens."""
    total = torch.logsumexp(logits, dim=0)
    ids = top_ids(logits, min(count, len(logits)))
    chosen = torch.cat([torch.tensor([token_id]), ids])
    values = (logits[chosen] - total).clamp(min=LOGPROB_FLOOR).tolist()
    return TokenLogprob(token_id, values[0], tuple(zip(ids.tolist(), values[1:], strict=True)))


def top_ids(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of `values` [n], largest first; of equals the lower index."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    least = float(torch.topk(values, count).values[-1])
    ids = torch.from_numpy(_at_least(values.numpy(), least, count))
    return ids[torch.sort(values[ids], descending=True, stable=True).indices]


def nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Indices, ascending, of the fewest largest of `probs` [n] float32 that sum to at least `top_p`.

    Of equal ones at the border the lower indices are kept; at least one always is.
    """
    # The bits of a float that is not negative are in its own order, so their upper part puts the
    # weights into ordered bins; only the bin in which the sum reaches top_p needs sorting.
    bins = probs.view(np.int32) >> 18
    from_top = np.cumsum(np.bincount(bins, weights=probs)[::-1])
    place = int(np.searchsorted(from_top, top_p))
    if place == len(from_top):  # rounding: all of them sum to a little less than top_p
        return np.arange(len(probs))
    border = len(from_top) - 1 - place
    ordered = np.sort(probs[bins == border])[::-1]
    within = np.cumsum(ordered, dtype=np.float64) + (from_top[place - 1] if place else 0.0)
    count = min(int(np.searchsorted(within, top_p)) + 1, len(ordered))
    above = int(np.count_nonzero(bins > border))
    return _at_least(probs, float(ordered[count - 1]), above + count)


def _at_least(values: np.ndarray, least: float, count: int) -> np.ndarray:
    """Indices, ascending, of the `count` values above or at `least`; lower ones first of those at it."""
    found = np.flatnonzero(values >= least)
    if len(found) == count:
        return found
    tied = values[found] == least
    return np.sort(np.concatenate((found[~tied], found[tied][: count - np.count_nonzero(~tied)])))


def _make_generator(seed: int | None, index: int) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed + index)
    return generator


def _check_peak(peak: float) -> None:
    # The maximum is NaN if any logit is, and minus infinity only if all are.
    if not math.isfinite(float(peak)):
        raise RequestError(
            "The model produced logits that are not finite numbers, so no token can be chosen; its weights "
            "or the KV dtype may be at fault."
        )


def _check_number(name: str, value: Any, low: float, high: float, above_low: bool = False) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not valid or (above_low and value == low):
        lower = "above" if above_low else "of at least"
        raise ConfigError(
            f"{name} must be a number {lower} {low:g} and at most {high:g}, not {shown(value)}."
        )


def _check_whole(name: str, value: Any, low: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}{hint}, not {shown(value)}.")


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, not be {shown(bias)}.")
    for token_id, value in bias.items():
        _check_whole("A token id in logit_bias", token_id, 0)
        _check_number(f"logit_bias[{token_id}]", value, -1e9, 1e9)
    return dict(bias)


def _checked_stops(stops: Any) -> tuple[str, ...]:
    listed = (stops,) if isinstance(stops, str) else stops
    if not isinstance(listed, Sequence) or not all(isinstance(stop, str) for stop in listed):
        raise ConfigError(f"stop must be a string or a list of strings, not {shown(stops)}.")
    if not all(listed):
        raise ConfigError("stop must not hold an empty string, which every text contains.")
    return tuple(listed)


def _checked_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise ConfigError(f"{name} must be a list of token ids, not {shown(ids)}.")
    for token_id in ids:
        _check_whole(f"A token id in {name}", token_id, 0)
    return tuple(ids)
