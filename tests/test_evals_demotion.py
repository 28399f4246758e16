"""Policies that demote, as `minikv eval` measures them: as an engine does turn by turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_tools import invoke
from eval_tools import word_writer, write_word_model
from tiny import drain, greedy, prompt

from minikv.cache.compress import evidence_for
from minikv.config import CacheConfig, EngineConfig, TierConfig
from minikv.engine import Engine
from minikv.errors import ConfigError, RequestError
from minikv.evals import plots
from minikv.evals.copies import SEQUENCES, Copies, Copy
from minikv.evals.plan import EvalPlan
from minikv.evals.records import Record
from minikv.evals.sweep import Sweep, variants_of
from minikv.loading import LoadedModel, load_model
from minikv.probe import Probe
from minikv.scheduler.request import Lanes

WARM = TierConfig(warm="64MiB")
LENGTH = 1100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_model(tmp_path_factory.mktemp("demotion") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), CacheConfig(), 1 << 40, threads=1)


def probe_of(loaded: LoadedModel, tiers: TierConfig | None = WARM) -> Probe:
    return Probe(loaded, max_context=LENGTH, max_seqs=SEQUENCES, tiers=tiers)


def plan_of(*policies: str, **changes) -> EvalPlan:
    values = {"tasks": ("multi-turn",), "budgets": (0.1,), "lengths": (LENGTH,), "samples": 1}
    return EvalPlan(policies=policies, **(values | changes))


def measured(loaded: LoadedModel, plan: EvalPlan, done: Sequence[Record] = ()) -> list[Record]:
    """Without the seconds, which differ from run to run."""
    probe = probe_of(loaded)
    free = probe.store.pool.num_free
    sweep = Sweep(probe, plan, word_writer(), variants_of(plan, probe, None), done)
    found = [replace(record, compress_s=None) for part in sweep.records() for record in part]
    assert probe.store.pool.num_free == free and probe.room_below == 64 << 20, "something was left behind"
    return found


def of(records: list[Record], policy: str, turn: int) -> list[Record]:
    return [record for record in records if (record.policy, record.turn) == (policy, turn)]


@pytest.mark.parametrize("policy", ["snapkv", "expected", "compresskv", "snapkv+refit", "gracekv"])
@pytest.mark.parametrize("budget", [0.1, 40], ids=str)
def test_a_second_turn_holds_bit_for_bit_what_an_engine_holds(loaded, policy: str, budget: float) -> None:
    first, second, end = prompt(290, seed=1, vocab=900), prompt(30, seed=2, vocab=900), prompt(4, vocab=900)
    probe = probe_of(loaded)
    (variant,) = variants_of(plan_of(f"{policy}+demote", budgets=(budget,)), probe, None)

    config = EngineConfig(max_context=LENGTH, tiers=WARM)
    sizes = (loaded.kv_dtype, loaded.page_size, (), loaded.kernels.keys_transposed)
    engine, lanes = Engine(loaded.decoder, config, *sizes), Lanes()
    asked = {"lanes": lanes, "cache": variant.cache}
    engine.add([*first, *end], greedy(6), content_end=290, **asked)
    said = [event.token_id for event in _events(engine) if hasattr(event, "token_id")]
    whole = [*first, *end, *said, *second, *end]
    engine.add(whole, greedy(1), content_end=len(whole) - len(end), **asked)
    drain(engine)
    assert engine.scheduler.num_restored == 1
    assert engine.store.lengths[lanes.seq].sum() < 0.15 * len(whole) * engine.store.num_lanes

    recorder = probe.record(evidence_for(variant.policy, variant.cache), range(len(first)))
    source = probe.open()
    probe.feed(source, [*first, *end], "none", recorder)
    copies = Copies(probe)
    for (copy,) in copies.groups(source, recorder, [variant], rows=8, copies=1):
        probe.feed_many([copy.seq], [said[:-1]])
        copies.begin(copy, (said[-1], *second), tuple(end))
        for ours, theirs in zip(_rows(probe.store, copy.seq), _rows(engine.store, lanes.seq), strict=True):
            assert torch.equal(ours, theirs)


def _events(engine: Engine):
    while engine.has_work:
        yield from engine.step()


def _rows(store, seq: int) -> list[torch.Tensor]:
    """Everything that the lanes hold, in their order."""
    slots, valid = store.slots(seq)
    counts = [store.counts(seq, layer).flatten() for layer in range(store.lane_shape[0])]
    rows = store.pool.stored(slots[valid])
    return [torch.from_numpy(store.lengths[seq]), *counts, *(part for part in rows if part is not None)]


@pytest.mark.parametrize("agnostic", [False, True])
def test_a_budget_of_everything_answers_bit_for_bit_as_the_full_cache(loaded, agnostic: bool) -> None:
    found = measured(loaded, plan_of("snapkv+demote", "gracekv+demote", budgets=(1.0,), agnostic=agnostic))
    for turn in (1, 2):
        full = [replace(record, kv_bytes=0, full_bytes=0) for record in of(found, "full", turn)]
        for policy in ("snapkv+demote", "gracekv+demote"):
            ours = of(found, policy, turn)
            assert all(record.kv_bytes == record.full_bytes for record in ours)
            as_full = {"policy": "full", "budget": None, "kv_bytes": 0, "full_bytes": 0}
            assert [replace(record, **as_full) for record in ours] == full


@pytest.mark.parametrize("agnostic", [False, True])
def test_what_is_held_in_each_turn_is_within_the_budget(loaded, agnostic: bool, monkeypatch) -> None:
    seen = []
    begin = Copies.begin

    def spy(self, copy: Copy, *asked) -> None:
        begin(self, copy, *asked)
        store, count = self._probe.store, self._probe.num_tokens(copy.seq)
        seen.append(int(store.lengths[copy.seq].sum()) / (store.num_lanes * count))
        assert store.bytes_of(copy.seq) == copy.held.kv_bytes

    monkeypatch.setattr(Copies, "begin", spy)
    found = measured(loaded, plan_of("snapkv+demote", "gracekv+demote", agnostic=agnostic))
    dialogues, questions = 2, 2 if agnostic else 1
    assert len(seen) == 2 * dialogues * questions
    assert all(0.05 < share <= 0.1 for share in seen)
    for record in found:
        if record.policy != "full":
            assert record.kv_bytes < 0.15 * record.full_bytes


def test_the_first_answer_is_that_of_the_policy_alone_and_the_second_is_not(loaded) -> None:
    found = measured(loaded, plan_of("snapkv", "snapkv+demote", "gracekv", "gracekv+demote"))
    for policy in ("snapkv", "gracekv"):
        firsts, seconds = ([r.kl for r in of(found, policy, turn)] for turn in (1, 2))
        assert [r.kl for r in of(found, f"{policy}+demote", 1)] == firsts
        assert [r.kl for r in of(found, f"{policy}+demote", 2)] != seconds


@pytest.mark.parametrize("agnostic", [False, True])
def test_figures_do_not_depend_on_what_is_measured_beside_them(loaded, agnostic: bool) -> None:
    together = measured(
        loaded, plan_of("snapkv", "snapkv+demote", "expected+demote", agnostic=agnostic, budgets=(0.1, 0.2))
    )
    alone = measured(loaded, plan_of("snapkv", agnostic=agnostic)) + measured(
        loaded, plan_of("snapkv+demote", agnostic=agnostic)
    )
    chosen = [record for record in together if record.budget == 0.1 and "snapkv" in record.policy]
    assert _sorted(chosen) == _sorted([record for record in alone if record.policy != "full"])


def test_without_knowing_the_question_each_dialogue_begins_with_the_context_alone(loaded) -> None:
    both = measured(loaded, plan_of("snapkv+demote", tasks=("needle", "multi-turn"), agnostic=True))
    needles = measured(loaded, plan_of("snapkv+demote", tasks=("needle",), agnostic=True))
    assert _sorted([record for record in both if record.task == "needle"]) == _sorted(needles)


def test_a_run_goes_on_where_it_was_left(loaded) -> None:
    plan = plan_of("snapkv", "snapkv+demote")
    whole = measured(loaded, plan)
    for kept in (1, 4, len(whole) - 1):
        again = measured(loaded, plan, whole[:kept])
        assert _sorted(whole[:kept] + again) == _sorted(whole)
    assert measured(loaded, plan, whole) == []


def test_signs_behind_a_policy_may_stand_in_any_order(loaded) -> None:
    plan = plan_of("gracekv+demote+refit", "gracekv+refit+demote", "snapkv+demote", "snapkv-refit+demote")
    assert plan.policies == ("gracekv+refit+demote", "snapkv+demote", "snapkv-refit+demote")
    caches = [plan.cache(policy, 0.1) for policy in plan.policies]
    assert [(c.policy, c.refit, c.evicted) for c in caches] == [
        ("gracekv", True, "demote"),
        ("snapkv", None, "demote"),
        ("snapkv", False, "demote"),
    ]
    assert plan.cache("snapkv", 0.1).evicted == "drop" and plan.demotes and not plan_of("snapkv").demotes


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("full+demote", "policy full keeps everything"),
        ("snapvk+demote", "There is no policy 'snapvk'; did you mean snapkv"),
        ("snapkv+demoted", r"There is no policy 'snapkv\+demoted'; did you mean snapkv"),
        ("snapkv+demote+demote", r"There is no policy 'snapkv\+demote'; did you mean snapkv"),
    ],
)
def test_a_sign_that_cannot_be_is_refused(policy: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_of(policy)


@pytest.mark.parametrize("tiers", [None, TierConfig(warm="20KiB")])
def test_without_room_below_nothing_is_measured(loaded, tiers: TierConfig | None) -> None:
    probe, plan = probe_of(loaded, tiers), plan_of("snapkv+demote")
    free = probe.store.pool.num_free
    sweep = Sweep(probe, plan, word_writer(), variants_of(plan, probe, None))
    with pytest.raises(RequestError if tiers else ConfigError, match="below the"):
        list(sweep.records())
    assert probe.store.pool.num_free == free


def test_copies_that_zoom_in_share_the_tiers_with_those_that_demote(loaded) -> None:
    together = measured(loaded, plan_of("snapkv+demote", "sekv"))
    apart = [*measured(loaded, plan_of("snapkv+demote")), *measured(loaded, plan_of("sekv"))]
    assert {r.policy for r in together} == {"full", "snapkv+demote", "sekv"}
    assert {repr(r) for r in together} == {repr(r) for r in apart}


def test_copies_answer_in_smaller_groups_where_there_is_little_room_below(loaded, monkeypatch) -> None:
    plan = plan_of("snapkv+demote", "expected+demote", "window+demote")
    groups, of_group = [], Sweep._of_group
    monkeypatch.setattr(Sweep, "_of_group", lambda *given: groups.append(len(given[1])) or of_group(*given))
    one = Probe(loaded, max_context=LENGTH).store
    copy = one.pages_for(LENGTH) * one.pool.page_bytes
    found = []
    for warm in (64 << 20, 5 * copy // 2):
        probe = probe_of(loaded, TierConfig(warm=warm))
        sweep = Sweep(probe, plan, word_writer(), variants_of(plan, probe, None))
        found.append(_sorted([replace(r, compress_s=None) for part in sweep.records() for r in part]))
    assert groups == [3, 3, 2, 1, 2, 1]
    assert found[0] == found[1]


def test_the_command_measures_policies_that_demote(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    grid = ("--tasks", "multi-turn", "--policies", "snapkv,snapkv+demote+refit", "--budgets", "0.1")
    size = ("--lengths", LENGTH, "--samples", 1, "--threads", 1)
    result = invoke("eval", folder, *grid, *size, "-o", tmp_path)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "snapkv+refit+demote" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {line["policy"] for line in lines} == {"full", "snapkv", "snapkv+refit+demote"}
    assert all(line["compress_s"] > 0 for line in lines if line["policy"] != "full")


def _sorted(records: list[Record]) -> list[str]:
    return sorted(map(repr, records))
