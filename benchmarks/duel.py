"""Two engines on the same work, in turns: each in a process of its own that waits to be told.

Neither can disturb the other: no shared runtime, no memory counted twice, and only one of them
computes at a time. A round is a few decode steps, or one prefill, of the one and then the same of
the other; who begins changes every round. Ratios are medians over the rounds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

from common import peak_rss, say, timed

SEED = 20_000
OURS = "minikv"
BATCH = 8
WARM_UP = 2
_PAUSE = 0.05  # seconds in which threads that spin after their work come to rest
_SHORT = 8  # tokens of the prompt whose first output token is awaited after a cold start
MEMORY_CONTEXT = 8192


class Engine(Protocol):
    """What a contestant does, in its own process. `imported_at` is `time.perf_counter()` after its
    imports and before it loaded the model."""

    vocab_size: int
    imported_at: float

    def open(self, sequences: int, tokens: int) -> None:
        """Make room for sequences of this many tokens."""
        ...

    def fill(self, prompts: Sequence[list[int]]) -> None:
        """Compute the prompts of all sequences up to the first output token of each."""
        ...

    def step(self) -> None:
        """Decode one further token of every sequence, each from its own last one."""
        ...

    def clear(self) -> None:
        """Forget the sequences."""
        ...


@dataclass(frozen=True)
class Workload:
    """Decode steps that end with `tokens` in the cache of each of `batch` sequences, or a prefill
    of as many tokens."""

    name: str
    kind: Literal["decode", "prefill"]
    tokens: int
    batch: int = 1

    @property
    def tokens_per_unit(self) -> int:
        """Tokens that one step or one prefill yields."""
        return self.batch if self.kind == "decode" else self.batch * self.tokens


@dataclass(frozen=True)
class Sizes:
    """Rounds, decode steps in each, and cold starts of each engine."""

    rounds: int
    steps: int
    starts: int


FULL = Sizes(rounds=7, steps=8, starts=5)
QUICK = Sizes(rounds=3, steps=4, starts=2)
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("decode@128", "decode", 128),
        Workload("decode@2048", "decode", 2048),
        Workload("decode@8192", "decode", 8192),
        Workload("prefill@512", "prefill", 512),
        Workload("prefill@2048", "prefill", 2048),
        Workload("batch8", "decode", 128, BATCH),
    )
}
OTHER_WORK = ("cold_start", "peak_rss")


# In a contestant's process


def serve(make: Callable[[], Engine]) -> None:
    """Do what the lines on standard input say; answer each with a line on standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    engine = make()
    for line in sys.stdin:
        print(json.dumps(_obey(engine, json.loads(line))), file=answers, flush=True)


def _obey(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "fill":
        prompts = [_random_ids(engine.vocab_size, command["tokens"], i) for i in range(command["sequences"])]
        seconds = timed(lambda: engine.fill(prompts))[0].wall
        return {"seconds": [seconds], "since_imports": time.perf_counter() - engine.imported_at}
    if command["do"] == "steps":
        return {"seconds": [timed(engine.step)[0].wall for _ in range(command["count"])]}
    if command["do"] == "open":
        engine.open(command["sequences"], command["tokens"])
    else:
        engine.clear()
    return {"peak_rss": peak_rss()}


def _random_ids(vocab_size: int, count: int, sequence: int) -> list[int]:
    rng = random.Random(SEED + sequence)
    return [rng.randrange(vocab_size) for _ in range(count)]


# In the process that asks


class Contestant:
    """A running process that serves one engine."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--serve", name, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **values: int) -> dict[str, Any]:
        """Have one command done. Ends the program when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        time.sleep(_PAUSE)
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"The process of {self.name} has ended; its own words are above.") from None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The process of {self.name} ended at `{do}`; its own words are above.")
        return json.loads(line)

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Duel:
    """Our engine and its rival, how long to measure, and what every process of theirs is given.

    environment: variables of the shell. Importing minikv sets how OpenMP's threads wait, and a
    rival must not inherit that.
    """

    rival: str
    arguments: list[str]
    sizes: Sizes
    environment: Mapping[str, str]

    @property
    def names(self) -> tuple[str, str]:
        """Ours first."""
        return OURS, self.rival

    def start(self, name: str) -> Contestant:
        """A fresh process of one of the two."""
        return Contestant(name, self.arguments, self.environment)

    def run(self, work: Sequence[str]) -> dict[str, Any]:
        """The figures of the work named: `ratios` and `raw` per workload, then `OTHER_WORK`."""
        workloads = [workload for name, workload in WORKLOADS.items() if name in work]
        raw = self._measure_all(workloads) if workloads else {}
        result: dict[str, Any] = {
            "ratios": {name: figures["ratio"]["median"] for name, figures in raw.items()},
            "raw": raw,
        }
        if "cold_start" in work:
            result["cold_start"] = self._cold_starts()
            say("cold starts done")
        if "peak_rss" in work:
            result["peak_rss"] = {name: self._peak(name) for name in self.names}
        return result

    def _measure_all(self, workloads: Sequence[Workload]) -> dict[str, Any]:
        contestants = [self.start(name) for name in self.names]
        raw = {}
        for workload in workloads:
            figures = raw[workload.name] = self._measure(workload, contestants)
            say(f"{workload.name}: {figures['ratio']['median']:.2f} times as fast")
        for contestant in contestants:
            contestant.close()
        return raw

    def _measure(self, workload: Workload, contestants: Sequence[Contestant]) -> dict[str, Any]:
        for contestant in contestants:
            contestant.ask("open", sequences=workload.batch, tokens=workload.tokens)
            self._prepare(workload, contestant)
        rounds: dict[str, list[list[float]]] = {name: [] for name in self.names}
        for number in range(self.sizes.rounds):
            for contestant in contestants if number % 2 else contestants[::-1]:
                rounds[contestant.name].append(self._round(workload, contestant))
        for contestant in contestants:
            contestant.ask("clear")
        return _summary(rounds, workload.tokens_per_unit)

    def _prepare(self, workload: Workload, contestant: Contestant) -> None:
        if workload.kind == "decode":
            before = workload.tokens - WARM_UP - self.sizes.rounds * self.sizes.steps
            contestant.ask("fill", sequences=workload.batch, tokens=before)
            contestant.ask("steps", count=WARM_UP)
        else:
            contestant.ask("fill", sequences=workload.batch, tokens=min(workload.tokens, 64))

    def _round(self, workload: Workload, contestant: Contestant) -> list[float]:
        if workload.kind == "decode":
            return contestant.ask("steps", count=self.sizes.steps)["seconds"]
        contestant.ask("clear")
        return contestant.ask("fill", sequences=workload.batch, tokens=workload.tokens)["seconds"]

    def _cold_starts(self) -> dict[str, Any]:
        """Seconds from the start of a process, and from the end of its imports, to the first token.
        The files are in the system's cache already."""
        seconds: dict[str, dict[str, list[float]]] = {
            name: {"from_process_start": [], "from_imports": []} for name in self.names
        }
        for number in range(self.sizes.starts):
            for name in self.names if number % 2 else self.names[::-1]:
                begin = time.perf_counter()
                contestant = self.start(name)
                contestant.ask("open", sequences=1, tokens=128)
                answer = contestant.ask("fill", sequences=1, tokens=_SHORT)
                seconds[name]["from_process_start"].append(time.perf_counter() - begin - 2 * _PAUSE)
                seconds[name]["from_imports"].append(answer["since_imports"] - _PAUSE)
                contestant.close()
        return {
            name: {clock: {"median": median(s), "best": min(s), "all": s} for clock, s in clocks.items()}
            for name, clocks in seconds.items()
        }

    def _peak(self, name: str) -> int:
        """Bytes: the most that a fresh process held while it reached the full context."""
        contestant = self.start(name)
        contestant.ask("open", sequences=1, tokens=MEMORY_CONTEXT)
        contestant.ask("fill", sequences=1, tokens=MEMORY_CONTEXT - WARM_UP)
        contestant.ask("steps", count=WARM_UP)
        peak = contestant.ask("clear")["peak_rss"]
        contestant.close()
        return peak


def _summary(rounds: dict[str, list[list[float]]], tokens: int) -> dict[str, Any]:
    ours, theirs = ([median(seconds) for seconds in listed] for listed in rounds.values())
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    flat = {name: [seconds for part in listed for seconds in part] for name, listed in rounds.items()}
    our_best, their_best = (min(seconds) for seconds in flat.values())
    spread = {"lowest": ratios[0], "highest": ratios[-1], "of_best": their_best / our_best}
    summary: dict[str, Any] = {"ratio": {"median": median(ratios), **spread}}
    for name, every in flat.items():
        summary[name] = {
            "seconds": {"median": median(every), "best": min(every), "rounds": rounds[name]},
            "tokens_per_second": {"median": tokens / median(every), "best": tokens / min(every)},
        }
    return summary
