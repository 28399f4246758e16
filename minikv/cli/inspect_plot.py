"""The picture that `minikv inspect -o` draws. Needs matplotlib, which is the extra `eval`."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minikv.cache.picture import binned
from minikv.cli.cache_picture import policy_line
from minikv.cli.console import reason
from minikv.cli.inspect_facts import Held
from minikv.config import format_size
from minikv.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 1200
_MOST_TICKS = 32
# A token kept itself is blue; prototypes go from red to pale yellow as they stand for more tokens; what is
# dropped is grey. They differ in lightness too, for prints in grey and for any kind of colour vision.
_KEPT = "#0b3c8c"
_PROTOTYPES = {
    2: "#b3261e",
    4: "#dc5a1c",
    8: "#f08a32",
    16: "#f7b45c",
    32: "#fbd78a",
    64: "#fff2be",
}
_DROPPED = "#d2d6dc"
_HEAD_COLOURS = ("#0b3c8c", "#7fa3d8")


def draw(held: Held, layers: range, by_head: bool, path: Path) -> None:
    """A map of the cache beside the entries of each layer or KV head; `path` is written whole or not at all.

    Raises RequestError.
    """
    figure = _figure(held, layers, by_head)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "wb") as file:
                figure.savefig(file, format="png", dpi=120)
            # A temporary file is its owner's alone; a picture is as open as any new file.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise RequestError(f"Cannot write {path}: {reason(error)}.") from None


def colours(held: Tensor) -> Tensor:
    """Of each token [..., tokens], in red, green and blue from 0 to 1: [..., tokens, 3]; prototypes between
    two of the legend's sizes, on a logarithmic scale, have a colour between theirs."""
    from matplotlib.colors import to_rgb

    steps = torch.tensor([to_rgb(colour) for colour in _PROTOTYPES.values()])
    place = (held.clamp(min=2).float().log2() - 1).clamp(max=len(steps) - 1)
    below = place.long()
    above = (below + 1).clamp(max=len(steps) - 1)
    painted = torch.lerp(steps[below], steps[above], (place - below)[..., None])
    painted[held == 1] = torch.tensor(to_rgb(_KEPT))
    painted[held == 0] = torch.tensor(to_rgb(_DROPPED))
    return painted


def _pixels(held: Tensor) -> Tensor:
    """`held` [rows, heads, tokens] as mean colours over heads and runs of tokens: [rows, columns, 3]."""
    rows = [binned(colours(row).mean(dim=0).T, _COLUMNS).T for row in held]
    return torch.stack(rows)


def _figure(held: Held, layers: range, by_head: bool) -> Figure:
    # Not through pyplot, which would keep the figure and look for a screen.
    from matplotlib.figure import Figure

    shown = held.resolution(layers)
    heads = shown.shape[1]
    rows = len(layers) * heads if by_head else len(layers)
    figure = Figure(figsize=(12, max(2.8, min(16, 1.6 + 0.13 * rows))), layout="constrained")
    chart, bars = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    _map(chart, shown.reshape(rows, -1, held.num_tokens), held.num_tokens)
    _flow(bars, held.entries[layers.start : layers.stop], by_head)
    chart.set_yticks(*_ticks(layers, heads if by_head else 1), fontsize=8)
    chart.set_ylabel("layer and KV head" if by_head else "layer, mean of its KV heads", fontsize=9)
    size, full = int(held.bytes.sum()), held.llm.full_kv_bytes(held.num_tokens)
    sizes = f"{format_size(size)} of {format_size(full)} for {held.num_tokens:,} tokens"
    figure.suptitle(f"{held.llm.name}: {sizes}. {policy_line(held.cache)}", fontsize=10)
    _legend(figure, bool((shown > 1).any()))
    return figure


def _ticks(layers: range, heads: int) -> tuple[list[float], list[str]]:
    """Places and names of rows, of which a layer has `heads`: all of a few, else some of the layers."""
    if heads > 1 and len(layers) * heads <= _MOST_TICKS:
        names = [f"{layer}.{head}" for layer in layers for head in range(heads)]
        return [float(row) for row in range(len(names))], names
    some = range(0, len(layers), math.ceil(len(layers) / _MOST_TICKS))
    return [i * heads + (heads - 1) / 2 for i in some], [str(layers[i]) for i in some]


def _map(axis: Axes, shown: Tensor, num_tokens: int) -> None:
    extent = (0, num_tokens, len(shown) - 0.5, -0.5)
    axis.imshow(_pixels(shown).numpy(), aspect="auto", interpolation="nearest", extent=extent)
    axis.set_xlabel("token", fontsize=9)
    axis.tick_params(labelsize=8)


def _flow(axis: Axes, entries: Tensor, by_head: bool) -> None:
    """Entries of each row as bars, those of a layer one part for each head."""
    heads = entries.shape[1]
    parts = entries.reshape(-1, 1) if by_head else entries
    places = range(len(parts))
    before = torch.zeros(len(parts), dtype=parts.dtype)
    for i, part in enumerate(parts.T):
        shades = [_HEAD_COLOURS[(row % heads if by_head else i) % 2] for row in places]
        axis.barh(places, part.tolist(), left=before.tolist(), height=0.85, color=shades)
        before = before + part
    axis.axvline(float(before.float().mean()), color="black", linestyle=":", linewidth=1)
    axis.set_xlabel("entries" if by_head else "entries, by KV head", fontsize=9)
    axis.set_title("dotted: mean", fontsize=8, loc="right")
    axis.tick_params(labelsize=8)


def _legend(figure: Figure, merges: bool) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=_KEPT, label="token kept itself")]
    if merges:
        last = max(_PROTOTYPES)
        patches += [
            Patch(color=colour, label=f"prototype of {size} tokens{' or more' if size == last else ''}")
            for size, colour in _PROTOTYPES.items()
        ]
    patches.append(Patch(color=_DROPPED, label="dropped"))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
