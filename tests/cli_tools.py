"""Run the `minikv` command in tests: in this process, as a process, or at a pseudo-terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pexpect
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from minikv.cli.app import app
from tiny import TINY, RandomWeights
from tiny_tokenizers import byte_level

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "minikv"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('The system message must come first') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, max_context: int = 2048, template: str | None = TEMPLATE) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_level()
    size = backend.get_vocab_size(with_added_tokens=True)
    shape = replace(TINY, vocab_size=size, max_context=max_context, bos_token_id=0)
    weights = RandomWeights(shape)
    save_file({name: weights.load(name) for name in weights.names()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_query_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": max_context,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    backend.save(str(folder / "tokenizer.json"))
    words: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
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
