"""From records to rows: means per task, length, policy and budget, also relative to the full cache."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from minikv.evals.plan import FULL, Budget
from minikv.evals.records import Record, replace_file

SUMMARY = "summary.csv"
ALL = "all"


@dataclass(frozen=True)
class Row:
    """Means over the answers of one cell; None where a measure does not apply.

    format: `all` for the formats of the task together. exact: share of answers. relative: `exact`
    divided by the full cache's on the same questions; token accuracy where nothing can be exact.
    perplexity: e to the power of `nll`. Names in `_se` are standard errors,
    answers taken as independent.
    """

    task: str
    format: str
    length: int
    agnostic: bool
    turn: int
    policy: str
    budget: Budget | None
    answers: int
    exact: float | None
    exact_se: float | None
    relative: float | None
    token_accuracy: float | None
    nll: float | None
    nll_se: float | None
    perplexity: float | None
    kl: float | None
    kl_se: float | None
    top1: float | None
    kv_bytes: float
    full_bytes: float
    compress_s: float | None


def summarise(records: Sequence[Record], variants: Sequence[tuple[str, Budget | None]]) -> list[Row]:
    """Rows in the order of tasks and lengths; within a table budgets and policies as in `variants`, the
    full cache first. Each task's formats together come before each format alone."""
    order = {(policy, repr(budget)): i for i, (policy, budget) in enumerate(_by_budget(variants))}
    full = {record.question: record for record in records if record.policy == FULL}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        place = order[record.policy, repr(record.budget)]
        for form in (ALL, record.format):
            key = (record.task, record.length, record.agnostic, record.turn, form, place)
            groups.setdefault(key, []).append(record)
    tasks = list(dict.fromkeys(record.task for record in records))

    def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
        task, length, agnostic, turn, form, place = key
        return (tasks.index(task), length, agnostic, turn, form != ALL, form, place)

    return [_row(key[4], groups[key], full) for key in sorted(groups, key=rank)]


def _by_budget(variants: Sequence[tuple[str, Budget | None]]) -> list[tuple[str, Budget | None]]:
    """Policies of the same budget side by side."""
    budgets = list(dict.fromkeys(repr(budget) for _, budget in variants))
    return sorted(variants, key=lambda variant: budgets.index(repr(variant[1])))


def _row(form: str, group: list[Record], full: dict[tuple[Any, ...], Record]) -> Row:
    one = group[0]
    beside = [full[record.question] for record in group if record.question in full]
    nll = _mean(group, "nll")
    return Row(
        task=one.task,
        format=form,
        length=one.length,
        agnostic=one.agnostic,
        turn=one.turn,
        policy=one.policy,
        budget=one.budget,
        answers=len(group),
        exact=_mean(group, "exact"),
        exact_se=_error(group, "exact"),
        relative=_relative(group, beside),
        token_accuracy=_mean(group, "token_accuracy"),
        nll=nll,
        nll_se=_error(group, "nll"),
        perplexity=math.exp(nll) if nll is not None and one.task == "perplexity" else None,
        kl=_mean(group, "kl"),
        kl_se=_error(group, "kl"),
        top1=_mean(group, "top1"),
        kv_bytes=fmean(record.kv_bytes for record in group),
        full_bytes=fmean(record.full_bytes for record in group),
        compress_s=_mean(group, "compress_s"),
    )


def _values(group: Iterable[Record], name: str) -> list[float]:
    values = (getattr(record, name) for record in group)
    return [float(value) for value in values if value is not None]


def _mean(group: Iterable[Record], name: str) -> float | None:
    values = _values(group, name)
    return fmean(values) if values else None


def _error(group: Iterable[Record], name: str) -> float | None:
    values = _values(group, name)
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _relative(group: list[Record], full: list[Record]) -> float | None:
    for name in ("exact", "token_accuracy"):
        ours, theirs = _mean(group, name), _mean(full, name)
        if ours is not None:
            # Only whole pairs can be compared: an interrupted run may lack some.
            return ours / theirs if theirs and len(full) == len(group) else None
    return None


def write_summary(folder: Path, rows: Sequence[Row]) -> Path:
    """`summary.csv`, one line a row, empty where a measure does not apply. Raises RequestError."""
    path = folder / SUMMARY
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Row)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    replace_file(path, text.getvalue().encode())
    return path


# Tables

Cell = Callable[[Row], str]


def _number(name: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        value = getattr(row, name)
        return "" if value is None else format(value, form)

    return cell


def budget_text(budget: Budget | None) -> str:
    """`10%`, `256` or `64MiB`; empty for the full cache."""
    if budget is None:
        return ""
    return f"{100 * budget:g}%" if isinstance(budget, float) else str(budget)


COLUMNS: dict[str, Cell] = {
    "policy": lambda row: row.policy,
    "budget": lambda row: budget_text(row.budget),
    "n": lambda row: str(row.answers),
    "exact": _number("exact", ".1%"),
    "of full": _number("relative", ".1%"),
    "tokens": _number("token_accuracy", ".1%"),
    "NLL": _number("nll", ".3f"),
    "perplexity": _number("perplexity", ".4g"),
    "KL": _number("kl", ".4f"),
    "top-1": _number("top1", ".1%"),
    "KV MiB": lambda row: f"{row.kv_bytes / 2**20:.2f}",
    "KV share": lambda row: f"{row.kv_bytes / row.full_bytes:.1%}",
    "ms": lambda row: "" if row.compress_s is None else f"{1e3 * row.compress_s:.0f}",
}


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and lines of cells."""

    title: str
    head: list[str]
    lines: list[list[str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table per task, length, mode and turn, formats together; columns that say nothing are left out."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.format == ALL:
            groups.setdefault((row.task, row.length, row.agnostic, row.turn), []).append(row)
    found = []
    for (task, length, agnostic, turn), group in groups.items():
        mode = "query-agnostic" if agnostic else "query-aware"
        which = f", turn {turn}" if task == "multi-turn" else ""
        title = f"{task}{which}, {length:,} tokens, {mode}"
        cells = {name: [cell(row) for row in group] for name, cell in COLUMNS.items()}
        head = [name for name, column in cells.items() if any(column)]
        lines = [[cells[name][i] for name in head] for i in range(len(group))]
        found.append(Table(title, head, lines))
    return found


def plain(table: Table) -> str:
    """The table in aligned columns, the first to the left."""
    lines = [table.head, *table.lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]

    def shown(line: list[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return "  ".join((line[0].ljust(len(first)), *rest)).rstrip()

    return "\n".join((table.title, *map(shown, lines))) + "\n"
