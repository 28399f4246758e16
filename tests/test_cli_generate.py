"""`minikv generate`, and the options that every command shares."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
from cli_tools import error_of, invoke, start, write_tiny_model

from minikv import LLM, CacheConfig, SamplingParams, TierConfig
from minikv.cli.inputs import join_prompt
from minikv.cli.options import CHAT_SAMPLING, ENGINE, SAMPLING, Option, load_llm, parse_value
from minikv.errors import ConfigError

KEYS = ["text", "token_ids", "finish_reason", "usage", "kv", "timings"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path):
    with LLM(str(model)) as llm:
        yield llm


def generate(*arguments: object, stdin: str | bytes = "") -> dict:
    done = invoke("generate", *arguments, "--json", stdin=stdin)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_json_has_exactly_the_documented_keys(model: Path) -> None:
    out = generate(model, "-p", "hello", "--max-tokens", 4, "--ignore-eos")
    assert list(out) == KEYS
    assert list(out["usage"]) == ["prompt_tokens", "completion_tokens", "reused_tokens"]
    assert list(out["kv"]) == ["bytes", "full_bytes"]
    assert list(out["timings"]) == ["load_s", "prefill_s", "decode_s", "compress_s"]
    assert out["finish_reason"] == "length"
    assert out["usage"]["completion_tokens"] == len(out["token_ids"]) == 4


def test_with_tiers_json_says_what_is_in_them_and_every_name_is_documented(model: Path) -> None:
    prompt = ("-p", "hello " * 60, "--raw", "--max-tokens", 2, "--ignore-eos")
    names = Path(__file__).parents[1].joinpath("docs", "cli.md").read_text()
    cold = ("--kv-cold", f"{model.parent / 'kv.cold'}:1MiB")
    for options in (("--kv-warm", "1MiB"), cold, ("--kv-warm", "1MiB", *cold)):
        out = generate(model, *prompt, *options)
        assert list(out) == [*KEYS, "tiers"]
        assert out["tiers"]["prefix_blocks"] or out["tiers"]["prefix_hits"]
        assert [name for name in out["tiers"] if f"`{name}`" not in names] == []
    assert out["tiers"]["prefix_tokens"] >= 128 and out["tiers"]["warm_bytes"] + out["tiers"]["cold_bytes"]


def test_streamed_text_is_the_json_text(model: Path) -> None:
    options = (model, "-p", "The quick brown", "--max-tokens", 40, "--ignore-eos")
    streamed = invoke("generate", *options)
    assert streamed.exit_code == 0
    assert streamed.stderr == ""
    assert streamed.stdout == generate(*options)["text"] + "\n"


def test_prompt_is_rendered_by_the_template_unless_raw(model: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    chat = llm.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], params)
    assert generate(model, "-p", "hi", "--system", "Be brief.", "--max-tokens", 6)["token_ids"] == list(
        chat.token_ids
    )
    raw = llm.generate("hi", params)[0]
    out = generate(model, "-p", "hi", "--raw", "--max-tokens", 6)
    assert out["token_ids"] == list(raw.token_ids)
    assert out["usage"]["prompt_tokens"] == raw.usage.prompt_tokens


def test_model_without_template_gets_a_raw_prompt(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", template=None)
    assert generate(plain, "-p", "hi", "--max-tokens", 2)["usage"]["prompt_tokens"] == 2
    done = invoke("generate", plain, "-p", "hi", "--chat")
    assert "has no chat template; use --raw" in error_of(done)


def test_files_and_stdin_come_before_the_prompt(model: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\ufeffsecond\n\n", encoding="utf-8")
    joined = "first\n\nsecond\n\npiped\n\nWhy?"
    files = ("-f", tmp_path / "a.txt", "-f", tmp_path / "b.txt")
    out = generate(model, *files, "-p", "Why?", "--raw", "--max-tokens", 3, stdin="piped\n")
    assert out["token_ids"] == list(llm.generate(joined, SamplingParams(max_tokens=3))[0].token_ids)
    assert out["usage"]["prompt_tokens"] == len(llm.tokenizer.encode(joined))


def test_stdin_can_be_placed_among_the_files(model: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    out = generate(model, "-f", "-", "-f", tmp_path / "a.txt", "--raw", "--max-tokens", 1, stdin="piped")
    assert out["usage"]["prompt_tokens"] == len(llm.tokenizer.encode("piped\n\nfirst"))


def test_lone_document_keeps_its_inner_blank_lines() -> None:
    assert join_prompt(["\n  a\n\n\nb\n"], None) == "\n  a\n\n\nb"
    assert join_prompt(["", "\n"], "  q ") == "  q "


def test_seed_makes_a_random_completion_repeatable(model: Path) -> None:
    options = (model, "-p", "hi", "--temperature", 2, "--max-tokens", 20)
    first = generate(*options, "--seed", 1)["token_ids"]
    assert generate(*options, "--seed", 1)["token_ids"] == first
    assert generate(*options, "--seed", 2)["token_ids"] != first


def test_every_sampling_option_reaches_the_engine(model: Path, llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.5,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={40: 5.0, 41: -3.0},
        seed=3,
        logprobs=2,
        n=2,
        max_tokens=12,
        stop=("zz", "yy"),
        stop_token_ids=(50, 51),
        ignore_eos=True,
    )
    expected = llm.generate("hello", params)[0]
    assert expected.choices
    out = generate(
        *(
            model,
            "-p",
            "hello",
            "--raw",
            "--temperature",
            1.5,
            "--top-k",
            20,
            "--top-p",
            0.9,
            "--min-p",
            0.01,
        ),
        *("--repetition-penalty", 1.2, "--presence-penalty", 0.5, "--frequency-penalty", 0.25),
        *("--logit-bias", "40=5", "--logit-bias", "41=-3", "--seed", 3, "--logprobs", 2, "--n", 2),
        *("--max-tokens", 12, "--stop", "zz", "--stop", "yy", "--stop-token-id", 50, "--stop-token-id", 51),
        "--ignore-eos",
    )
    assert [c["token_ids"] for c in out["choices"]] == [list(c.token_ids) for c in expected.choices]
    assert len(out["logprobs"]) == len(out["token_ids"])
    assert len(out["logprobs"][0]["top"]) == 2


def test_several_completions_need_json(model: Path) -> None:
    assert "--json" in error_of(invoke("generate", model, "-p", "hi", "--n", 2))


def test_engine_options_reach_the_engine(model: Path) -> None:
    given = {"kv_dtype": "float16", "kv_hot": "2MiB", "max_context": 100, "max_seqs": 2, "prefill_chunk": 8}
    with load_llm(str(model), given | {"backend": "reference", "offline": True}) as llm:
        assert (llm.kv_dtype, llm.max_context, llm.backend_name) == ("float16", 100, "reference")
        assert llm.pool_bytes <= 2 * 1024 * 1024
        assert llm.engine.config.max_seqs == 2
        assert llm.engine.config.prefill_chunk == 8


def test_options_are_the_fields_of_the_api_with_their_defaults() -> None:
    defaults = {f.name: getattr(SamplingParams(), f.name) for f in dataclasses.fields(SamplingParams)}
    assert {option.name for option in SAMPLING} == set(defaults)
    for option in SAMPLING:
        shown = parse_value(option, option.default) if option.default else None
        assert shown == (defaults[option.name] or None if option.default is None else defaults[option.name])
    names = {option.name for option in ENGINE}
    keyword_defaults = LLM.__init__.__kwdefaults__
    keywords = set(keyword_defaults) - {"cache", "tiers", "progress"}
    tiers = {f"kv_{f.name}": getattr(TierConfig(), f.name) for f in dataclasses.fields(TierConfig)}
    assert names == keywords | {"kv_dtype"} | set(tiers)
    for option in ENGINE:
        if option.default is not None and option.name != "kv_dtype":
            assert parse_value(option, option.default) == {**keyword_defaults, **tiers}[option.name]
    assert CacheConfig().kv_dtype == "auto"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_tokens", "none", None),
        ("max_tokens", " 12 ", 12),
        ("temperature", "0.7", 0.7),
        ("stop", "END", ("END",)),
        ("stop", r'"\n\n"', ("\n\n",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "none", ()),
        ("stop_token_ids", "3, 4", (3, 4)),
        ("logit_bias", "3=-1.5 4=2", {3: -1.5, 4: 2.0}),
        ("ignore_eos", "on", True),
        ("seed", "none", None),
    ],
)
def test_settings_are_read_with_their_type(name: str, text: str, value: object) -> None:
    option = next(o for o in CHAT_SAMPLING if o.name == name)
    assert parse_value(option, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("top_k", "many"),
        ("temperature", "hot"),
        ("ignore_eos", "maybe"),
        ("stop", '["a", 1]'),
        ("seed", "1.5"),
    ],
)
def test_settings_of_the_wrong_type_are_named_in_one_sentence(name: str, text: str) -> None:
    option: Option = next(o for o in SAMPLING if o.name == name)
    with pytest.raises(ConfigError, match=f"^{name} must be .*, not '") as caught:
        parse_value(option, text)
    assert str(caught.value).count(".") <= 2


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if loud %}!!!!{% endif %}"
    model = write_tiny_model(tmp_path / "m", template=template)

    def prompt_tokens(*arguments: str) -> int:
        return generate(model, "-p", "hi", "--max-tokens", 1, *arguments)["usage"]["prompt_tokens"]

    assert prompt_tokens("--template-arg", "loud=true") > prompt_tokens()
    assert prompt_tokens("--template-arg", "loud=false") == prompt_tokens()
    assert invoke("generate", model, "-p", "hi", "--template-arg", "messages=[]").exit_code == 2


def test_ctrl_c_ends_the_text_where_it_is_and_exits_130(model: Path) -> None:
    with start("generate", model, "-p", "go", "--max-tokens", "none", "--ignore-eos") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        text = (first + process.stdout.read()).decode()
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == b""
    assert text.endswith("\n")


class InterruptedAfterFive:
    """Stands for Ctrl-C after five pieces."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def requested(self) -> bool:
        self.asked += 1
        return self.asked >= 5

    def __enter__(self) -> InterruptedAfterFive:
        return self

    def __exit__(self, *_: object) -> None:
        return


def test_interrupted_json_holds_what_is_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minikv.cli.generate.Interrupts", InterruptedAfterFive)
    done = invoke("generate", model, "-p", "go", "--max-tokens", "none", "--ignore-eos", "--json")
    assert done.exit_code == 130
    out = json.loads(done.stdout)
    assert list(out) == KEYS
    assert out["finish_reason"] == "abort"
    assert out["usage"]["completion_tokens"] == len(out["token_ids"]) > 0
    assert out["kv"]["bytes"] == out["kv"]["full_bytes"] > 0


def test_interrupted_completions_of_one_prompt_print_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minikv.cli.generate.Interrupts", InterruptedAfterFive)
    done = invoke("generate", model, "-p", "go", "--max-tokens", 400, "--ignore-eos", "--json", "--n", 2)
    assert (done.exit_code, done.stdout) == (130, "")


def test_real_model_answers_on_the_command_line(smollm_path: Path, tmp_path: Path) -> None:
    document = tmp_path / "note.txt"
    document.write_text("The special magic number for brave-kettle is: 4388903.\n", encoding="utf-8")
    question = "What is the special magic number for brave-kettle?"
    out = generate(smollm_path, "-f", document, "-p", question, "--max-tokens", 40)
    assert "4388903" in out["text"]
    assert out["finish_reason"] in ("stop", "length")
