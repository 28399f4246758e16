"""The prompt of a command that takes one: where its text comes from, and whether a template is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from minikv.cli import console
from minikv.cli.inputs import join_prompt, read_stdin, read_text_file
from minikv.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from minikv import LLM, Job, SamplingParams


def read_prompt(prompt: str | None, files: list[str]) -> str:
    """The text of files and standard input, then `prompt`. Raises BadParameter if there is none."""
    documents = [read_stdin() if name == "-" else read_text_file(Path(name)) for name in files]
    if "-" not in files and not console.stdin_is_terminal():
        documents.append(read_stdin())
    text = join_prompt(documents, prompt)
    if not text:
        raise typer.BadParameter("Give a prompt with -p, in a --file or on standard input.")
    return text


def job_of(
    llm: LLM,
    text: str,
    params: SamplingParams,
    chat: bool | None,
    system: str | None,
    template: dict[str, Any],
) -> Job:
    """The text as a user's message, or raw if `chat` is False or None and the model has no template.

    Raises TemplateError and ConfigError for what a model without a template cannot do.
    """
    from minikv import Job

    if not _use_chat(llm, chat, system, template):
        return Job(0, prompt=text, params=params)
    arguments = template.get("template_args", {})
    return Job(0, messages=_messages(system, text), params=params, template_kwargs=arguments)


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _use_chat(llm: LLM, chat: bool | None, system: str | None, template: dict[str, Any]) -> bool:
    if chat and not llm.tokenizer.has_chat_template:
        raise TemplateError(f"{llm.name} has no chat template; use --raw.")
    use_chat = llm.tokenizer.has_chat_template if chat is None else chat
    if not use_chat and (system is not None or template):
        raise ConfigError("--system and --template-arg need a chat template; a raw prompt does not use one.")
    return use_chat
