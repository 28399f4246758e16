"""One measurement on a model: a trial's head scores, or a text's eviction errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.cache.evidence import Recorded
from minikv.cache.policies import Evidence, HeadProfile, make_policy
from minikv.calibration.scores import (
    attention_rows,
    copy_scores,
    eviction_error,
    retrieval_scores,
    without_negatives,
)
from minikv.calibration.trials import Trial
from minikv.config import CacheConfig
from minikv.probe import Probe

# What the layers are measured under: CompressKV's own selection at a small budget.
EVICTION = CacheConfig(policy="compresskv", budget=64, sinks=4, recent=16, window=16)


@dataclass(frozen=True)
class TrialScores:
    """nll: mean -log p of the answer's tokens. exact: whether greedy decoding gives the answer.
    retrieval, copy: [layers, query_heads]."""

    nll: float
    exact: bool
    retrieval: Tensor
    copy: Tensor


@torch.inference_mode()
def score_trial(probe: Probe, haystack: int, shared: int, trial: Trial) -> TrialScores:
    """Ask a question on a copy of the sequence `haystack`, which holds the trial's first `shared` tokens,
    with the answer given, and see what each head attends to where it is predicted."""
    ids = torch.tensor(trial.ids)
    answer = ids[-trial.num_answer :]
    seq = probe.fork(haystack)
    try:
        recorder = probe.record(Evidence(window=trial.num_answer), range(shared, len(ids) - 1))
        logits = probe.feed(seq, list(trial.ids[shared:-1]), logits="all", recorder=recorder)
        assert logits is not None
        logits = logits[-trial.num_answer :]
        recorded = recorder.result()
        assert recorded.query_positions is not None
        retrieval, copied = [], []
        for layer in range(probe.config.num_layers):
            view = probe.compressor.view(seq, layer, len(ids) - 1, recorded, output=False)
            weights = attention_rows(view)
            retrieval.append(retrieval_scores(weights, recorded.query_positions, trial.span))
            copied.append(copy_scores(weights, ids, trial.span, answer))
    finally:
        probe.close(seq)
    nll = float(F.cross_entropy(logits, answer))
    exact = bool((logits.argmax(dim=-1) == answer).all())
    return TrialScores(nll, exact, torch.stack(retrieval), torch.stack(copied))


@dataclass(frozen=True)
class Continuation:
    """A prompt and what follows it, both token ids. `content`: tokens of the prompt that are the user's."""

    prompt: list[int]
    content: int
    rest: list[int]


@torch.inference_mode()
def layer_errors(probe: Probe, text: Continuation, retrieval: Tensor, top_heads: int) -> Tensor:
    """What evicting all but a few entries of the prompt costs each layer: [layers].

    CompressKV chooses the entries, by the `top_heads` heads of each layer that are best by `retrieval`
    [layers, query_heads], and with the same budget for each layer. Every layer is measured alone: its
    inputs are those of the full cache, so that no error comes from the layers below. Each row of the
    continuation sees what was kept of the prompt, and the continuation up to itself.
    """
    config = probe.config
    profile = HeadProfile(without_negatives(retrieval), torch.ones(config.num_layers), top_heads)
    policy = make_policy(
        "compresskv",
        window=EVICTION.window,
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        profile=profile,
    )
    seq = probe.open()
    try:
        recorder = probe.record(policy.evidence, range(text.content))
        probe.feed(seq, text.prompt, logits="none", recorder=recorder)
        length = len(text.prompt)
        keep = probe.compressor.choose(seq, policy, EVICTION, length, recorder.result())
        rows = feed_recorded(probe, seq, text.rest)
        keep = F.pad(keep, (0, len(text.rest)), value=True)
        total = length + len(text.rest)
        views = (probe.compressor.view(seq, layer, total, rows) for layer in range(config.num_layers))
        return torch.tensor([eviction_error(view, keep[view.layer]) for view in views])
    finally:
        probe.close(seq)


def feed_recorded(probe: Probe, seq: int, ids: list[int]) -> Recorded:
    """Feed `ids`; the queries of all of them."""
    start = probe.num_tokens(seq)
    recorder = probe.record(Evidence(window=len(ids)), range(start, start + len(ids)))
    probe.feed(seq, ids, logits="none", recorder=recorder)
    return recorder.result()
