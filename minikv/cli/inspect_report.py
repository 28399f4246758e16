"""What `minikv inspect` prints: sizes, policy, a map of the cache and a table of where the budget went."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from minikv.cli.cache_picture import can_show, map_lines, policy_line, sizes_line
from minikv.cli.inspect_facts import Held
from minikv.config import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from torch import Tensor

_FEWEST_BAR_COLUMNS = 8
_WIDEST_BAR = 40
_WIDEST_PROSE = 100


def report(screen: Console, held: Held, layers: range, by_head: bool) -> list[Text]:
    """All of it, as wide as the screen; a row for every layer, or for every KV head."""
    from rich.text import Text

    shown = held.resolution(layers)
    names, labels = "layer", [f"{layer}" for layer in layers]
    if by_head:
        names, labels = "head", [f"{layer}.{head}" for layer in layers for head in range(shown.shape[1])]
        shown = shown.reshape(-1, 1, held.num_tokens)
    width = max(map(len, labels))
    rows = [label.rjust(width) for label in labels]
    sizes = sizes_line(held.llm, held.num_tokens, int(held.bytes.sum()))
    return [
        *map(Text, _prose(screen, sizes, policy_line(held.cache))),
        *map_lines(screen, "layer and KV head" if by_head else "layer, mean of its heads", rows, shown),
        Text(""),
        *map(Text, _table(screen, names, labels, held, layers)),
    ]


def _prose(screen: Console, *sentences: str) -> list[str]:
    width = min(_WIDEST_PROSE, max(1, screen.width - 1))
    return [line for sentence in sentences for line in wrap(sentence, width)]


def _table(screen: Console, names: str, labels: list[str], held: Held, layers: range) -> list[str]:
    """A line for each label and one for all of them, and what the columns mean."""

    def sums(values: Tensor) -> list[float]:
        """Over the lanes of each row, then over all."""
        rows = values[layers.start : layers.stop].reshape(len(labels), -1).sum(dim=1)
        return [*rows.tolist(), rows.sum().item()]

    entries = sums(held.entries)
    lanes = sums(held.entries.new_ones(held.entries.shape))
    tokens = [count / (n * held.num_tokens) for count, n in zip(sums(held.tokens), lanes, strict=True)]
    shares = held.budget_shares
    columns = [
        [names, *labels, "all"],
        ["entries", *(f"{count:,}" for count in entries)],
        ["tokens", *(f"{share:.1%}" for share in tokens)],
        *([] if shares is None else [["budget", *(f"{share:.1%}" for share in sums(shares))]]),
        ["size", *(format_size(int(size)) for size in sums(held.bytes))],
    ]
    widths = [max(map(len, column)) for column in columns]
    gap = "  " if sum(widths) + 2 * len(widths) < screen.width else " "
    lines = [gap.join(map(str.rjust, line, widths)) for line in zip(*columns, strict=True)]
    bars = ["", *_bars(screen, entries[:-1], screen.width - len(lines[0]) - 3), ""]
    lines = [f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]
    meaning = "tokens: share that the entries stand for"
    return [
        *lines,
        *_prose(screen, meaning if shares is None else f"{meaning}; budget: share that they take"),
    ]


def _bars(screen: Console, entries: Sequence[float], room: int) -> list[str]:
    """Entries as lengths, empty where there is no room."""
    room = min(room, _WIDEST_BAR) if room >= _FEWEST_BAR_COLUMNS else 0
    mark = "█" if can_show(screen) else "#"
    return [mark * round(room * count / max(entries)) for count in entries]
