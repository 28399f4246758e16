"""`/kv` of the chat: what the conversation's KV cache holds, from where, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from minikv.cli import console
from minikv.cli.chat_state import ChatState
from minikv.config import CacheConfig, format_size
from minikv.errors import ConfigError, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from torch import Tensor

# Shades from nothing to everything, each for shares up to its limit; most of a compressed cache is thin.
_LIMITS = (0.0, 0.05, 0.2, 0.5, 0.8, 1.0)
_MARKS = " ·░▒▓█"
_PLAIN_MARKS = " .-+*#"
_STYLES = ("", "blue", "cyan", "green", "yellow", "bright_red")
_MOST_HEADS_LISTED = 4
_FEWEST_COLUMNS = 8
_ROUNDING = 1e-6  # of a mean of float32


def describe(state: ChatState, layer: str) -> None:
    """Bytes now against the full cache, policy and entries; with a policy, a map of what is held.

    `layer` "" shows a row for every layer, else one for every KV head of that layer. Raises ConfigError
    unless it is a layer.
    """
    session = state.session
    lengths: list[list[int]] = session.kv_entries.tolist()
    chosen = _layer(layer, len(lengths)) if layer else None
    if session.num_tokens == 0:
        state.say("The KV cache of this conversation is empty.")
        return
    state.say(_sizes(state))
    compresses = session.cache.policy != "full"
    if compresses:
        state.say(_policy(session.cache))
    if chosen is not None:
        _show_map(
            f"layer {chosen}, KV head and entries",
            [f"{head:>4}  {count:,}" for head, count in enumerate(lengths[chosen])],
            session.kv_map()[chosen],
        )
    elif compresses:
        _show_map(
            "layer and entries of its heads",
            [f"{index:>5}  {_counts(row)}" for index, row in enumerate(lengths)],
            session.kv_map().float().mean(dim=1),
        )
    else:
        for line in _equal_layers(lengths):
            state.say(line)


def _layer(text: str, count: int) -> int:
    if text not in map(str, range(count)):
        raise ConfigError(f"/kv takes the number of a layer from 0 to {count - 1}, not {shown(text)}.")
    return int(text)


def _sizes(state: ChatState) -> str:
    tokens, held = state.session.num_tokens, state.session.kv_bytes
    full = state.llm.full_kv_bytes(tokens)
    share = f" ({held / full:.1%})" if held != full else ""
    return (
        f"{format_size(held)} held for {tokens:,} tokens{share}; the full cache of them is "
        f"{format_size(full)} ({state.llm.kv_bytes_per_token:,} bytes per token, {state.llm.kv_dtype})."
    )


def _policy(cache: CacheConfig) -> str:
    budget = cache.budget
    kept = (
        f"{budget:.4g} of the tokens"
        if isinstance(budget, float)
        else f"{budget:,} entries per lane"
        if isinstance(budget, int)
        else str(budget)
    )
    slack = "" if cache.decode_slack is None else f", slack {cache.decode_slack:,}"
    return f"Policy {cache.policy}, budget {kept}, prefill {cache.prefill}{slack}."


def _counts(lengths: Sequence[int]) -> str:
    if len(lengths) <= _MOST_HEADS_LISTED:
        return " ".join(f"{count:,}" for count in lengths)
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _equal_layers(lengths: list[list[int]]) -> list[str]:
    """A line for every run of layers whose lanes are alike."""
    lines = []
    first = 0
    for layer in range(1, len(lengths) + 1):
        if layer == len(lengths) or lengths[layer] != lengths[first]:
            lines.append(_layer_line(first, layer - 1, lengths[first]))
            first = layer
    return lines


def _layer_line(first: int, last: int, lengths: Sequence[int]) -> str:
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    if len(set(lengths)) == 1:
        return f"{layers}: {lengths[0]:,} entries in each of {len(lengths)} lanes"
    return f"{layers}: {', '.join(f'{n:,}' for n in lengths)} entries in {len(lengths)} lanes"


# The map


def _show_map(title: str, labels: list[str], held: Tensor) -> None:
    """Print `held` [rows, tokens], the share of each token that a row keeps, as wide as the terminal."""
    screen = console.error_console()
    margin = max(map(len, labels)) + 2
    columns = max(_FEWEST_COLUMNS, screen.width - margin - 1)
    shares = binned(held, columns)
    marks = _MARKS if _can_show(screen) else _PLAIN_MARKS
    tokens = held.shape[1]
    width = len(shares[0])
    screen.print(f"{title}; tokens 0 to {tokens - 1:,}, {tokens / width:.3g} a column")
    for label, row in zip(labels, shares, strict=True):
        screen.print(_line(label.ljust(margin), row, marks))
    keys = (f"{mark} to {limit:.0%}" for mark, limit in zip(marks[1:], _LIMITS[1:], strict=True))
    screen.print(f"share kept: blank none, {', '.join(keys)}")


def binned(held: Tensor, columns: int) -> list[list[float]]:
    """Means of `held` [rows, tokens] over at most `columns` runs of tokens, of nearly equal lengths."""
    import torch

    tokens = held.shape[1]
    columns = min(columns, tokens)
    place = torch.arange(tokens) * columns // tokens
    sums = torch.zeros(held.shape[0], columns).index_add_(1, place, held.float())
    return (sums / torch.bincount(place, minlength=columns)).tolist()


def _line(label: str, shares: Sequence[float], marks: str) -> Text:
    from rich.text import Text

    line = Text(label)
    for level, run in groupby(map(_level, shares)):
        line.append(marks[level] * len(list(run)), style=_STYLES[level])
    return line


def _level(share: float) -> int:
    return next(level for level, limit in enumerate(_LIMITS) if share <= limit + _ROUNDING)


def _can_show(screen: Console) -> bool:
    try:
        _MARKS.encode(screen.encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
