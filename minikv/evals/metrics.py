"""How well an answer is predicted, and how near a distribution is to the full cache's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measures:
    """What is measured over the tokens of one answer, each given those before it.

    exact: whether every token of the answer is the likeliest one; token_accuracy: the share that is.
    nll: mean negative log-likelihood of the answer's tokens, in nats.
    kl: mean Kullback-Leibler divergence of the distributions from the full cache's, in nats.
    top1: share of tokens where both have the same likeliest token.
    """

    exact: bool
    token_accuracy: float
    nll: float
    kl: float
    top1: float


def measure(logits: Tensor, gold: Tensor, reference: Tensor) -> Measures:
    """Measures of an answer gold [n] int64 from its logits [n, vocab] float32 and the full cache's
    `reference` [n, vocab]."""
    log_p = torch.log_softmax(logits, dim=-1)
    right = logits.argmax(dim=-1) == gold
    chosen = log_p.gather(-1, gold.unsqueeze(-1))
    return Measures(
        exact=bool(right.all()),
        token_accuracy=right.float().mean().item(),
        nll=-chosen.mean().item(),
        kl=_divergence(torch.log_softmax(reference, dim=-1), log_p),
        top1=(logits.argmax(dim=-1) == reference.argmax(dim=-1)).float().mean().item(),
    )


def _divergence(log_p: Tensor, log_q: Tensor) -> float:
    """Mean over rows of KL(p || q); never below zero, which rounding alone could bring."""
    # A token that is impossible under p adds nothing, whatever it is under q.
    terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
    return max(0.0, terms.sum(dim=-1, dtype=torch.float64).mean().item())
