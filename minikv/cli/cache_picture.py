"""A KV cache at the terminal: what it costs, under which policy, and a map of what it holds of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from minikv.config import CacheConfig, format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from torch import Tensor

    from minikv import LLM

# Shades from nothing to everything, each for shares up to its limit; most of a compressed cache is thin.
_LIMITS = (0.0, 0.05, 0.2, 0.5, 0.8, 1.0)
_MARKS = " ·░▒▓█"
_PLAIN_MARKS = " .-+*#"
_STYLES = ("", "blue", "cyan", "green", "yellow", "bright_red")
# Prototypes of up to 9 tokens are digits, larger ones letters for twice as many each.
_LETTERS = "ABCD"
_FIRST_LETTER = 10
_FEWEST_COLUMNS = 8
_ROUNDING = 1e-6  # of a mean of float32


def sizes_line(llm: LLM, num_tokens: int, held: int) -> str:
    """What `held` bytes are beside the full cache of as many tokens."""
    full = llm.full_kv_bytes(num_tokens)
    share = f" ({held / full:.1%})" if held != full else ""
    return (
        f"{format_size(held)} held for {num_tokens:,} tokens{share}; the full cache of them is "
        f"{format_size(full)} ({llm.kv_bytes_per_token:,} bytes per token, {llm.kv_dtype})."
    )


def policy_line(cache: CacheConfig) -> str:
    """Policy and budget in a sentence."""
    if cache.policy == "full":
        return "Policy full: every token is held."
    budget = cache.budget
    kept = (
        f"{budget:.5g} of the tokens"
        if isinstance(budget, float)
        else f"{budget:,} entries per lane"
        if isinstance(budget, int)
        else str(budget)
    )
    slack = "" if cache.decode_slack is None else f", slack {cache.decode_slack:,}"
    refit = "" if cache.refit is None else f", {'with' if cache.refit else 'without'} refit"
    return f"Policy {cache.policy}, budget {kept}, prefill {cache.prefill}{slack}{refit}."


def map_lines(screen: Console, title: str, labels: Sequence[str], held: Tensor) -> list[Text]:
    """A map as wide as the screen: a row for each label, over runs of tokens, and its key.

    held: [rows, heads, tokens] as `minikv.cache.picture.resolution` gives it; a row is the mean of its heads.
    """
    from rich.text import Text

    from minikv.cache.picture import cells

    margin = max(map(len, labels)) + 2
    shown = cells(held, max(_FEWEST_COLUMNS, screen.width - margin - 1))
    marks = _MARKS if can_show(screen) else _PLAIN_MARKS
    tokens, width = held.shape[-1], shown.kept.shape[-1]
    lines = _wrapped(f"{title}; tokens 0 to {tokens - 1:,}, {tokens / width:.3g} a column", screen)
    values = (shown.kept, shown.merged, shown.entries, shown.sizes)
    for label, *row in zip(labels, *(value.tolist() for value in values), strict=True):
        line = Text(label.ljust(margin))
        for (mark, style), run in groupby(_look(marks, *cell) for cell in zip(*row, strict=True)):
            line.append(mark * len(list(run)), style=style)
        lines.append(line)
    keys = (f"{mark} to {limit:.0%}" for mark, limit in zip(marks[1:], _LIMITS[1:], strict=True))
    lines += _wrapped(f"share held: blank none, {', '.join(keys)}", screen)
    if (shown.merged > 0).any():
        letters = (f"{letter} from {_FIRST_LETTER << i}" for i, letter in enumerate(_LETTERS))
        lines += _wrapped(
            f"mostly in prototypes: 2 to 9 of so many tokens each, {', '.join(letters)}", screen
        )
        if screen.color_system and not screen.no_color:
            lines += _wrapped("colour: entries per token, from blue (few) to red (one for each)", screen)
    return lines


def _wrapped(text: str, screen: Console) -> list[Text]:
    from textwrap import wrap

    from rich.text import Text

    return [Text(line) for line in wrap(text, max(1, screen.width - 1))]


def can_show(screen: Console) -> bool:
    """Whether the screen's encoding has the shades."""
    try:
        _MARKS.encode(screen.encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _look(marks: str, kept: float, merged: float, entries: float, size: float) -> tuple[str, str]:
    """A cell's character and style: the colour is for entries per token, whatever the character."""
    style = _STYLES[_level(entries)]
    if merged <= 0.5:
        return marks[_level(kept + merged)], style
    if (tokens := round(size)) < _FIRST_LETTER:
        return str(tokens), style
    step = int(math.log2(tokens / _FIRST_LETTER))
    return _LETTERS[min(step, len(_LETTERS) - 1)], style


def _level(share: float) -> int:
    return next(level for level, limit in enumerate(_LIMITS) if share <= limit + _ROUNDING)
