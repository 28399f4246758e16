"""`minikv chat`: a conversation at the terminal, or one turn when the input is piped."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minikv.cli import console
from minikv.cli.apart import check_apart
from minikv.cli.chat_commands import COMMANDS, LeaveChat, run_command
from minikv.cli.chat_files import Keeper, goes_on, loaded, open_session
from minikv.cli.chat_state import ChatState
from minikv.cli.inputs import read_stdin, user_path
from minikv.cli.interrupts import Interrupts
from minikv.cli.line_editor import line_reader
from minikv.cli.options import CHAT_SAMPLING, COMPRESSION, ENGINE, TEMPLATE, load_llm, takes
from minikv.cli.streaming import follow
from minikv.config import format_size
from minikv.errors import MinikvError, RequestError, TemplateError
from minikv.version import version

if TYPE_CHECKING:
    from minikv import LLM, ChatSession, SamplingParams

DEFAULT_MODEL = "smollm2-135m"


@takes(engine=ENGINE, compression=COMPRESSION, sampling=CHAT_SAMPLING, template=TEMPLATE)
@console.guarded
def chat(
    model: Annotated[
        str, typer.Argument(help="Directory, .gguf file, Hub id or built-in name.")
    ] = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    session: Annotated[
        str | None,
        typer.Option(help="Go on with the conversation in this file, and keep it there.", metavar="FILE"),
    ] = None,
    history: Annotated[bool, typer.Option(help="Keep typed lines for the next chat.")] = True,
    *,
    engine: dict[str, Any],
    compression: dict[str, Any],
    sampling: dict[str, Any],
    template: dict[str, Any],
) -> None:
    """Chat with a model; /help lists the commands. Piped input is answered as one turn."""
    message = None if console.stdin_is_terminal() else read_stdin()
    if message is not None and not message.strip():
        raise RequestError("Standard input is empty, so there is nothing to answer.")
    from minikv import SamplingParams

    params = SamplingParams(**sampling)
    if session is not None:
        check_apart(engine, user_path(session), "the session file")
    own = {} if goes_on(session) else compression
    with load_llm(model, engine, own, progress=console.stderr_is_terminal()) as llm:
        if not llm.tokenizer.has_chat_template:
            raise TemplateError(f"{llm.name} has no chat template; use minikv generate --raw.")
        arguments = template.get("template_args", {})
        path, new = None, True
        if session is None:
            talk = llm.chat_session(system, **arguments)
        else:
            talk, path, new = open_session(llm, session, system, compression, arguments)
        if message is not None:
            _answer(talk, message, params, path)
            return
        reader = line_reader(list(COMMANDS), keep_history=history)
        with Interrupts(insist=False) as interrupts:
            state = ChatState(llm, talk, params, reader, interrupts, path)
            _greet(state, new)
            _converse(state)


def _answer(session: ChatSession, message: str, params: SamplingParams, path: Path | None) -> None:
    try:
        with Interrupts() as interrupts, closing(session.stream(message.rstrip("\n"), params)) as pieces:
            streamed = follow(pieces, interrupts, console.write_text)
        console.write_text("\n")
    finally:
        if path is not None:
            session.save(path)
    if streamed.result is None:
        raise typer.Exit(console.EXIT_INTERRUPTED)


def _greet(state: ChatState, new: bool) -> None:
    if console.stderr_is_terminal():
        state.say(_banner(state.llm))
    if state.session_file is not None and not new:
        state.say(loaded(state.session, state.session_file))


def _converse(state: ChatState) -> None:
    keeper = Keeper(state)
    while True:
        # Before a line is waited for, which may take until the machine is switched off.
        keeper.keep()
        try:
            line = state.read_line("> ")
        except (EOFError, KeyboardInterrupt):
            return
        try:
            take_line(state, line)
        except LeaveChat:
            return


def take_line(state: ChatState, line: str) -> None:
    """A command, a message or nothing. A user's mistake is one line, and the chat goes on."""
    try:
        if line.startswith("/"):
            run_command(state, line)
        elif line.strip():
            state.send(line.strip())
    except MinikvError as error:
        console.complain(str(error))


def _banner(llm: LLM) -> str:
    config = llm.config
    return (
        f"minikv {version()} | {llm.name}: {config.architecture}, "
        f"{config.num_parameters() / 1e6:.1f}M parameters, {config.dtype}\n"
        f"backend {llm.backend_name} ({llm.backend_reason}) | context {llm.max_context:,} tokens | "
        f"KV {llm.kv_dtype}, at most {format_size(llm.pool_bytes)}\n"
        "/help lists the commands; Ctrl-C stops a reply; Ctrl-D leaves."
    )
