"""Compression at the command line: options, fields of batch lines, and what `/kv` of the chat shows."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_tools import ROOT, error_of, invoke, write_tiny_model

from minikv import LLM, CacheConfig, SamplingParams, TierConfig
from minikv.cache.policies.registry import POLICY_NAMES
from minikv.cli.batch_lines import parse_request, read_line
from minikv.cli.chat import take_line
from minikv.cli.chat_state import ChatState
from minikv.cli.compression import REQUEST_FIELDS, cache_config, changed
from minikv.cli.interrupts import Interrupts
from minikv.cli.options import COMPRESSION, load_llm, parse_value
from minikv.errors import ConfigError

WORDS = "one two three four five six seven eight nine ten eleven twelve"
TEXT = " ".join(f"{WORDS} {i}." for i in range(6))
SNAPKV = ("--kv-policy", "snapkv", "--kv-budget", 64, "--kv-recent", 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=1024)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_seqs=4) as llm:
        yield llm


def generate(*arguments: object) -> dict[str, Any]:
    done = invoke("generate", *arguments, "--json", "--ignore-eos")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


# Options


def test_options_reach_the_cache_configuration(model: Path) -> None:
    given = {
        "kv_policy": "adakv:expected",
        "kv_budget": "0.25",
        "kv_sinks": 2,
        "kv_recent": 5,
        "kv_window": 7,
        "kv_prefill": "streaming",
        "kv_slack": 9,
    }
    with load_llm(str(model), {"kv_dtype": "float32"}, given) as llm:
        assert llm.engine.config.cache == CacheConfig(
            kv_dtype="float32",
            policy="adakv:expected",
            budget=0.25,
            sinks=2,
            recent=5,
            window=7,
            prefill="streaming",
            decode_slack=9,
        )


def test_options_are_the_fields_of_the_configuration_with_their_defaults() -> None:
    names = {option.name.removeprefix("kv_").replace("slack", "decode_slack") for option in COMPRESSION}
    fields = {field.name for field in dataclasses.fields(CacheConfig)}
    assert names == fields - {"kv_dtype", "page_size", "pinned"}
    assert set(REQUEST_FIELDS) == fields - {"kv_dtype", "page_size"}
    for option in COMPRESSION:
        default = None if option.default is None else parse_value(option, option.default)
        name = option.name.removeprefix("kv_").replace("slack", "decode_slack")
        assert default == getattr(CacheConfig(), name)
    (policy,) = (option for option in COMPRESSION if option.name == "kv_policy")
    assert all(name in policy.help for name in POLICY_NAMES if ":" not in name)


@pytest.mark.parametrize(("given", "refit"), [((), None), (("--refit",), True), (("--no-refit",), False)])
def test_a_refit_is_asked_for_refused_or_left_to_the_policy(
    given: tuple[str, ...], refit: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CacheConfig] = []

    def stop(model: str, engine: Any, compression: Any, **rest: Any) -> None:
        seen.append(cache_config(engine, compression))
        raise ConfigError("That is enough.")

    monkeypatch.setattr("minikv.cli.generate.load_llm", stop)
    invoke("generate", "m", "-p", "a", "--kv-policy", "snapkv", "--kv-budget", 0.5, *given)
    assert [cache.refit for cache in seen] == [refit]


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.05", 0.05),
        ("1/128", 1 / 128),
        ("1.0", 1.0),
        ("5e-2", 0.05),
        ("256", 256),
        ("1", 1),
        ("64MiB", "64MiB"),
        ("2 GB", "2 GB"),
    ],
)
def test_budgets_are_read_by_their_form(text: str, budget: object) -> None:
    read = cache_config({}, {"kv_policy": "snapkv", "kv_budget": text}).budget
    assert read == budget
    assert type(read) is type(budget)


def test_less_is_held_of_a_long_prompt(model: Path) -> None:
    full = generate(model, "-p", TEXT, "--max-tokens", 4)
    some = generate(model, "-p", TEXT, "--max-tokens", 4, *SNAPKV)
    assert full["kv"]["bytes"] == full["kv"]["full_bytes"] == some["kv"]["full_bytes"]
    assert some["usage"]["prompt_tokens"] > 300
    assert some["kv"]["bytes"] < 0.4 * some["kv"]["full_bytes"]
    assert len(some["token_ids"]) == 4


def test_the_whole_context_as_a_budget_changes_nothing(model: Path) -> None:
    full = generate(model, "-p", TEXT, "--max-tokens", 6)
    whole = generate(model, "-p", TEXT, "--max-tokens", 6, "--kv-policy", "snapkv", "--kv-budget", "1.0")
    assert (whole["token_ids"], whole["kv"]) == (full["token_ids"], full["kv"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--kv-policy", "snapkv", "--kv-budget", "0"), "at least 1 entry"),
        (("--kv-policy", "snapkv", "--kv-budget", "-1"), "at least 1 entry"),
        (("--kv-policy", "snapkv", "--kv-budget", "-0.1"), "above 0"),
        (("--kv-policy", "snapkv", "--kv-budget", "1.5"), "at most 1"),
        (("--kv-policy", "snapkv", "--kv-budget", "nan"), "above 0"),
        (("--kv-policy", "snapkv", "--kv-budget", "256.0"), "write 256, without a point"),
        (("--kv-policy", "snapkv", "--kv-budget", "64 parsecs"), "64MiB"),
        (("--kv-policy", "snapkv", "--kv-budget", "64MBB"), "64MiB"),
        (("--kv-policy", "snapkv", "--kv-budget", ""), "64MiB"),
        (("--kv-policy", "snapkv", "--kv-budget", "1KiB"), "too little for this model"),
        (("--kv-policy", "snapkv"), "needs a budget"),
        (("--kv-budget", "0.5"), "needs a policy"),
        (("--kv-prefill", "streaming"), "needs a policy"),
        (("--kv-policy", "snapkb", "--kv-budget", "0.5"), "did you mean snapkv"),
        (("--kv-policy", "", "--kv-budget", "0.5"), "There is no policy"),
        (("--kv-policy", "snapkv", "--kv-budget", "0.5", "--kv-prefill", "fast"), "exact or streaming"),
        (("--kv-policy", "snapkv", "--kv-budget", "0.5", "--kv-slack", "0"), "at least 1"),
        (("--kv-policy", "snapkv", "--kv-budget", "0.5", "--kv-sinks", "-1"), "at least 0"),
        (("--kv-policy", "snapkv", "--kv-budget", "0.5", "--kv-window", "0"), "at least 1"),
        (("--kv-policy", "snapkv", "--kv-budget", "0.5", "--kv-profile", "p"), "compresskv and sekv only"),
        (("--kv-policy", "compresskv", "--kv-budget", "0.5", "--kv-profile", "no-such-file"), "no-such-file"),
    ],
)
def test_wrong_values_are_one_sentence(model: Path, options: tuple[str, ...], sentence: str) -> None:
    assert sentence in error_of(invoke("generate", model, "-p", "hi", *options))


def test_a_profile_of_another_model_is_refused(model: Path) -> None:
    shipped = next((ROOT / "minikv" / "calibration" / "profiles").glob("*.safetensors"))
    options = ("--kv-policy", "compresskv", "--kv-budget", "0.5", "--kv-profile", shipped)
    sentence = error_of(invoke("generate", model, "-p", "hi", *options))
    assert f"The profile {shipped} is of a model with 30 layers" in sentence


@pytest.mark.parametrize("command", ["chat", "generate", "batch", "bench", "calibrate", "eval"])
def test_help_loads_no_torch(command: str) -> None:
    code = f"import sys; sys.argv = ['minikv', '{command}', '--help']\nfrom minikv.cli.app import main\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if command in ("chat", "generate", "batch", "bench"):
        assert all(option.spelling in done.stdout for option in COMPRESSION)


# Batch lines


def run_batch(model: Path, folder: Path, lines: list[Any], *options: object) -> dict[str, dict[str, Any]]:
    """Output lines by custom_id."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    invoke("batch", source, "-o", output, "--model", model, "--overwrite", *options)
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(lines)
    return {line["custom_id"]: line for line in found}


def text_of(line: dict[str, Any]) -> str:
    assert line["error"] is None, line
    (choice,) = line["response"]["body"]["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def mixed_lines() -> list[dict[str, Any]]:
    """Both body forms, several policies, several kinds of budgets."""
    plain = {"max_tokens": 8, "ignore_eos": True}
    chat = {**plain, "messages": [{"role": "user", "content": TEXT}], "policy": "snapkv", "budget": 40}
    return [
        {"custom_id": "full", "prompt": TEXT, **plain},
        {"custom_id": "snapkv", "prompt": TEXT, "policy": "snapkv", "budget": 0.1, **plain},
        {"custom_id": "eighth", "prompt": TEXT, "policy": "snapkv", "budget": "1/8", **plain},
        {"custom_id": "window", "prompt": TEXT, "policy": "window", "budget": 24, "sinks": 2, **plain},
        {"custom_id": "stream", "prompt": TEXT, "policy": "expected", "budget": 40, "prefill": "streaming"}
        | plain,
        {"custom_id": "bytes", "prompt": TEXT, "policy": "adakv", "budget": "64KiB", **plain},
        {"custom_id": "merged", "prompt": TEXT, "policy": "gracekv", "budget": 0.1, "refit": False, **plain},
        {"custom_id": "fitted", "prompt": TEXT, "policy": "snapkv", "budget": 0.1, "refit": True, **plain},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    ]


def test_lines_of_different_policies_are_served_as_if_alone(model: Path, tmp_path: Path) -> None:
    together = run_batch(model, tmp_path, mixed_lines())
    texts = {name: text_of(line) for name, line in together.items()}
    assert len(set(texts.values())) > 3
    for line in mixed_lines():
        alone = run_batch(model, tmp_path, [line])
        assert text_of(alone[line["custom_id"]]) == texts[line["custom_id"]]


def test_a_bad_line_fails_by_itself(model: Path, tmp_path: Path) -> None:
    bad = {
        "zero": ({"policy": "snapkv", "budget": 0}, "at least 1 entry"),
        "float": ({"policy": "snapkv", "budget": 256.0}, "without a point"),
        "quoted": ({"policy": "snapkv", "budget": "256"}, "number in quotes"),
        "fraction": ({"policy": "snapkv", "budget": "9/8"}, "at most 1 as a fraction"),
        "unknown": ({"policy": "snapkb", "budget": 0.1}, "did you mean snapkv"),
        "type": ({"policy": ["snapkv"], "budget": 0.1}, "There is no policy"),
        "missing": ({"policy": "snapkv"}, "needs a budget"),
        "lonely": ({"budget": 0.1}, "needs a policy"),
        "demote": ({"policy": "snapkv", "budget": 0.1, "evicted": "demote"}, "needs a tier below the pool"),
        "pinned": ({"policy": "snapkv", "budget": 0.1, "pinned": [[5, 2]]}, "token ranges"),
        "pool": ({"policy": "snapkv", "budget": 0.1, "kv_dtype": "int8"}, "unknown field 'kv_dtype'"),
        "small": ({"policy": "snapkv", "budget": "1KiB"}, "too little for this model"),
        "profile": ({"policy": "compresskv", "budget": 0.1, "profile": "no-such-file"}, "no-such-file"),
        "refit": ({"policy": "snapkv", "budget": 0.1, "refit": "yes"}, "refit must be true, false or none"),
        "all": ({"policy": "full", "refit": True}, "policy full leaves everything"),
    }
    lines = [{"custom_id": name, "prompt": TEXT, "max_tokens": 2, **body} for name, (body, _) in bad.items()]
    out = run_batch(model, tmp_path, [*lines, {"custom_id": "good", "prompt": TEXT, "max_tokens": 2}])
    assert text_of(out["good"]) is not None
    for name, (_, sentence) in bad.items():
        assert out[name]["response"]["status_code"] == 400
        assert sentence in out[name]["error"]["message"]


def cache_of(default: CacheConfig, **body: Any) -> CacheConfig | None:
    line = read_line(json.dumps({"prompt": "a", **body}).encode(), 1)
    return parse_request(line, {}, default).cache


def test_a_line_inherits_what_it_does_not_set() -> None:
    default = CacheConfig(policy="compresskv", budget=0.1, window=8, decode_slack=32, profile="p")
    assert cache_of(default) is None
    assert cache_of(default, policy=None, budget=None) is None
    assert cache_of(default, budget=20) == dataclasses.replace(default, budget=20)
    assert cache_of(default, budget="1/8") == dataclasses.replace(default, budget=0.125)
    assert cache_of(default, policy="snapkv") == dataclasses.replace(default, policy="snapkv", profile=None)
    assert cache_of(default, policy="full") == CacheConfig(window=8)
    assert cache_of(default, pinned=[[0, 4]]) == dataclasses.replace(default, pinned=((0, 4),))
    with pytest.raises(ConfigError, match="policy full keeps everything"):
        cache_of(default, policy="full", budget=0.5)


def test_command_options_are_the_defaults_of_lines(model: Path, tmp_path: Path) -> None:
    lines = [{"custom_id": "a", "prompt": TEXT, "max_tokens": 8, "ignore_eos": True}]
    lines.append({**lines[0], "custom_id": "b", "policy": "snapkv", "budget": 64, "recent": 8})
    lines.append({**lines[0], "custom_id": "c", "policy": "full"})
    out = run_batch(model, tmp_path, lines, *SNAPKV)
    plain = run_batch(model, tmp_path, lines[:1])
    assert text_of(out["a"]) == text_of(out["b"]) != text_of(out["c"])
    assert text_of(out["c"]) == text_of(plain["a"])


# The chat


def chat_with(llm: LLM, cache: CacheConfig | None = None) -> ChatState:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    return ChatState(llm, llm.chat_session(cache=cache), params, lambda _: "", Interrupts())


@pytest.fixture
def squeezed(llm: LLM) -> Iterator[ChatState]:
    """A chat under a budget of 40 entries per lane, after one long turn."""
    state = chat_with(llm, CacheConfig(policy="adakv", budget=40))
    take_line(state, TEXT)
    yield state
    state.session.close()


def test_kv_shows_policy_entries_and_a_map(squeezed: ChatState, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    take_line(squeezed, "/kv")
    text = capsys.readouterr().err
    session = squeezed.session
    sizes, policy, title, *rows, key = text.splitlines()
    held = re.match(r"(\S+ \S+) held for (\d+) tokens \((\S+)%\); the full cache of them is", sizes)
    assert held
    assert int(held[2]) == session.num_tokens > 300
    assert float(held[3]) < 60
    assert policy == "Policy adakv, budget 40 entries per lane, prefill exact."
    assert f"tokens 0 to {session.num_tokens - 1}" in title
    assert [row.split()[:3] for row in rows] == [
        [str(layer), *map(str, heads)] for layer, heads in enumerate(session.kv_entries.tolist())
    ]
    assert "none" in key
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines()[2:])


def test_kv_of_a_layer_has_a_row_for_every_head(
    squeezed: ChatState, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    take_line(squeezed, "/kv 1")
    *_, first, second, _ = capsys.readouterr().err.splitlines()
    entries = squeezed.session.kv_entries[1].tolist()
    assert [first.split()[:2], second.split()[:2]] == [["0", str(entries[0])], ["1", str(entries[1])]]


@pytest.mark.parametrize("argument", ["2", "-1", "one", "1.5", "²", "9" * 5000])
def test_kv_of_no_layer_is_one_sentence(
    squeezed: ChatState, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    capsys.readouterr()
    take_line(squeezed, f"/kv {argument}")
    (line,) = capsys.readouterr().err.splitlines()
    assert "from 0 to 1" in line


def test_kv_without_policy_stays_plain(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    state = chat_with(llm)
    take_line(state, "/kv")
    assert "is empty" in capsys.readouterr().err
    take_line(state, "hello")
    take_line(state, "/kv")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "entries in each of 2 lanes" in lines[1]
    take_line(state, "/kv 0")
    assert "KV head" in capsys.readouterr().err
    state.session.close()


def test_map_has_a_plain_form_and_colours_where_they_are_wanted(
    squeezed: ChatState, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_with(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        take_line(squeezed, "/kv")
        return capsys.readouterr().err

    assert "\x1b[3" in map_with(FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[3" not in map_with(NO_COLOR="1")
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    assert map_with().isascii()


def test_policy_and_budget_can_be_changed_in_a_chat(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    state = chat_with(llm)
    take_line(state, TEXT)
    full = state.session.kv_bytes
    take_line(state, "/set policy snapkv 64")
    take_line(state, "/set")
    assert "policy = 'snapkv'\nbudget = 64\n" in capsys.readouterr().err
    take_line(state, "And?")
    assert len(state.session.messages) == 4
    assert state.session.kv_bytes < 0.4 * full
    take_line(state, "/set budget 0.5")
    assert state.session.cache.budget == 0.5
    take_line(state, "/set policy full")
    assert state.session.cache == CacheConfig()
    take_line(state, "And now?")
    assert state.session.kv_bytes >= full
    state.session.close()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set policy snapkv", "together"),
        ("/set budget 0.1", "together"),
        ("/set policy snapkb 0.1", "did you mean snapkv"),
        ("/set policy snapkv 64 parsecs", "64MiB"),
        ("/set policy full 0.1", "keeps everything"),
        ("/set polcy full", "did you mean policy"),
    ],
)
def test_a_policy_that_cannot_be_set_is_one_sentence(
    llm: LLM, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    state = chat_with(llm)
    take_line(state, line)
    (answer,) = capsys.readouterr().err.splitlines()
    assert sentence in answer
    assert state.session.cache == CacheConfig()


def test_a_chat_takes_the_options(model: Path) -> None:
    assert invoke("chat", model, *SNAPKV, "--max-tokens", 4, stdin=TEXT).exit_code == 0
    failed = invoke("chat", model, "--kv-policy", "snapkv", "--kv-budget", "1KiB", stdin=TEXT)
    assert "too little for this model" in error_of(failed)


def test_a_chat_that_has_filled_the_pool_says_what_helps(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(model), tiers=TierConfig(hot="100KiB")) as llm:
        state = chat_with(llm)
        for turn in range(12):
            capsys.readouterr()
            take_line(state, f"Turn {turn}")
            if len(state.session.messages) < 2 * turn + 2:
                break
        answer, hint = capsys.readouterr().err.splitlines()
        assert turn > 2
        assert "The KV pool is full" in answer
        assert "taken back" in hint
        take_line(state, "/set policy window 8")
        for _ in range(12):
            take_line(state, "On")
        assert len(state.session.messages) == 2 * turn + 24


def test_bench_measures_under_a_policy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minikv.cli import bench_measure

    monkeypatch.setattr(bench_measure, "_READ_SECONDS", 0.02)
    plan = ("--contexts", 256, "--batch-sizes", "1,2", "--prompt-lengths", "none", "--repeat", 1, "--json")
    facts = json.loads(invoke("bench", model, *plan, "--kv-policy", "window", "--kv-budget", 0.25).stdout)
    full = json.loads(invoke("bench", model, *plan).stdout)
    assert (facts["policy"], facts["budget"], full["policy"]) == ("window", 0.25, "full")
    for row, other in zip(facts["decode"], full["decode"], strict=True):
        assert row["kv_bytes"] < 0.5 * other["kv_bytes"]
    for floor, other in zip(facts["theory"]["floors"], full["theory"]["floors"], strict=True):
        assert floor["kv_bytes_per_sequence"] == other["kv_bytes_per_sequence"] // 4


SEKV = CacheConfig(policy="sekv", budget=0.5, profile="none")
HEADS = CacheConfig(policy="compresskv", budget=0.5, profile="heads")


@pytest.mark.parametrize(
    ("cache", "fields", "kept"),
    [
        (SEKV, {"budget": 20}, {"profile": "none", "budget": 20}),
        (SEKV, {"policy": "compresskv"}, {"profile": None}),
        (SEKV, {"policy": "snapkv"}, {"profile": None}),
        (HEADS, {"budget": 20}, {"profile": "heads"}),
        (
            CacheConfig(policy="compresskv", budget=0.5, profile="heads"),
            {"policy": "sekv"},
            {"profile": None},
        ),
        (CacheConfig(policy="gracekv", budget=0.5, refit=True), {"policy": "sekv"}, {"refit": None}),
        (CacheConfig(policy="snapkv", budget=0.5, evicted="demote"), {"policy": "sekv"}, {"evicted": "drop"}),
        (CacheConfig(policy="snapkv", budget=0.5, refit=True), {"policy": "adakv"}, {"refit": True}),
    ],
)
def test_a_new_policy_does_not_inherit_what_only_another_understands(cache, fields, kept):
    after = changed(cache, fields)
    assert {name: getattr(after, name) for name in kept} == kept


def test_what_is_asked_for_with_a_new_policy_is_not_dropped():
    with pytest.raises(ConfigError, match="refit corrects"):
        changed(CacheConfig(policy="gracekv", budget=0.5), {"policy": "sekv", "refit": True})
