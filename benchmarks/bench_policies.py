"""Compression beside a public library: minikv's policies and NVIDIA's kvpress on the same float32 weights.

Same contexts, same budgets, same observation window. Each library is compared with its own full cache:
KL divergence and agreement of the likeliest token over the answer (needle) or the text's continuation
(fidelity). KV bytes are those of the tensors or pages really held; kvpress's AdaKV masks and frees none.
The time is that of scoring and dropping, by the processor's clock; what recording costs while the prompt
is computed is not in it, on either side.

Usage: python benchmarks/bench_policies.py [--samples N] [--length N] [--budgets X,X] [--methods A,B]
       [--tasks A,B] [--agnostic] [--model NAME] [--threads N] [--json]
"""

from __future__ import annotations

# Before torch, to which it says how threads wait.
import minikv  # noqa: F401  # isort: skip

# kvpress patches transformers when it is imported, so it comes first.
import kvpress_side  # isort: skip

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor

from common import Clocks, machine, say
from minikv.evals.haystacks import Writer
from minikv.evals.questions import Turn
from minikv.evals.text import Prose, reference_prose
from minikv.models.sources import open_model, resolve_model
from minikv.sizes import format_size
from minikv.threads import default_threads
from policy_sides import Answer, Minikv, Setting, Side

METHODS = tuple(kvpress_side.PRESSES)
TASKS = ("needle", "fidelity")
BUDGETS = (0.5, 0.25, 0.1, 0.05, 0.03)
_CHECKED_TOKENS = 200


@dataclass(frozen=True)
class Question:
    """What is computed before the compression and after it; the last `scored` of `rest` are scored."""

    task: str
    sample: str
    context: tuple[int, ...]
    rest: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Score:
    """One library's answer to one question under one setting, beside its own full cache."""

    task: str
    sample: str
    setting: Setting
    nll: float
    exact: bool
    kl: float
    top1: float
    kv_bytes: int
    full_bytes: int
    spent: Clocks


def questions(writer: Writer, options: argparse.Namespace) -> Iterator[Question]:
    """Per sample five needles of different formats, and the text's own continuation."""
    for seed in range(options.samples):
        haystack = writer.write("mixed", options.length, seed)
        for number, dialogue in enumerate(haystack.dialogues):
            (turn, *more) = dialogue.turns
            task = dialogue.tasks[-1]
            if task in options.tasks and turn.gold and not more:
                yield _question(task, f"{seed}.{number}", haystack.ids, turn, options.agnostic)


def _question(task: str, sample: str, haystack: Sequence[int], turn: Turn, agnostic: bool) -> Question:
    """The question stands in the context that is compressed, unless `agnostic`."""
    context, asked = tuple(haystack), turn.question
    if not agnostic:
        context, asked = context + asked, ()
    return Question(task, sample, context, (*asked, *turn.suffix, *turn.prefix, *turn.gold), len(turn.gold))


def ask(side: Side, question: Question, settings: Sequence[Setting]) -> list[Score]:
    """All settings of one question."""
    side.read(question.context, settings)
    fed, gold = question.rest[:-1], torch.tensor(question.rest[-question.scored :])
    full = side.answer(None, fed)
    return [_score(question, setting, side.answer(setting, fed), full, gold) for setting in settings]


def _score(question: Question, setting: Setting, answer: Answer, full: Answer, gold: Tensor) -> Score:
    log_p, log_full = (_log_probabilities(a.logits, len(gold)) for a in (answer, full))
    best = log_p.argmax(dim=1)
    return Score(
        question.task,
        question.sample,
        setting,
        nll=-float(log_p.gather(1, gold[:, None]).mean()),
        exact=bool((best == gold).all()),
        kl=float((log_full.exp() * (log_full - log_p)).sum(dim=1).mean()),
        top1=float((best == log_full.argmax(dim=1)).double().mean()),
        kv_bytes=answer.kv_bytes,
        full_bytes=full.kv_bytes,
        spent=answer.spent,
    )


def _log_probabilities(logits: Tensor, count: int) -> Tensor:
    return torch.log_softmax(logits[-count:].double(), dim=1)


def summarise(scores: Sequence[Score]) -> dict[str, Any]:
    """Quality as means, bytes and seconds as medians."""
    return {
        "n": len(scores),
        "nll": mean(s.nll for s in scores),
        "exact": mean(s.exact for s in scores),
        "kl": mean(s.kl for s in scores),
        "top1": mean(s.top1 for s in scores),
        "kv_bytes": median(s.kv_bytes for s in scores),
        "full_bytes": median(s.full_bytes for s in scores),
        "compress_s": median(s.spent.wall for s in scores),
        "compress_cpu_s": median(s.spent.cpu for s in scores),
    }


def compare(ours: Sequence[Score], theirs: Sequence[Score]) -> dict[str, float | None]:
    """Our mean KL less theirs, paired by sample, and the standard error of that."""
    gaps = [a.kl - b.kl for a, b in zip(ours, theirs, strict=True)]
    error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    return {"kl_difference": mean(gaps), "standard_error": error}


def rows_of(scores: dict[str, list[Score]], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """One row per task and setting, with both libraries in it."""
    rows = []
    for task in dict.fromkeys(s.task for s in scores["minikv"]):
        for setting in settings:
            own = {
                name: [s for s in found if (s.task, s.setting) == (task, setting)]
                for name, found in scores.items()
            }
            sides = {name: summarise(found) for name, found in own.items()}
            pair = compare(own["minikv"], own["kvpress"])
            rows.append({"task": task, "method": setting.method, "budget": setting.budget, **sides, **pair})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a person."""
    lines = [
        f"{'':34}{'minikv':^54}{'kvpress':^54}",
        f"{'task':9}{'method':16}{'budget':>8} " + 2 * (_HEAD + " ") + " KL less kvpress's",
    ]
    for row in rows:
        error = row["standard_error"]
        spread = "" if error is None else f" +- {error:.4f}"
        lines.append(
            f"{row['task']:9}{row['method']:16}{row['budget']:>8.0%} {_cells(row['minikv'])} "
            f"{_cells(row['kvpress'])}  {row['kl_difference']:+.4f}{spread}"
        )
    return "\n".join(lines)


_HEAD = f"{'nll':>7}{'exact':>7}{'KL':>9}{'top-1':>7}{'KV':>11}{'CPU s':>9}   "


def _cells(side: dict[str, Any]) -> str:
    return (
        f"{side['nll']:>7.3f}{side['exact']:>7.0%}{side['kl']:>9.4f}{side['top1']:>7.0%}"
        f"{format_size(side['kv_bytes']):>11}{side['compress_cpu_s']:>9.3f}   "
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, in the shape of the JSON."""
    torch.set_num_threads(options.threads)
    settings = [Setting(method, budget) for method in options.methods for budget in options.budgets]
    # A question and its answer come on top of the length only where the template is long.
    ours = Minikv(options.model, options.threads, options.window, options.length + 256)
    theirs = kvpress_side.KVPress(open_model(resolve_model(options.model)), options.window)
    tokenizer = ours.probe.tokenizer
    writer = Writer(tokenizer, Prose(reference_prose(), tokenizer))
    asked = list(questions(writer, options))
    theirs.check(asked[0].context[:_CHECKED_TOKENS], settings)
    scores: dict[str, list[Score]] = {ours.name: [], theirs.name: []}
    begin = time.perf_counter()
    for number, question in enumerate(asked, 1):
        for side in (ours, theirs):
            scores[side.name] += ask(side, question, settings)
        say(f"{number} of {len(asked)} questions, {time.perf_counter() - begin:.0f} s")
    return {
        **machine(("torch", "transformers", "kvpress")),
        **{
            name: getattr(options, name)
            for name in ("model", "length", "samples", "window", "agnostic", "threads")
        },
        "backend": ours.probe.backend_name,
        "rows": rows_of(scores, settings),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--samples", type=int, default=2, help="contexts, six questions each")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--budgets", type=_list_of(float), default=BUDGETS)
    parser.add_argument("--methods", type=_list_of(str), default=METHODS, help=f"of {', '.join(METHODS)}")
    parser.add_argument("--tasks", type=_list_of(str), default=TASKS, help=f"of {', '.join(TASKS)}")
    parser.add_argument("--agnostic", action="store_true", help="compress before the question is known")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name, known in (("methods", METHODS), ("tasks", TASKS)):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name} knows {', '.join(known)}, not {', '.join(sorted(unknown))}")
    return options


def _list_of(kind: type):
    return lambda text: tuple(kind(part) for part in text.split(","))


def main() -> None:
    """Measure and print."""
    options = _parse()
    report = measure(options)
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if name != "rows":
            print(f"{name:14}{value}")
    print(table(report["rows"]))


if __name__ == "__main__":
    main()
