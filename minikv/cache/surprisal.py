"""How surprising tokens are to the model: -log p of each.

The exact sum of a softmax needs the whole output head for every token. The estimate takes the sum over the
first ids of the vocabulary and over the words that the text has just used. Ids are given out in the order in
which a tokenizer was trained, so the first are the frequent ones; and rare words come back where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Part of what is kept with an estimate, so that others are not taken for it.
ESTIMATE = "first 4096 or a twelfth, last 256"

# Rows [n] int64 and ids [k] int64, ascending, to logits [n, k] float32. Where these are on a device, sums are
# taken there, and one number a row comes to the host.
LogitsOf = Callable[[Tensor, Tensor], Tensor]

_FIRST, _SHARE = 4096, 12
_LAST = 256
_ROWS = 256
_HEAD_ROWS = 64


def token_surprisal(logits_of: Callable[[Tensor], Tensor], rows: Tensor, targets: Tensor) -> Tensor:
    """-log p [n] float32 of the targets [n] int64 that follow the rows [n] int64, exactly.

    `logits_of` gives the logits [m, vocab] of rows [m]; it is asked for few at a time, as the logits
    of a whole chunk would take more memory than its layers.
    """
    parts = []
    for start in range(0, len(rows), _HEAD_ROWS):
        logits = logits_of(rows[start : start + _HEAD_ROWS])
        chosen = logits.gather(1, targets[start : start + _HEAD_ROWS, None].to(logits.device)).squeeze(1)
        parts.append((torch.logsumexp(logits, dim=1) - chosen).cpu())
    return torch.cat(parts) if parts else torch.empty(0)


def estimated_surprisal(
    logits_of: LogitsOf, vocab_size: int, rows: Tensor, tokens: Sequence[int], start: int
) -> Tensor:
    """-log p [n] float32 of tokens[start:] that follow the rows [n] int64, by a part of the vocabulary.

    That part is the first ids, a twelfth of them but at least 4,096, and the last 256 tokens up to the one in
    question, of a text that `tokens` is from its beginning. Exact where that is all. The values have the
    same bits wherever a text is divided into calls, if logits have.
    """
    first = min(vocab_size, frequent(vocab_size))
    ids = torch.arange(first)
    if first == vocab_size:
        targets = torch.tensor(tokens[start : start + len(rows)], dtype=torch.int64)
        return token_surprisal(lambda some: logits_of(some, ids), rows, targets)
    parts = []
    for done in range(0, len(rows), _ROWS):
        some, at = rows[done : done + _ROWS], start + done
        text = torch.tensor(tokens[max(0, at + 1 - _LAST) : at + len(some)])
        general, (own, chosen) = logits_of(some, ids), _own(logits_of, first, some, text)
        target = text[-len(some) :, None].to(general.device)
        found = general.gather(1, target.clamp(max=first - 1))
        parts.append(_minus_log_p(general, own, torch.where(target < first, found, chosen)).cpu())
    return torch.cat(parts) if parts else torch.empty(0)


def frequent(vocab_size: int) -> int:
    """How many of the first ids are always in the sum."""
    # Whole vectors of any processor: then a row is summed in one order wherever it stands.
    return max(_FIRST, -(-vocab_size // _SHARE // 64) * 64)


def _own(logits_of: LogitsOf, first: int, rows: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, 256] of the last tokens up to each target, -inf for those that are not to be counted: ids
    below `first`, what comes again before the target, and places before the text. And [n, 1] of the targets.
    The targets are the last [n] of the text."""
    ends = torch.arange(len(text) - len(rows), len(text))[:, None]
    at = ends + torch.arange(1 - _LAST, 1)
    place = at.clamp(min=0)
    counted = (at >= 0) & (text >= first)[place] & (_again(text)[place] > ends)
    ids = text[text >= first].unique()
    column = torch.where(counted, torch.searchsorted(ids, text)[place] + 1, 0)
    own = F.pad(logits_of(rows, ids), (1, 0), value=-torch.inf)
    own = own.gather(1, column.to(own.device))
    return own, own[:, -1:]


def _again(text: Tensor) -> Tensor:
    """Where each token [m] comes next, [m] int64; m where it does not."""
    values, order = text.sort(stable=True)
    same = values[1:] == values[:-1]
    again = torch.full_like(text, len(text))
    again[order[:-1][same]] = order[1:][same]
    return again


def _minus_log_p(general: Tensor, own: Tensor, chosen: Tensor) -> Tensor:
    """[n] float32 from logits [n, *] and those of the targets [n, 1]."""
    peak = torch.maximum(general.amax(1, keepdim=True), own.amax(1, keepdim=True))
    total = (general - peak).exp_().sum(1) + (own - peak).exp_().sum(1)
    # The last digits of a logarithm depend on where a number stands in a vector; in float64 they are cut off.
    return (total.double().log() + (peak - chosen).squeeze(1)).float()
