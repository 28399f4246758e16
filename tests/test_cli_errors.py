"""A user's mistake is one line on stderr and exit status 1, on every command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tools import COMMAND, ROOT, error_of, invoke, start, write_tiny_model
from safetensors.torch import load_file, save_file

from minikv.cli.console import one_line, printable
from minikv.kernels.backend import BACKENDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=128)


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "broken"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def edit_tensors(folder: Path, **changes: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        key = name.replace("__", ".")
        if change is None:
            del tensors[key]
        else:
            tensors[key] = change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors")


def test_every_command_reports_a_model_that_is_not_there(tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "hi"}\n', encoding="utf-8")
    for command in (
        ("generate", absent, "-p", "hi"),
        ("info", absent),
        ("pull", absent),
        ("batch", lines, "-o", tmp_path / "out.jsonl", "--model", absent),
    ):
        assert "absent.gguf" in error_of(invoke(*command))
    assert "absent.gguf" in error_of(invoke("chat", absent, stdin="hi"))


def test_missing_tensor_is_named(broken: Path) -> None:
    edit_tensors(broken, model__norm__weight=None)
    for command in (("info", broken), ("generate", broken, "-p", "hi")):
        assert "model.norm.weight" in error_of(invoke(*command))


def test_extra_tensor_is_named(broken: Path) -> None:
    edit_tensors(broken, model__surplus__weight=lambda tensors: tensors["model.norm.weight"].clone())
    assert "model.surplus.weight" in error_of(invoke("generate", broken, "-p", "hi"))


def test_tensor_of_the_wrong_shape_is_named(broken: Path) -> None:
    edit_tensors(broken, model__norm__weight=lambda tensors: tensors["model.norm.weight"][:-1].clone())
    assert "model.norm.weight" in error_of(invoke("generate", broken, "-p", "hi"))


def test_missing_shard_is_named(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "model-00002-of-00002.safetensors" in error_of(invoke("generate", broken, "-p", "hi"))


@pytest.mark.parametrize("size", [0, 10, 3000])
def test_truncated_gguf_is_one_sentence(tmp_path: Path, smollm_path: Path, size: int) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm_path.open("rb") as whole:
        cut.write_bytes(whole.read(size))
    assert "cut.gguf" in error_of(invoke("generate", cut, "-p", "hi"))


def test_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(5000))
    assert "other.gguf" in error_of(invoke("info", other))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": None, "model_type": None}, "architectures"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "Mamba"),
    ],
)
def test_config_that_is_not_supported_is_named(broken: Path, changes: dict, named: str) -> None:
    edit_config(broken, **changes)
    assert named.lower() in error_of(invoke("generate", broken, "-p", "hi")).lower()


def test_missing_tokenizer_is_named(broken: Path) -> None:
    (broken / "tokenizer.json").unlink()
    assert "tokenizer.json" in error_of(invoke("generate", broken, "-p", "hi"))


def test_prompt_beyond_the_context_is_one_sentence(model: Path) -> None:
    done = invoke("generate", model, "-p", "word " * 500)
    assert "128" in error_of(done)
    assert "128" in error_of(invoke("generate", model, "-p", "word " * 500, "--json"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "nan"), "top_p"),
        (("--kv-dtype", "int3"), "kv_dtype"),
        (("--kv-hot", "lots"), "kv_hot"),
        (("--kv-hot", "1KiB"), "kv"),
        (("--max-context", "4096"), "max_context"),
        (("--device", "abacus"), "abacus"),
        (("--backend", "abacus"), "abacus"),
        (("--threads", "0"), "threads"),
        (("--max-seqs", "0"), "max_seqs"),
        (("--logit-bias", "100000=1"), "logit_bias"),
        (("--raw", "--system", "x"), "--system"),
        (("--file", "no-such-file"), "no-such-file"),
    ],
)
def test_wrong_value_is_named(model: Path, options: tuple[str, ...], named: str) -> None:
    assert named in error_of(invoke("generate", model, "-p", "hi", *options))


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "MODEL"),
        ("generate", "MODEL", "-p", "hi", "--top-k", "many"),
        ("generate", "MODEL", "-p", "hi", "--max-tokens", "few"),
        ("generate", "MODEL", "-p", "hi", "--no-such-option"),
        ("batch", "in.jsonl"),
        ("batch", "in.jsonl", "-o", "out.jsonl", "--resume", "--overwrite"),
        ("batch", "in.jsonl", "-o", "out.jsonl", "--retry-failed"),
        ("no-such-command",),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output


def test_input_that_is_not_text_is_refused(model: Path, tmp_path: Path) -> None:
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    assert "picture.png is not a text file" in error_of(invoke("generate", model, "-f", binary))
    assert "Cannot read" in error_of(invoke("generate", model, "-f", tmp_path))
    assert "Standard input is not a text file" in error_of(invoke("generate", model, stdin=b"\xff\xfe\0"))


def test_template_that_refuses_is_one_sentence(broken: Path) -> None:
    write_tiny_model(broken, template="{{ raise_exception('No, thank you') }}")
    assert "No, thank you" in error_of(invoke("generate", broken, "-p", "hi"))
    assert "No, thank you" in error_of(invoke("chat", broken, stdin="hi"))


def test_full_disk_behind_stdout_is_one_line_and_exit_1(model: Path) -> None:
    with open("/dev/full", "wb") as full, start("generate", model, "-p", "hi", stdout=full) as process:
        assert process.stderr is not None
        lines = process.stderr.read().decode().splitlines()
        assert process.wait(timeout=60) == 1
    assert lines == ["minikv: Standard output cannot be written: no space left on device."]


def test_closed_pipe_is_quiet(model: Path) -> None:
    options = ("-p", "hi", "--max-tokens", "none", "--ignore-eos", "--max-context", "128")
    with start("generate", model, *options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody may write to")
def test_read_only_model_cache_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIKV_HOME", "/sys/minikv")
    assert "/sys/minikv" in error_of(invoke("pull", "smollm2-135m"))


def test_model_cache_that_is_a_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("", encoding="utf-8")
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    error_of(invoke("pull", "smollm2-135m"))


def test_offline_pull_of_a_model_not_in_the_cache_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path))
    assert "smollm2-135m" in error_of(invoke("pull", "smollm2-135m", "--offline"))


def test_info_describes_a_model(model: Path) -> None:
    facts = json.loads(invoke("info", model, "--json").stdout)
    assert facts["architecture"] == "llama"
    assert (facts["layers"], facts["query_heads"], facts["kv_heads"], facts["group_size"]) == (2, 4, 2, 2)
    assert facts["kv_bytes_per_token"] == {"float32": 2 * 2 * 2 * 16 * 4, "16_bit": 2 * 2 * 2 * 16 * 2}
    assert facts["kv_bytes_full_context"]["16_bit"] == 128 * facts["kv_bytes_per_token"]["16_bit"]
    assert facts["chat_template"] is True
    assert facts["backends"] == list(BACKENDS)
    assert facts["kv_dtypes"] == ["float32", "float16", "bfloat16", "int8"]
    assert facts["eos_tokens"] == [{"id": 2, "text": "<|im_end|>"}]
    table = invoke("info", model).stdout
    for part in ("llama", "4 query, 2 KV (groups of 2)", "128 tokens", "512 B in float32", "<|im_end|> (2)"):
        assert part in table


def test_pull_prints_where_a_local_model_lies(model: Path) -> None:
    assert invoke("pull", model).stdout == f"{model}\n"


def test_version_is_printed() -> None:
    assert invoke("--version").stdout.startswith("minikv ")


def test_help_loads_nothing_heavy() -> None:
    for command in ("chat", "generate", "batch", "pull", "info", "inspect"):
        code = f"import sys; sys.argv = ['minikv', '{command}', '--help']\nfrom minikv.cli.app import main\n"
        code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_control_characters_are_taken_out_of_text_for_a_terminal() -> None:
    assert printable("a\x1b[31mb\tc\nd\r\x07\x9b\x7f[bold]e") == "a[31mb\tc\nd[bold]e"
    assert one_line("a\n b\x1b\t c") == "a b c"


def test_pipes_are_not_opened_in_a_chat(tmp_path: Path) -> None:
    from minikv.cli.inputs import refuse_special
    from minikv.errors import RequestError

    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RequestError, match="not a regular file"):
        refuse_special(tmp_path / "fifo")


@pytest.mark.parametrize(
    ("stream", "arguments", "status"),
    [
        ("1>&-", ("generate", "MODEL", "-p", "hi", "--max-tokens", "2"), 1),
        ("1>&-", ("generate", "MODEL", "-p", "hi", "--max-tokens", "2", "--json"), 1),
        ("1>&-", ("info", "MODEL"), 1),
        ("1>&-", ("--version",), 1),
        ("1>/dev/full", ("--version",), 1),
        ("1>/dev/full", ("--help",), 1),
        ("0<&-", ("chat", "MODEL"), 1),
        ("0<&-", ("batch", "-", "-o", "OUT"), 1),
        ("0<&-", ("generate", "MODEL", "-p", "hi", "--max-tokens", "2"), 0),
        ("0>/dev/null", ("generate", "MODEL", "-p", "hi", "--max-tokens", "2"), 1),
    ],
)
def test_closed_and_broken_streams_are_one_sentence(
    model: Path, tmp_path: Path, stream: str, arguments: tuple[str, ...], status: int
) -> None:
    words = [{"MODEL": str(model), "OUT": str(tmp_path / "out")}.get(word, word) for word in arguments]
    line = shlex.join([*COMMAND, *words])
    done = subprocess.run(
        ["sh", "-c", f"{line} {stream}"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status:
        assert len(done.stderr.strip().splitlines()) == 1


def test_long_values_are_cut_in_the_sentence_that_quotes_them(model: Path) -> None:
    for options in (("--kv-hot", "1" * 400), ("--file", "f" * 5000), ("--kv-dtype", "x" * 3000)):
        sentence = error_of(invoke("generate", model, "-p", "hi", *options))
        assert len(sentence) < 700


@pytest.mark.parametrize("kind", ["same", "relative", "symlink", "hardlink"])
def test_an_output_that_is_the_cold_tier_as_well_is_refused_before_it_is_touched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source, output, cold = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n', encoding="utf-8")
    if kind == "relative":
        cold = Path("out.jsonl")
    elif kind != "same":
        cold = tmp_path / "kv.cold"
        output.write_bytes(b"")
        (cold.symlink_to if kind == "symlink" else cold.hardlink_to)(output)
    given = ("batch", source, "-o", output, "--model", model, "--kv-cold", f"{cold}:1MiB")
    sentence = f"{output} cannot be both the output and the cold tier; give --kv-cold another file."
    assert error_of(invoke(*given)) == sentence
    assert not output.exists() or output.read_bytes() == b""


def test_other_files_that_are_the_cold_tier_as_well_are_refused(model: Path, tmp_path: Path) -> None:
    file, cold = tmp_path / "file.png", ("--kv-cold", f"{tmp_path}/file.png:1MiB")
    said = f"{file} cannot be both {{}} and the cold tier; give --kv-cold another file."
    chat = ("chat", model, "--session", file, *cold)
    assert error_of(invoke(*chat, stdin="hi")) == said.format("the session file")
    assert not file.exists()
    inspect = ("inspect", model, "-p", "hi", "-o", file, *cold)
    assert error_of(invoke(*inspect)) == said.format("the picture")
    assert not file.exists()
    file.write_bytes(b"")
    batch = ("batch", file, "-o", tmp_path / "out.jsonl", "--model", model, *cold)
    assert error_of(invoke(*batch)) == said.format("the input")
    assert file.read_bytes() == b""
