"""Feed the lines of a batch to the engine and write every answer as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minikv.cli.batch_bodies import error_line, success_line
from minikv.cli.batch_lines import InputLine, LineError, parse_request
from minikv.cli.batch_output import OutputFile
from minikv.cli.batch_progress import Meter
from minikv.cli.interrupts import Interrupts
from minikv.errors import MinikvError
from minikv.results import Result

if TYPE_CHECKING:
    from minikv import LLM, Job


class _Interrupted(Exception):
    """Ctrl-C, seen between two engine steps."""


@dataclass(frozen=True)
class _Key:
    line: InputLine
    chat: bool


@dataclass
class BatchRun:
    """One pass over the input. `defaults` are sampling values; `done` are ids to skip."""

    llm: LLM
    file: OutputFile
    defaults: Mapping[str, Any]
    done: Set[str]
    meter: Meter
    interrupts: Interrupts

    def serve(self, lines: Iterable[InputLine | None]) -> bool:
        """Answer every line; None among them says that the next is not there yet. True when Ctrl-C
        ended it early; what was finished is then written.

        Raises OutputError when the output file can take no more.
        """
        try:
            with closing(self.llm.run(self._jobs(lines), on_progress=self._between_steps)) as results:
                for job, result in results:
                    self._answer(job.key, result)
        except _Interrupted:
            return True
        return False

    def _between_steps(self, *_: object) -> None:
        if self.interrupts.requested:
            raise _Interrupted
        self.meter.show()

    def _jobs(self, lines: Iterable[InputLine | None]) -> Iterator[Job | None]:
        """Lazily, as the engine asks for more; lines that cannot be run are answered on the way."""
        from minikv import Job

        used: set[str] = set()
        for line in lines:
            self._between_steps()
            if line is None:
                yield None
                continue
            first = line.custom_id not in used
            if line.custom_id is not None:
                used.add(line.custom_id)
            if line.id in self.done:
                continue
            try:
                if not first:
                    raise LineError(
                        f"An earlier line has the same custom_id {line.custom_id!r}.", "duplicate_custom_id"
                    )
                request = parse_request(line, self.defaults, self.llm.engine.config.cache)
            except MinikvError as error:
                self._fail(line, getattr(error, "code", "invalid_request"), str(error))
                continue
            yield Job(
                key=_Key(line, request.chat),
                prompt=request.prompt,
                messages=request.messages,
                params=request.params,
                cache=request.cache,
                template_kwargs=request.template_kwargs,
            )

    def _answer(self, key: _Key, result: Result) -> None:
        for choice in result.choices or (result,):
            if choice.finish_reason == "error":
                self._fail(key.line, "request_failed", choice.message or "The request failed.")
                return
        body = success_line(
            key.line, result, chat=key.chat, model=self.llm.name, tokenizer=self.llm.tokenizer
        )
        self.file.write(body)
        self.meter.served_line(body["response"]["body"]["usage"]["completion_tokens"])

    def _fail(self, line: InputLine, code: str, sentence: str) -> None:
        self.file.write(error_line(line, code, sentence))
        self.meter.failed_line()
