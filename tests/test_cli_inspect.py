"""`minikv inspect`: a map, a table, JSON and a picture of a compressed cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cli_tools import error_of, invoke, write_tiny_model

from minikv import LLM, CacheConfig, SamplingParams
from minikv.cache.picture import resolution
from minikv.cli.chat import take_line
from minikv.cli.chat_state import ChatState
from minikv.cli.inspect_facts import Held
from minikv.cli.inspect_report import report
from minikv.cli.interrupts import Interrupts

WORDS = "one two three four five six seven eight nine ten eleven twelve"
TEXT = " ".join(f"{WORDS} {i}." for i in range(6))
SNAPKV = ("--kv-policy", "snapkv", "--kv-budget", 64, "--kv-recent", 8)
MARKS = " ·░▒▓█"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("cli") / "tiny", max_context=1024)


def inspect(*arguments: object, stdin: str = "") -> str:
    done = invoke("inspect", *arguments, stdin=stdin)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert done.stderr == ""
    return done.stdout


def map_rows(text: str, label: str = r"\d+(?:\.\d+)?") -> list[tuple[str, str]]:
    """Label and cells of each row of the map, which an empty line ends."""
    drawn = text.split("\n\n")[0]
    return re.findall(rf"^ *({label})  ([ ·░▒▓█.\-+*#0-9A-D]+)$", drawn, re.MULTILINE)


def merged_lanes() -> tuple[torch.Tensor, torch.Tensor]:
    """2 layers with 2 KV heads of 120 tokens: pairs, groups of 12, tokens themselves, half of the tokens."""
    lanes = [
        [(2 * i, 2) for i in range(60)],
        [(12 * i + 6, 12) for i in range(10)],
        [(i, 1) for i in range(120)],
        [(i, 1) for i in range(60, 120)],
    ]
    positions = torch.full((4, 120), -1, dtype=torch.int32)
    counts = torch.zeros(4, 120, dtype=torch.int64)
    for i, lane in enumerate(lanes):
        positions[i, : len(lane)] = torch.tensor([position for position, _ in lane])
        counts[i, : len(lane)] = torch.tensor([count for _, count in lane])
    return positions.view(2, 2, 120), counts.view(2, 2, 120)


def merged_cache(**fields: Any) -> Held:
    positions, counts = merged_lanes()
    llm = SimpleNamespace(
        name="tiny",
        kv_dtype="float32",
        kv_bytes_per_token=100,
        full_kv_bytes=lambda tokens: 100 * tokens,
        engine=SimpleNamespace(config=SimpleNamespace(cache=CacheConfig(**fields))),
    )
    return Held(cast(LLM, llm), 120, positions, counts, torch.full((2, 2), 1000))


def printed(held: Held, layers: range, by_head: bool, width: int, **options: Any) -> str:
    from rich.console import Console

    screen = Console(width=width, markup=False, highlight=False, soft_wrap=True, **options)
    with screen.capture() as taken:
        for line in report(screen, held, layers, by_head):
            screen.print(line)
    return taken.get()


# The command


def test_a_row_for_every_layer_and_where_the_budget_went(model: Path) -> None:
    text = inspect(model, "-p", TEXT, *SNAPKV)
    assert re.search(r"held for \d+ tokens \(\d+\.\d%\); the full cache", " ".join(text.split()))
    assert "Policy snapkv, budget 64 entries per lane, prefill exact." in text
    rows = map_rows(text)
    assert [label for label, _ in rows] == ["0", "1"]
    assert all(set(cells) <= set(MARKS) and cells.endswith("█") for _, cells in rows)
    head, *lines = text.split("\n\n")[1].splitlines()
    assert head.split() == ["layer", "entries", "tokens", "budget", "size"]
    assert [line.split()[:2] + line.split()[3:4] for line in lines[:3]] == [
        ["0", "128", "50.0%"],
        ["1", "128", "50.0%"],
        ["all", "256", "100.0%"],
    ]


def test_a_row_for_every_head_of_all_layers_or_of_one(model: Path) -> None:
    rows = map_rows(inspect(model, "-p", TEXT, *SNAPKV, "--heads"))
    assert [label for label, _ in rows] == ["0.0", "0.1", "1.0", "1.1"]
    assert map_rows(inspect(model, "-p", TEXT, *SNAPKV, "--layer", 1)) == rows[2:]


def test_without_a_policy_every_token_is_there(model: Path) -> None:
    text = inspect(model, "-p", TEXT)
    assert "every token is held" in text
    assert all(set(cells) == {"█"} for _, cells in map_rows(text))
    assert "budget" not in text


def test_the_prompt_is_that_of_generate(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = (model, "-p", "And now?", "--system", "Be brief.", "-f", tmp_path / "text.txt", "--json")
    generated = json.loads(invoke("generate", *arguments, "--max-tokens", 1).stdout)
    assert json.loads(inspect(*arguments))["tokens"] == generated["usage"]["prompt_tokens"]
    raw = json.loads(inspect(model, "--raw", "--json", stdin=TEXT))
    assert raw["tokens"] < generated["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("policy", "budget", "prefill"),
    [("adakv", 0.25, "exact"), ("window", 40, "streaming"), ("snapkv", "64KiB", "exact")],
)
def test_json_is_the_whole_of_it(model: Path, policy: str, budget: float | str, prefill: str) -> None:
    options = ("--kv-policy", policy, "--kv-budget", budget, "--kv-prefill", prefill)
    facts = json.loads(inspect(model, "-p", TEXT, *options, "--json"))
    layers = facts.pop("layers")
    assert set(facts) == {
        *("model", "tokens", "policy", "budget", "prefill", "kv_dtype", "entries", "bytes", "full_bytes")
    }
    assert (facts["policy"], facts["budget"], facts["prefill"]) == (policy, budget, prefill)
    assert facts["bytes"] < facts["full_bytes"]
    for name in ("entries", "bytes"):
        assert facts[name] == sum(layer[name] for layer in layers)
    assert 0.5 < sum(layer["budget_share"] for layer in layers) <= 1 + 1e-9
    for number, layer in enumerate(layers):
        heads = layer.pop("heads")
        assert layer.pop("layer") == number
        assert set(layer) == {"entries", "prototypes", "tokens", "bytes", "budget_share"}
        for name, value in layer.items():
            assert value == pytest.approx(sum(head[name] for head in heads))
        for place, head in enumerate(heads):
            assert head["head"] == place
            assert head["positions"] == sorted(set(head["positions"]))
            assert head["positions"][:4] == [0, 1, 2, 3]
            assert head["positions"][-1] == facts["tokens"] - 1
            assert head["counts"] == [1] * head["entries"] == [1] * len(head["positions"])
            assert (head["tokens"], head["prototypes"]) == (head["entries"], 0)


def test_json_of_one_layer_has_the_sums_of_all(model: Path) -> None:
    whole = json.loads(inspect(model, "-p", TEXT, *SNAPKV, "--json"))
    one = json.loads(inspect(model, "-p", TEXT, *SNAPKV, "--json", "--layer", 1))
    assert one == {**whole, "layers": whole["layers"][1:]}
    full = json.loads(inspect(model, "-p", TEXT, "--json"))
    assert full["layers"][0]["budget_share"] is None is full["layers"][0]["heads"][0]["budget_share"]
    assert full["budget"] is None


def test_merged_entries_are_counted_as_prototypes(model: Path) -> None:
    facts = json.loads(inspect(model, "-p", TEXT, "--kv-policy", "gracekv", "--kv-budget", 0.25, "--json"))
    heads = [head for layer in facts["layers"] for head in layer["heads"]]
    assert sum(head["prototypes"] for head in heads) > 0
    for head in heads:
        assert head["tokens"] == sum(head["counts"]) <= facts["tokens"]
        assert head["prototypes"] == sum(count > 1 for count in head["counts"])
        assert len(head["positions"]) == len(head["counts"]) == head["entries"]
        positions, counts = torch.tensor(head["positions"]), torch.tensor(head["counts"])
        held = resolution(positions[None, None], counts[None, None], facts["tokens"])[0, 0]
        assert torch.equal(held[positions].long(), counts)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--kv-policy", "snapkb", "--kv-budget", 64), "did you mean snapkv"),
        (("--kv-policy", "snapkv"), "needs a budget"),
        (("--kv-policy", "snapkv", "--kv-budget", "1KiB"), "too little for this model"),
        (("--layer", 2), "--layer takes the number of a layer from 0 to 1, not 2."),
        (("--layer", -1), "from 0 to 1"),
        (("-o", "cache.jpg"), ".png file, not as 'cache.jpg'"),
        (("-o", "cache"), ".png file"),
        (("-f", "no-such-file.txt"), "no-such-file.txt"),
        (("-p", "word " * 3000), "the context is 1024"),
        (("--raw", "--system", "Be brief."), "need a chat template"),
    ],
)
def test_a_mistake_is_one_sentence(model: Path, options: tuple[object, ...], sentence: str) -> None:
    assert sentence in error_of(invoke("inspect", model, "-p", TEXT, *options))


def test_no_text_is_wrong_usage(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for arguments in ((), ("-p", ""), ("-f", tmp_path / "empty.txt")):
        failed = invoke("inspect", model, *arguments)
        assert failed.exit_code == 2
        assert "Give a prompt" in failed.stderr
    assert invoke("inspect", model, "-p", TEXT, "--kv-budget", "much").exit_code == 1


# The map


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_are_as_wide_as_the_screen_at_most(
    model: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    held = merged_cache(policy="adakv", budget=0.5)
    rows = {}
    for by_head in (False, True):
        texts = (
            inspect(model, "-p", TEXT, *SNAPKV, *["--heads"] * by_head),
            printed(held, range(2), by_head, width),
        )
        for text in texts:
            assert all(len(line) < width for line in text.splitlines())
            rows[by_head] = map_rows(text)
    columns = min(120, width - 4)
    assert [len(cells) for _, cells in rows[False]] == [columns] * 2
    assert len(rows[True]) == 4


def test_prototypes_are_the_number_of_tokens_in_them() -> None:
    held = merged_cache(policy="adakv", budget=0.5)
    assert map_rows(printed(held, range(2), True, 200)) == [
        ("0.0", "2" * 120),
        ("0.1", "A" * 120),
        ("1.0", "█" * 120),
        ("1.1", " " * 60 + "█" * 60),
    ]
    text = printed(held, range(2), False, 200)
    # A layer is the mean of its heads: 70 entries for 240 tokens, and every token in one head at least.
    assert map_rows(text) == [("0", "3" * 120), ("1", "▒" * 60 + "█" * 60)]
    assert "2 to 9 of so many tokens each, A from 10, B from 20" in text
    assert [line.split()[:4] for line in text.split("\n\n")[1].splitlines()[1:4]] == [
        ["0", "70", "100.0%", "29.2%"],
        ["1", "180", "75.0%", "75.0%"],
        ["all", "250", "87.5%", "104.2%"],
    ]
    (facts,) = held.to_dict(range(1))["layers"]
    assert (facts["entries"], facts["prototypes"], facts["tokens"]) == (70, 70, 240)


def test_colour_is_extra_and_plain_characters_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    held = merged_cache(policy="adakv", budget=0.5)
    coloured = {"force_terminal": True, "color_system": "standard"}
    shown = printed(held, range(2), True, 80, **coloured)
    plain = printed(held, range(2), True, 80)
    assert "\x1b[3" in shown
    assert "colour:" in shown and "colour:" not in plain
    assert "\x1b[" not in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(held, range(2), True, 80, **coloured) == plain
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    assert printed(held, range(2), True, 80).isascii()


def test_the_chat_shows_prototypes_as_well(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def states() -> Iterator[ChatState]:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        with LLM(str(model), max_seqs=2) as llm:
            session = llm.chat_session(cache=CacheConfig(policy="adakv", budget=40))
            yield ChatState(llm, session, params, lambda _: "", Interrupts())

    for state in states():
        take_line(state, TEXT)
        monkeypatch.setattr(state.session, "kv_map", lambda: resolution(*merged_lanes(), 120))
        capsys.readouterr()
        take_line(state, "/kv 0")
        first, second, *key = capsys.readouterr().err.splitlines()[3:]
        assert set(first.split()[-1]) == {"2"}
        assert set(second.split()[-1]) == {"A"}
        assert any("prototypes" in line for line in key)
        state.session.close()


# The picture


def test_a_picture_is_written_whole(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = []
    for options in ((), ("--heads",), ("--layer", 0), ("--json",)):
        target = tmp_path / "cache.PNG"
        inspect(model, "-p", TEXT, *SNAPKV, "-o", target, *options)
        data = target.read_bytes()
        assert data.startswith(b"\x89PNG")
        sizes.append(len(data))
        assert [path.name for path in tmp_path.iterdir()] == ["cache.PNG"]
    assert min(sizes) > 10_000
    assert len(set(sizes)) == 3


def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    missing = invoke("inspect", model, "-p", TEXT, "-o", tmp_path / "none" / "cache.png")
    assert "there is no folder" in error_of(missing)
    (tmp_path / "cache.png").write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minikv.cli.inspect_plot.os.replace", fail)
    failed = invoke("inspect", model, "-p", TEXT, "-o", tmp_path / "cache.png")
    assert "no space left" in error_of(failed)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_picture_without_matplotlib_is_one_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minikv.evals.plots.available", lambda: False)
    failed = error_of(invoke("inspect", model, "-p", TEXT, "-o", "cache.png"))
    assert "pip install 'minikv[eval]'" in failed


def test_colours_are_those_of_the_legend_and_lie_between_them() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from minikv.cli.inspect_plot import colours

    painted = [to_hex(rgb) for rgb in colours(torch.tensor([1, 0, 2, 3, 4, 16, 64, 500])).tolist()]
    assert painted[:3] == ["#0b3c8c", "#d2d6dc", "#b3261e"]
    assert painted[4:] == ["#dc5a1c", "#f7b45c", "#fff2be", "#fff2be"]
    assert len(set(painted)) == 7
