"""What a chat at the terminal holds between turns, and how one turn is played."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.cli import console
from minikv.cli.inputs import join_prompt
from minikv.cli.interrupts import Interrupts
from minikv.cli.streaming import Streamed, follow
from minikv.errors import MinikvError
from minikv.results import StreamPiece

if TYPE_CHECKING:
    from minikv import LLM, CacheConfig, ChatSession, SamplingParams

_ENDINGS = {
    "length": "cut at max_tokens (/set max_tokens none lifts it)",
    "context": "the context is full (/clear starts over)",
    None: "stopped",
}


@dataclass
class ChatState:
    """`documents` are files read for the next message; `last` is the last turn that did not fail.

    `read_line` shows a prompt and returns a line; it raises EOFError or KeyboardInterrupt when the
    person wants to leave. `interrupts` is entered for the whole chat, so that a Ctrl-C that comes a
    moment late, between a reply and the next prompt, does not end it. `session_file` is kept as new as
    the conversation, if there is one.
    """

    llm: LLM
    session: ChatSession
    params: SamplingParams
    read_line: Callable[[str], str]
    interrupts: Interrupts
    session_file: Path | None = None
    documents: list[str] = field(default_factory=list)
    last: Streamed | None = None

    def say(self, text: str) -> None:
        """A line for the person: on stderr, so that stdout holds replies alone."""
        print(console.printable(text), file=sys.stderr, flush=True)

    def send(self, text: str) -> None:
        """One turn: the documents read before, then `text`. An error is one line; the chat goes on."""
        message = join_prompt(self.documents, text)
        before = len(self.session.messages)
        self.play(lambda: self.session.stream(message, self.params))
        if self.documents and len(self.session.messages) == before:
            # Kept for the next message, a document that is too long would make that fail as well.
            self.say("The text that was read for this message is dropped; /read it again if it is wanted.")
        self.documents.clear()

    def keep(self, cache: CacheConfig) -> None:
        """Go on under another policy or budget. The next turn computes the conversation anew: what was
        dropped under the old one could not be had back otherwise. Raises ConfigError."""
        session = self.llm.chat_session(cache=cache, **self.session.template_args)
        session.set_messages(self.session.messages)
        self.session.close()
        self.session = session

    def play(self, start: Callable[[], Generator[StreamPiece, None, None]]) -> None:
        """Print a reply as it comes; Ctrl-C ends it."""
        try:
            self.interrupts.requested = False
            with closing(start()) as pieces:
                streamed = follow(pieces, self.interrupts, console.write_text)
        except MinikvError as error:
            console.complain(str(error))
            return
        if streamed.result is None and not streamed.text:
            self.say("Stopped before the reply began; the message is taken back.")
            return
        result = streamed.result
        if result is not None and result.finish_reason == "context" and not streamed.token_ids:
            console.complain(result.message or "The context is full.")
            self.say("The message is taken back; /clear starts over.")
            return
        console.write_text("\n")
        self.last = streamed
        console.note(summary(streamed))


def summary(turn: Streamed) -> str:
    """The line after a turn: `12 new prompt tokens, 180 reused, 45 tok, 11.2 tok/s`."""
    parts = []
    if turn.result is not None:
        usage = turn.result.usage
        new = usage.prompt_tokens - usage.reused_tokens
        parts += [f"{new} new prompt token{'' if new == 1 else 's'}", f"{usage.reused_tokens} reused"]
    parts.append(f"{len(turn.token_ids)} tok")
    if turn.tokens_per_second is not None:
        parts.append(f"{turn.tokens_per_second:.1f} tok/s")
    ending = _ENDINGS.get(turn.result.finish_reason if turn.result else None)
    return ", ".join(parts + ([ending] if ending else []))
