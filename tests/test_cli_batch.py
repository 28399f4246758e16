"""`minikv batch`: every input line gets exactly one output line, whatever happens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cli_tools import at_terminal, error_of, invoke, start, write_tiny_model

from minikv import LLM, SamplingParams
from minikv.cli.batch_lines import LineError, parse_request, read_line
from minikv.errors import MinikvError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=512)


@pytest.fixture(scope="module")
def llm(model: Path):
    with LLM(str(model)) as llm:
        yield llm


def chat_line(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": "any", "messages": messages, "max_tokens": 12, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def text_line(custom_id: str, prompt: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "any", "prompt": prompt, "max_tokens": 12, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def number(line: dict[str, Any]) -> int:
    """The input line that an output line answers."""
    return int(line["id"].split("_")[2])


def broken_lines() -> list[tuple[Any, str]]:
    """Twenty lines, each broken in another way, with a word that its reason must hold."""
    return [
        ("{not json", "not JSON"),
        ('["a", "list"]', "not a JSON object"),
        ('{"prompt": "a", "temperature": NaN}', "NaN"),
        ({}, "neither prompt nor messages"),
        ({"custom_id": "no-url", "method": "POST", "body": {}}, "no url"),
        (chat_line("get", "a") | {"method": "GET"}, "POST"),
        (chat_line("url", "a") | {"url": "/v1/embeddings"}, "/v1/embeddings"),
        (chat_line("envelope", "a") | {"priority": 1}, "priority"),
        (chat_line("role", "a", messages=[{"role": "wizard", "content": "a"}]), "wizard"),
        (chat_line("content", "a", messages=[{"role": "user"}]), "content"),
        (chat_line("none", "a", messages=[]), "message"),
        (
            chat_line("order", "a", messages=[{"role": r, "content": "a"} for r in ("user", "system")]),
            "must come first",
        ),
        (chat_line("stream", "a", stream=True), "stream"),
        (chat_line("field", "a", tools=[]), "tools"),
        (chat_line("long", "word " * 600), "512"),
        (text_line("empty", ""), "empty"),
        (text_line("id", [5, 100_000]), "100000"),
        (text_line("hot", "a", temperature=-1), "temperature"),
        (text_line("top", "a", top_p="most"), "top_p"),
        (text_line("bias", "a", logit_bias={"100000": 1}), "100000"),
    ]


def two_hundred_lines() -> tuple[list[Any], dict[int, str]]:
    """The lines of an input file, and the reason to expect by number of each broken one."""
    lines: list[Any] = [
        chat_line(f"chat-{i}", f"Tell me about {i}.") if i % 2 else text_line(f"text-{i}", f"Item {i}:")
        for i in range(180)
    ]
    reasons = {}
    for place, (line, reason) in enumerate(broken_lines()):
        lines.insert(place * 10 + 3, line)
        reasons[place * 10 + 4] = reason
    return lines, reasons


def check_two_hundred(output: Path, reasons: dict[int, str]) -> None:
    lines = {number(line): line for line in read_lines(output)}
    assert sorted(lines) == list(range(1, 201))
    assert len(read_lines(output)) == 200
    for place, line in lines.items():
        if place in reasons:
            assert line["response"]["status_code"] == 400
            assert line["response"]["body"] is None
            assert reasons[place] in line["error"]["message"], line
            assert line["error"]["code"]
        else:
            assert line["error"] is None, line
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"]["usage"]["completion_tokens"] == 12


def texts_of(output: Path) -> dict[str, Any]:
    return {
        line["id"]: line["response"]["body"] and line["response"]["body"]["choices"]
        for line in read_lines(output)
    }


def test_two_hundred_lines_twenty_of_them_broken(model: Path, tmp_path: Path) -> None:
    lines, reasons = two_hundred_lines()
    source = write_lines(tmp_path / "in.jsonl", lines)
    whole = tmp_path / "whole.jsonl"
    done = invoke("batch", source, "-o", whole, "--model", model)
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    assert "Served 180 of 200 lines, 20 failed; 2160 tokens in " in done.stderr
    check_two_hundred(whole, reasons)

    # Killed midway and resumed: the same lines with the same texts, none lost and none doubled.
    output = tmp_path / "out.jsonl"
    process = start("batch", source, "-o", output, "--model", model, "--max-seqs", 4)
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < 50:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert 50 <= len(output.read_bytes().splitlines()) < 200
    with output.open("ab") as file:
        file.write(b'{"id": "batch_line_9')  # as a kill in the middle of a write would leave it
    done = invoke("batch", source, "-o", output, "--model", model, "--resume")
    assert done.exit_code == 1
    assert re.search(r"Served 180 of 200 lines \(\d+ by an earlier run\), 20 failed; ", done.stderr)
    check_two_hundred(output, reasons)
    assert texts_of(output) == texts_of(whole)


def run(model: Path, tmp_path: Path, lines: Iterable[Any], *options: object) -> list[dict[str, Any]]:
    """Output lines in the order of the input."""
    source = write_lines(tmp_path / "in.jsonl", lines)
    done = invoke("batch", source, "-o", tmp_path / "out.jsonl", "--model", model, *options)
    assert done.exit_code in (0, 1), done.output
    out = sorted(read_lines(tmp_path / "out.jsonl"), key=number)
    assert done.exit_code == any(line["error"] for line in out)
    return out


def test_openai_lines_give_openai_bodies(model: Path, llm: LLM, tmp_path: Path) -> None:
    chat, text = run(model, tmp_path, [chat_line("a", "hello"), text_line("b", "hello")])
    assert chat["custom_id"] == "a"
    assert list(chat) == ["id", "custom_id", "response", "error"]
    assert list(chat["response"]) == ["status_code", "request_id", "body"]
    body = chat["response"]["body"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = llm.chat([{"role": "user", "content": "hello"}], params)
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.text},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    usage = body["usage"]
    assert usage["prompt_tokens"] == expected.usage.prompt_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    expected = llm.generate("hello", params)[0]
    body = text["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == expected.text


def test_plain_lines_work_and_options_are_their_defaults(model: Path, llm: LLM, tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello"},
        "",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "custom_id": "mine"},
        {"prompt": [40, 41, 42], "max_tokens": 2},
    ]
    plain, chat, ids = run(model, tmp_path, lines, "--max-tokens", 5, "--ignore-eos")
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert plain["custom_id"] == "line-1"
    assert plain["response"]["body"]["choices"][0]["text"] == llm.generate("hello", params)[0].text
    assert (chat["custom_id"], number(chat)) == ("mine", 3)
    expected = llm.chat([{"role": "user", "content": "hello"}], params)
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == expected.text
    assert ids["response"]["body"]["usage"]["completion_tokens"] == 2


def test_sampling_fields_act(model: Path, tmp_path: Path) -> None:
    lines = [
        chat_line("n", "hi", n=3, temperature=3, seed=5),
        chat_line("bias", "hi", logit_bias={"40": 100}),
        chat_line("top", "hi", logprobs=True, top_logprobs=2),
        text_line("logprobs", "hi", logprobs=1),
        chat_line("newer", "hi", max_tokens=None, max_completion_tokens=3),
        chat_line("null", "hi", seed=None, stop=None),
        text_line("stop", "hi", stop=["never", "ever"], stop_token_ids=[40], logit_bias={"40": 100}),
    ]
    n, bias, top, logprobs, newer, null, stop = (
        line["response"]["body"] for line in run(model, tmp_path, lines)
    )
    assert [choice["index"] for choice in n["choices"]] == [0, 1, 2]
    assert n["usage"]["completion_tokens"] == 36
    assert len(set(bias["choices"][0]["message"]["content"])) == 1
    entries = top["choices"][0]["logprobs"]["content"]
    assert len(entries) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    flat = logprobs["choices"][0]["logprobs"]
    assert len(flat["tokens"]) == len(flat["token_logprobs"]) == len(flat["text_offset"]) == 12
    assert newer["usage"]["completion_tokens"] == 3
    assert null["usage"]["completion_tokens"] == 12
    assert (stop["usage"]["completion_tokens"], stop["choices"][0]["finish_reason"]) == (1, "stop")


def test_extreme_values_never_end_the_run(model: Path, tmp_path: Path) -> None:
    lines = [
        chat_line("logprobs", "hi", logprobs=True, top_logprobs=10**6),
        chat_line("top_k", "hi", top_k=10**9, temperature=1),
        chat_line("seed", "hi", seed=2**64, temperature=1),
        chat_line("tokens", "hi", max_tokens=10**12, stop="\x00"),
        text_line("id", [2**70]),
        text_line("negative", [-1]),
        text_line("penalty", [10**6], repetition_penalty=1.2),
        chat_line("n", "hi", n=10**9),
        chat_line("deep", "hi", chat_template_kwargs={"x": json.loads("[" * 600 + "]" * 600)}),
        chat_line("bias", "hi", logit_bias={"1": 1e300}),
        chat_line("template", "hi", chat_template_kwargs={"tools": 5, "add_generation_prompt": 0}),
        chat_line("fine", "hi"),
    ]
    out = run(model, tmp_path, lines)
    assert len(out) == len(lines)
    assert out[-1]["error"] is None


def test_template_arguments_of_a_line_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if loud %}!!!!{% endif %}"
    model = write_tiny_model(tmp_path / "m", template=template)
    lines = [chat_line(str(flag), "hi", chat_template_kwargs={"loud": flag}) for flag in (False, True)]
    quiet, loud = (line["response"]["body"]["usage"] for line in run(model, tmp_path, lines))
    assert loud["prompt_tokens"] > quiet["prompt_tokens"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (chat_line("a", "b", model=7), "model"),
        (chat_line("a", "b", max_completion_tokens=5), "max_completion_tokens"),
        (chat_line("a", "b", logprobs=3), "logprobs"),
        (chat_line("a", "b", top_logprobs=3), "top_logprobs"),
        (chat_line("a", "b", n=0), "n must"),
        (chat_line("a", "b", seed="x"), "seed"),
        (chat_line("a", "b", stop=5), "stop"),
        (chat_line("a", "b", logit_bias=[1]), "logit_bias"),
        (chat_line("a", "b", logit_bias={"x": 1}), "logit_bias"),
        (chat_line("a", "b", chat_template_kwargs=[]), "chat_template_kwargs"),
        (chat_line("a", "b", chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (chat_line("a", "b", prompt="c"), "prompt"),
        (text_line("a", "b", chat_template_kwargs={}), "chat_template_kwargs"),
        (text_line("a", ["b"]), "prompt"),
        (text_line("a", [True]), "prompt"),
        (text_line("a", []), "empty"),
        (text_line("a", None), "prompt"),
        (text_line("a", "b", echo=True), "echo"),
        (chat_line("a", "b") | {"custom_id": 5}, "custom_id"),
        (chat_line("a", "b") | {"body": "text"}, "body"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "messages": []}, "prompt"),
    ],
)
def test_line_that_cannot_be_served_says_why(line: dict[str, Any], named: str) -> None:
    with pytest.raises(MinikvError, match=named) as caught:
        parse_request(read_line(json.dumps(line).encode(), 1), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"null"])
def test_line_that_is_not_an_object_never_raises_when_read(data: bytes) -> None:
    line = read_line(data, 1)
    assert (line.fields, line.custom_id) == (None, None)
    with pytest.raises(LineError, match="The line is not"):
        parse_request(line, {})


def test_text_that_cannot_be_encoded_is_an_error_of_its_line(model: Path, tmp_path: Path) -> None:
    lines = ['{"prompt": "\\ud800"}', '{"prompt": "ok", "custom_id": "\\ud800"}', {"prompt": "ok"}]
    first, second, third = run(model, tmp_path, lines, "--max-tokens", 2)
    assert "surrogate" in first["error"]["message"]
    assert "custom_id" in second["error"]["message"]
    assert third["error"] is None


def test_repeated_custom_id_is_an_error_that_names_it(model: Path, tmp_path: Path) -> None:
    first, second, third = run(model, tmp_path, [chat_line(i, "hi") for i in ("same", "same", "other")])
    assert first["error"] is None
    assert second["error"]["code"] == "duplicate_custom_id"
    assert "same" in second["error"]["message"]
    assert third["error"] is None


def test_input_may_be_a_pipe(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = start("batch", "-", "-o", output, "--model", model, "--max-tokens", 2, stdin=subprocess.PIPE)
    _, errors = process.communicate(b'{"prompt": "a"}\n' * 3, timeout=60)
    assert process.returncode == 0, errors
    assert b"Served 3 of 3 lines, 0 failed" in errors
    assert [line["custom_id"] for line in read_lines(output)] == ["line-1", "line-2", "line-3"]


def test_finished_output_is_not_run_again(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    output = tmp_path / "out.jsonl"
    options = ("batch", source, "-o", output, "--max-tokens", 2)
    assert invoke(*options, "--model", model).exit_code == 0
    before = output.read_bytes()
    assert "--resume to go on or --overwrite" in error_of(invoke(*options, "--model", model))
    # Nothing is left to do, so not even the model is needed.
    done = invoke(*options, "--model", tmp_path / "absent", "--resume")
    assert done.exit_code == 0
    assert done.stderr == "minikv: Served 2 of 2 lines (2 by an earlier run), 0 failed.\n"
    assert output.read_bytes() == before
    # A mistake in the command must not cost the results that are there.
    for mistake in (["--model", tmp_path / "absent"], ["--model", model, "--top-p", 3]):
        assert invoke(*options, *mistake, "--overwrite").exit_code == 1
        assert output.read_bytes() == before
    assert invoke(*options, "--model", model, "--overwrite").exit_code == 0
    assert len(read_lines(output)) == 2


def test_failed_lines_are_run_again_only_when_asked(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "top_k": "x"}, "oops", {"prompt": "c"}]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    options = ("batch", source, "-o", output, "--model", model, "--max-tokens", 2, "--resume")
    assert invoke(*options).exit_code == 1
    kept = [line for line in read_lines(output) if line["error"] is None]
    assert invoke(*options).exit_code == 1
    # A line that failed may be mended in place; those that were served must stay as they are.
    write_lines(source, [lines[0], {"prompt": "b", "top_k": 1}, {"prompt": "mended"}, lines[3]])
    done = invoke(*options, "--retry-failed")
    assert done.exit_code == 0, done.output
    out = read_lines(output)
    assert sorted(map(number, out)) == [1, 2, 3, 4]
    assert out[:2] == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_output_of_another_input_is_not_resumed(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    output = tmp_path / "out.jsonl"
    options = ("batch", source, "-o", output, "--model", model, "--max-tokens", 2)
    assert invoke(*options).exit_code == 0
    before = output.read_bytes()
    for lines in ([{"prompt": "a"}], [{"prompt": "b"}, {"prompt": "a"}], [{"prompt": "a"}, {"prompt": "c"}]):
        write_lines(source, lines)
        assert "does not hold results for" in error_of(invoke(*options, "--resume"))
    write_lines(source, [{"prompt": "a"}, {"prompt": "b"}])
    output.write_bytes(before + before)
    assert "does not hold results for" in error_of(invoke(*options, "--resume"))
    output.write_bytes(b"some notes\n")
    assert "Line 1 of" in error_of(invoke(*options, "--resume"))
    assert output.read_bytes() == b"some notes\n"


@pytest.mark.parametrize(
    ("source", "output", "named"),
    [
        ("absent.jsonl", "out.jsonl", "absent.jsonl: no such file"),
        (".", "out.jsonl", "is a directory"),
        ("in.jsonl", "no/such/folder/out.jsonl", "no such file"),
        ("in.jsonl", ".", "is a directory"),
        ("in.jsonl", "in.jsonl", "another file than the input"),
        ("in.jsonl", "/dev/full", "no space left on device"),
        ("in.jsonl", "/sys/out.jsonl", "Cannot write /sys/out.jsonl"),
    ],
)
def test_files_that_cannot_be_used_are_one_sentence(
    model: Path, tmp_path: Path, source: str, output: str, named: str
) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    options = ("--model", model, "--max-tokens", 2)
    done = invoke("batch", tmp_path / source, "-o", tmp_path / output, *options)
    assert named in error_of(done)


def test_wrong_default_is_one_error_and_not_one_per_line(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}] * 3)
    options = ("-o", tmp_path / "out.jsonl", "--model", model, "--top-p", 3)
    assert "top_p" in error_of(invoke("batch", source, *options))


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    lines = [text_line(str(i), f"Item {i}:", max_tokens=100) for i in range(80)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    with start("batch", source, "-o", output, "--model", model, "--max-seqs", 2) as process:
        while not output.exists() or output.read_bytes().count(b"\n") < 4:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        (line,) = process.stderr.read().decode().splitlines()
        assert process.wait(timeout=30) == 130
    count = len(read_lines(output))
    assert 4 <= count < 80
    assert line == f"minikv: Interrupted after {count} of 80 lines. Run it again with --resume to go on."
    done = invoke("batch", source, "-o", output, "--model", model, "--resume")
    assert done.exit_code == 0, done.output
    assert sorted(map(number, read_lines(output))) == list(range(1, 81))


def test_progress_is_shown_at_a_terminal(model: Path, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"prompt": f"Item {i}", "max_tokens": 60} for i in range(40)]
    )
    child = at_terminal("batch", source, "-o", tmp_path / "out.jsonl", "--model", model, home=tmp_path)
    child.expect(r"\d+ of 40 lines, 0 failed, [\d.]+ tok/s")
    child.expect(r"Served 40 of 40 lines, 0 failed; \d+ tokens in [\d.]+ s, [\d.]+ tok/s")
    child.wait()
    assert child.exitstatus == 0


def test_a_slow_pipe_does_not_hold_up_what_is_there(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = start("batch", "-", "-o", output, "--model", model, "--max-tokens", 1, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b'{"prompt": "a"}\n')
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not (output.exists() and output.read_bytes().endswith(b"\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    # The producer has not closed its end, yet the answer is there; then one Ctrl-C ends the run.
    assert len(read_lines(output)) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Interrupted after 1" in errors


def test_what_lines_begin_with_is_computed_once_also_across_runs(model: Path, tmp_path: Path) -> None:
    document = [3 + n % 60 for n in range(300)]
    lines = [text_line(f"{n}", [*document, n + 3, 9]) for n in range(4)]
    source, cold = write_lines(tmp_path / "in.jsonl", lines), f"{tmp_path / 'kv.cold'}:64MiB"
    answers, cached = {}, {}
    for run, options in {
        "without": (),
        "first": ("--kv-cold", cold),
        "second": ("--kv-cold", cold, "--kv-warm", "1MiB"),
        "unwanted": ("--kv-cold", cold, "--no-prefix-store"),
    }.items():
        output = tmp_path / f"{run}.jsonl"
        done = invoke("batch", source, "-o", output, "--model", model, *options)
        assert done.exit_code == 0, done.output
        bodies = {line["custom_id"]: line["response"]["body"] for line in read_lines(output)}
        answers[run] = {name: body["choices"] for name, body in bodies.items()}
        cached[run] = [bodies[f"{n}"]["usage"]["prompt_tokens_details"]["cached_tokens"] for n in range(4)]
    assert answers["without"] == answers["first"] == answers["second"] == answers["unwanted"]
    assert cached["without"] == cached["unwanted"] == [0, 0, 0, 0]
    assert cached["first"] == [0, 256, 256, 256] and cached["second"] == [256, 256, 256, 256]
