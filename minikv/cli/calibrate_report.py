"""What `minikv calibrate` prints: which trials counted, and the heads and layers in a table."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from minikv.calibration.profile import Measurement
    from minikv.calibration.run import Outcome

_WIDTH = 128


def report(measurement: Measurement, outcomes: Sequence[Outcome]) -> str:
    """The whole report."""
    counted = sum(outcome.counted for outcome in outcomes)
    exact = sum(outcome.exact for outcome in outcomes)
    lines = [f"{counted} of {len(outcomes)} trials count; greedy decoding answers {exact}."]
    for name in ("language", "format", "kind"):
        lines.append(f"  by {name}: {_shares(outcomes, name)}")
    return "\n".join(lines) + "\n\n" + _table(measurement) + _summary(measurement)


def _shares(outcomes: Sequence[Outcome], name: str) -> str:
    values = dict.fromkeys(getattr(outcome, name) for outcome in outcomes)
    groups = {value: [o.counted for o in outcomes if getattr(o, name) == value] for value in sorted(values)}
    return ", ".join(f"{value} {sum(group)}/{len(group)}" for value, group in groups.items())


def _table(measurement: Measurement) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from minikv.calibration.scores import best_heads

    top = measurement.top_heads
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("layer", "retrieval heads", "stability in %", "copy heads", "both", "error", "spread"):
        table.add_column(title, justify="left" if "heads" in title else "right", no_wrap=True)
    for layer, error in enumerate(measurement.layer_errors.tolist()):
        scores, copies = measurement.retrieval[layer], measurement.copy[layer]
        best, copy = (best_heads(s[None], top)[0].tolist() for s in (scores, copies))
        copy = [head for head in copy if copies[head] > 0]
        table.add_row(
            str(layer),
            "  ".join(f"{head} {max(0.0, float(scores[head])):.2f}" for head in best),
            "  ".join(f"{100 * measurement.stability[layer, head]:3.0f}" for head in best),
            "  ".join(f"{head} {copies[head]:.2f}" for head in copy),
            str(len(set(best) & set(copy))),
            f"{error:.4f}",
            f"{measurement.layer_spread[layer]:.4f}",
        )
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()) + "\n\n"


def _summary(measurement: Measurement) -> str:
    from minikv.calibration.scores import best_heads, overlap

    retrieval, top = measurement.retrieval, measurement.top_heads
    layers = len(measurement.layer_errors)
    held = measurement.stability.gather(1, best_heads(retrieval, top))
    both = overlap(retrieval, measurement.copy, top)
    unseen = int((measurement.copy == 0).sum())
    errors = measurement.layer_errors
    return (
        f"Stability of the best {top} heads of a layer: mean {held.mean():.1%}, lowest {held.min():.1%}; "
        f"{int((held >= 0.95).sum())} of {held.numel()} are there in at least 95% of the resamples.\n"
        f"{both} of {top * layers} are among the best {top} copy heads too; "
        f"{unseen} of {retrieval.numel()} heads never copy.\n"
        f"Strongest heads: {_strongest(retrieval)}.\n"
        f"Layer errors from {errors.min():.4f} (layer {int(errors.argmin())}) to {errors.max():.4f} "
        f"(layer {int(errors.argmax())}); even would be {1 / layers:.4f}.\n"
    )


def _strongest(scores: Tensor) -> str:
    best = scores.flatten().argsort(descending=True, stable=True)[:8].tolist()
    width = scores.shape[1]
    return ", ".join(f"layer {i // width} head {i % width} ({scores.flatten()[i]:.2f})" for i in best)
