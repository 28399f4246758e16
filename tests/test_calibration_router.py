"""Training of a router on a tiny model: resumed, refused, causal; and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_tools import error_of, invoke, write_tiny_model

from minikv import LLM, CacheConfig, SamplingParams, TierConfig
from minikv.cache.budget import Budget
from minikv.cache.policies.registry import make_policy
from minikv.cache.spans.router import Router
from minikv.cache.spans.share import lanes_part
from minikv.calibration.frozen import Frozen
from minikv.calibration.journal import Journal
from minikv.calibration.measure import Continuation
from minikv.calibration.router_file import load_router_for, named_router
from minikv.calibration.spans import loss_of, make_lesson, recall_of, scores_of
from minikv.calibration.train import RouterSettings, Training
from minikv.errors import ConfigError
from minikv.loading import load_model
from minikv.probe import Probe

SETTINGS = RouterSettings(texts=3, held=1, length=256, steps=2, rate=0.05, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=4096)


@pytest.fixture(scope="module")
def probe(model: Path) -> Probe:
    return Probe(load_model(str(model), CacheConfig(), 1 << 40, backend="torch", threads=1), max_seqs=3)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """A tiny model is too small for a router."""
    monkeypatch.setattr("minikv.calibration.train.MOST_PARAMETERS", 1.0)


@pytest.fixture(scope="module")
def frozen(model: Path) -> Frozen:
    return Frozen.open(model)


def run(
    probe: Probe,
    path: Path,
    frozen: Frozen | None,
    steps: int | None = None,
    settings: RouterSettings = SETTINGS,
) -> Training:
    with Journal(path, vars(settings)) as journal:
        training = Training(probe, settings, journal, frozen)
        for count, _ in enumerate(training.steps(), 1):
            if count == steps:
                break
        return training


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    probe: Probe, frozen: Frozen, tmp_path: Path
) -> None:
    whole = run(probe, tmp_path / "whole", frozen)
    assert whole.done == whole.total == 4
    assert run(probe, tmp_path / "part", frozen, steps=2).done == 2
    resumed = run(probe, tmp_path / "part", frozen)
    for one, other in zip(vars(whole.router()).values(), vars(resumed.router()).values(), strict=True):
        assert torch.equal(one, other)
    assert whole.comparisons() == resumed.comparisons()
    assert not probe.store.pool.bytes_in_use


def test_each_target_is_learned_from_alone_where_the_other_has_no_weight(
    probe: Probe, frozen: Frozen, tmp_path: Path
) -> None:
    shares = run(probe, tmp_path / "shares", None, settings=replace(SETTINGS, logits=0.0))
    logits = run(probe, tmp_path / "logits", frozen, settings=replace(SETTINGS, shares=0.0))
    both = run(probe, tmp_path / "both", frozen)
    for one, other in ((shares, logits), (logits, both), (both, shares)):
        assert not torch.equal(one.router().scale, other.router().scale)
    assert shares.comparisons()[0].trained.answers is None
    assert logits.comparisons()[0].trained.answers is not None


def lesson_of(probe: Probe, seed: int = 0, length: int = 200, rest: int = 10):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, probe.config.vocab_size, (length + rest,), generator=random).tolist()
    return make_lesson(probe, Continuation(ids[:length], length, ids[length:]), 0.4)


def test_true_masses_are_those_of_the_full_cache_and_learning_lowers_the_loss(probe: Probe) -> None:
    lesson = lesson_of(probe)
    shape = probe.config
    assert lesson.masses.shape[:3] == (shape.num_layers, shape.num_query_heads, 10)
    assert (lesson.masses >= 0).all() and (lesson.masses.sum(-1) <= 1 + 1e-5).all()
    plain = Router.plain(shape.num_layers, shape.num_query_heads, shape.head_dim)
    parts = {name: part.clone().requires_grad_() for name, part in vars(plain).items()}
    loss = loss_of(Router(**parts), lesson)
    gradients = torch.autograd.grad(loss, list(parts.values()))
    size = plain.bias.numel()
    moved = (p - 0.1 * size * g for p, g in zip(parts.values(), gradients, strict=True))
    assert loss_of(Router(*moved), lesson) < loss
    assert 0 < recall_of(plain, lesson) <= 1


def test_nothing_is_learned_from_what_comes_later(probe: Probe) -> None:
    """Other tokens at the end change neither spans nor what earlier queries draw from them."""
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(3, probe.config.vocab_size, (210,), generator=random).tolist()
    other = [*ids[:205], *((i + 1) % 200 + 3 for i in ids[205:])]
    one, two = (make_lesson(probe, Continuation(text[:200], 200, text[200:]), 0.4) for text in (ids, other))
    assert torch.equal(one.sizes, two.sizes) and torch.equal(one.codes, two.codes)
    for name in ("parts", "constant", "masses", "rest"):
        torch.testing.assert_close(getattr(one, name)[:, :, :5], getattr(two, name)[:, :, :5])
    plain = Router.plain(probe.config.num_layers, probe.config.num_query_heads, probe.config.head_dim)
    torch.testing.assert_close(scores_of(plain, one)[:, :, :5], scores_of(plain, two)[:, :, :5])


def test_a_router_that_would_be_too_large_is_refused(probe: Probe, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("minikv.calibration.train.MOST_PARAMETERS", 0.0005)
    with pytest.raises(ConfigError, match=r"it may be 0.05%"):
        run(probe, tmp_path / "journal", None, settings=replace(SETTINGS, logits=0.0))


def test_the_command_makes_a_router_that_the_policy_takes(model: Path, probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "router.safetensors"
    options = ("--texts", 2, "--held", 1, "--length", 256, "--steps", 1, "--backend", "torch")
    done = invoke("train-router", model, "-o", path, *options)
    assert done.exit_code == 0, done.output
    assert "% of the model's" in done.stdout and f"Wrote {path}" in done.stdout
    assert not path.with_name("router.safetensors.partial").exists()
    router = load_router_for(path, probe)
    assert router.scale.shape == (2, 4, probe.config.head_dim // 4)
    assert "exists already" in error_of(invoke("train-router", model, "-o", path, *options))
    cache = CacheConfig(policy="sekv", budget=0.2, profile=str(path))
    text = "the lighthouse keeper wrote down the number of every ship that passed " * 6
    with LLM(str(model), backend="torch", tiers=TierConfig(warm="64MiB"), max_context=2048) as llm:
        result = llm.generate(text, SamplingParams(max_tokens=3, ignore_eos=True), cache=cache)[0]
    assert result.kv.bytes < result.kv.full_bytes
    path.write_bytes(b"junk")
    with pytest.raises(ConfigError, match="damaged or not a router"):
        load_router_for(path, probe)


def test_a_router_of_another_model_is_refused(model: Path, probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "router.safetensors"
    options = ("--texts", 1, "--held", 1, "--length", 256, "--steps", 1, "--backend", "torch")
    other = write_tiny_model(tmp_path / "other", template=None, max_context=4096)
    assert invoke("train-router", other, "-o", path, *options).exit_code == 0
    with pytest.raises(ConfigError, match="made with another chat template"):
        load_router_for(path, probe)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"texts": 0}, "texts"),
        ({"length": 9}, "length"),
        ({"rate": 0.0}, "rate"),
        ({"shares": -1.0}, "shares"),
        ({"shares": 0.0, "logits": 0.0}, "one of the two"),
    ],
)
def test_wrong_settings_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(SETTINGS, **changes)


def test_a_probe_counts_and_frees_what_it_zooms_in(probe: Probe) -> None:
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(3, probe.config.vocab_size, (240,), generator=random).tolist()
    shape = probe.config
    policy = make_policy(
        "sekv",
        window=16,
        num_layers=shape.num_layers,
        num_query_heads=shape.num_query_heads,
        num_kv_heads=shape.num_kv_heads,
    )
    seq = probe.open()
    recorder = probe.record(policy.evidence, range(240))
    probe.feed(seq, ids, "none", recorder)
    report = probe.compress(seq, policy, CacheConfig(policy="sekv", budget=100), recorder.result())
    lanes = probe.store.num_lanes
    part = lanes_part(policy, Budget("entries", 100), probe.store, 240)
    assert report.entries == (240 * lanes, int(part * 100 * lanes)) and report.merged
    assert report.bytes[1] == probe.store.bytes_of(seq) == (2 + 2) * lanes * probe.store.pool.page_bytes
    copy = probe.fork(seq)
    before = probe.zoomed.rows
    one, two = probe.feed_many([seq, copy], [ids[:5]] * 2, "all")
    assert torch.equal(one, two) and one.shape == (5, shape.vocab_size)
    assert probe.zoomed.rows > before
    probe.store.check()
    probe.close(seq)
    assert probe.feed_many([copy], [ids[:40]])[0].isfinite().all()
    probe.close(copy)
    assert not probe.store.pool.bytes_in_use and probe._storage.tiers.nbytes == 0


def test_the_shipped_router_is_taken_where_there_is_one(probe: Probe, monkeypatch) -> None:
    assert named_router(None, probe) is None
    with pytest.raises(ConfigError, match="comes with no router for this model; make one with `minikv train"):
        named_router("shipped", probe)
    shipped = Router.plain(2, 4, 16)
    monkeypatch.setattr("minikv.calibration.router_file.find_shipped_router", lambda fingerprint: shipped)
    assert named_router("shipped", probe) is named_router(None, probe) is shipped
    assert named_router("none", probe) is None
