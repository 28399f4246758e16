"""Pictures of an evaluation. Needs matplotlib, which is an extra: `pip install minikv[eval]`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.evals.plan import FULL
from minikv.evals.records import Record, replace_file
from minikv.evals.summary import ALL, Row, budget_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEEDED = "Plots need matplotlib, which is not installed: pip install 'minikv[eval]'."
# Colours that can be told apart with any kind of colour vision (Okabe and Ito), and markers besides.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# What is drawn over bytes for each task: the measure, its name, whether on a logarithmic scale.
_EXACT = ("exact", "exact answers", False)
_QUALITY = {
    "quote": ("token_accuracy", "tokens right", False),
    "perplexity": ("perplexity", "perplexity", False),
    "fidelity": ("kl", "KL divergence from the full cache (nats)", True),
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(records: Sequence[Record], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw all that the results hold: `needle.png`, exact answers by depth and length, and
    `quality-TASK.png`, quality over bytes. Returns the files. Raises RequestError if one cannot be written.
    """
    figures: dict[str, Figure] = {}
    needles = [record for record in records if record.task == "needle"]
    if needles:
        figures["needle"] = _heat_maps(needles)
    for task in dict.fromkeys(row.task for row in rows):
        figures[f"quality-{task}"] = _quality(task, [r for r in rows if r.task == task and r.format == ALL])
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        picture = io.BytesIO()
        figure.savefig(picture, dpi=120, format="png")
        replace_file(path, picture.getvalue())
        paths.append(path)
    return paths


def _new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    # Not through pyplot, which would keep the figure and look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _heat_maps(records: list[Record]) -> Figure:
    """Share of exact answers: a map of depth and length for each policy (columns) and budget (rows)."""
    cells: dict[tuple[str, str, float, int], list[bool]] = {}
    for record in records:
        assert record.depth is not None and record.exact is not None
        key = (record.policy, budget_text(record.budget), record.depth, record.length)
        cells.setdefault(key, []).append(record.exact)
    policies = list(dict.fromkeys((FULL, *(key[0] for key in cells))))
    budgets = list(dict.fromkeys(key[1] for key in cells if key[0] != FULL)) or [""]
    depths, lengths = sorted({key[2] for key in cells}), sorted({key[3] for key in cells})
    figure, axes = _new_figure(len(budgets), len(policies), 1.3 + 0.5 * len(lengths), 2.4)
    for line, budget in zip(axes, budgets, strict=True):
        for axis, policy in zip(line, policies, strict=True):
            shown = "" if policy == FULL else budget
            shares = [[_share(cells.get((policy, shown, d, n))) for n in lengths] for d in depths]
            _heat_map(axis, shares, depths, lengths)
            axis.set_title(f"{policy}\n{shown}".strip(), fontsize=8)
    figure.colorbar(axes[0][0].images[0], ax=axes, label="exact answers")
    figure.supxlabel("context (tokens)", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    return figure


def _share(answers: list[bool] | None) -> float:
    return sum(answers) / len(answers) if answers else float("nan")


def _heat_map(axis: Axes, shares: list[list[float]], depths: Sequence[float], lengths: Sequence[int]) -> None:
    axis.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="cividis")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    for y, line in enumerate(shares):
        for x, share in enumerate(line):
            if share == share:  # not a number: nothing was measured there
                colour = "white" if share < 0.6 else "black"
                axis.text(x, y, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=7)


def _quality(task: str, rows: list[Row]) -> Figure:
    """One panel per length (and turn): quality over the bytes held, a line per policy."""
    panels = list(dict.fromkeys((row.length, row.turn) for row in rows))
    name, label, logarithmic = _QUALITY.get(task, _EXACT)
    figure, axes = _new_figure(1, len(panels), 4.6, 3.4)
    for axis, (length, turn) in zip(axes[0], panels, strict=True):
        shown = [row for row in rows if (row.length, row.turn) == (length, turn)]
        drawn = _lines(axis, shown, name, logarithmic)
        which = f", turn {turn}" if task == "multi-turn" else ""
        axis.set_title(f"{task}{which}, {length:,} tokens", fontsize=10)
        if drawn:  # nothing drawn has no logarithm either
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("KV cache (MiB)")
        if logarithmic and drawn:
            axis.set_yscale("log")
        elif not logarithmic and name != "perplexity":
            axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(label)
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(fontsize=8)
    return figure


def _lines(axis: Axes, rows: list[Row], name: str, positive: bool) -> bool:
    """A line per policy and one for the full cache; if `positive`, without zeros, which have no logarithm.
    Whether any policy has a point."""
    drawn = False
    policies = [policy for policy in dict.fromkeys(row.policy for row in rows) if policy != FULL]
    for i, policy in enumerate(policies):
        points = [(row.kv_bytes / 2**20, getattr(row, name)) for row in rows if row.policy == policy]
        points = sorted((x, y) for x, y in points if y is not None and (y or not positive))
        xs, ys = [x for x, _ in points], [y for _, y in points]
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        axis.plot(xs, ys, label=policy, color=colour, marker=marker)
        drawn = drawn or bool(points)
    for row in rows:
        value: float | None = getattr(row, name)
        if row.policy == FULL and value is not None and not positive:
            axis.axhline(value, color="grey", linestyle=":", label="full cache")
    return drawn
