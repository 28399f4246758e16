"""Run the `minikv` command in tests: in this process, as a process, or at a pseudo-terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
from model_files import SPECIAL, hf_config, write_directory
from tiny import RandomWeights
from typer.testing import CliRunner, Result

from minikv.cli.app import app
from minikv.models.hf_config import normalise_config

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "minikv"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('The system message must come first') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, max_context: int = 2048, template: str | None = TEMPLATE) -> Path:
    """A random two-layer Llama whose output is varied, with a template of choice."""
    raw = hf_config(max_position_embeddings=max_context)
    weights = RandomWeights(normalise_config(raw))
    write_directory(folder, raw, {name: weights.load(name) for name in weights.names()})
    words = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    words |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    return folder


def invoke(*arguments: object, stdin: str | bytes = "") -> Result:
    """The command in this process; neither stream is a terminal."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, prog_name="minikv")


def error_of(result: Result) -> str:
    """The sentence of a run that failed the way a user's mistake should: one line, status 1."""
    assert result.exit_code == 1, (result.exit_code, result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("minikv: ")
    assert result.stdout == ""
    return line.removeprefix("minikv: ")


def _environment() -> dict[str, str]:
    # The pseudo-terminal of a test does not answer when it is asked where the cursor is.
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    return os.environ | own


def _default_signals() -> None:
    # A test run in the background may have SIGINT ignored, which its children would inherit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: object, **options) -> subprocess.Popen[bytes]:
    """The command as a process of its own, with pipes for what is not given."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=_environment(),
        preexec_fn=_default_signals,
        **{**pipes, **options},
    )


def at_terminal(*arguments: object, home: Path, timeout: float = 30) -> pexpect.spawn:
    """The command at a pseudo-terminal, with a model cache of its own."""
    return pexpect.spawn(
        COMMAND[0],
        [*COMMAND[1:], *map(str, arguments)],
        env={**_environment(), "MINIKV_HOME": str(home)},
        preexec_fn=_default_signals,
        encoding="utf-8",
        timeout=timeout,
        dimensions=(40, 200),
    )
