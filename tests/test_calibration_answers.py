"""The second target of a router: a model in plain torch, and its answers with and without zooming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_tools import write_tiny_model
from model_files import hf_config, random_tensors, write_directory
from torch import Tensor

from minikv import CacheConfig
from minikv.cache.spans.router import Router
from minikv.calibration.answers import answers, divergence
from minikv.calibration.frozen import Frozen
from minikv.calibration.measure import Continuation
from minikv.calibration.spans import Lesson, make_lesson
from minikv.errors import ModelError
from minikv.loading import load_model
from minikv.probe import Probe

LENGTH, REST = 200, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_context=1024)


@pytest.fixture(scope="module")
def probe(model: Path) -> Probe:
    return Probe(load_model(str(model), CacheConfig(), 1 << 40, backend="torch", threads=1), max_seqs=2)


@pytest.fixture(scope="module")
def frozen(model: Path) -> Frozen:
    return Frozen.open(model)


@pytest.fixture(scope="module")
def text(probe: Probe) -> Continuation:
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(3, probe.config.vocab_size, (LENGTH + REST,), generator=random).tolist()
    return Continuation(ids[:LENGTH], LENGTH, ids[LENGTH:])


@pytest.fixture(scope="module")
def lesson(probe: Probe, text: Continuation) -> Lesson:
    return replace(make_lesson(probe, text, 0.4), rows=20)


def plain(probe: Probe) -> Router:
    shape = probe.config
    return Router.plain(shape.num_layers, shape.num_query_heads, shape.head_dim)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_frozen_model_says_what_the_engine_says(
    architecture: str, tmp_path: Path, text: Continuation
) -> None:
    raw = hf_config(architecture, max_position_embeddings=1024)
    folder = write_directory(tmp_path / architecture, raw, random_tensors(raw))
    probe = Probe(load_model(str(folder), CacheConfig(), 1 << 40, backend="torch", threads=1), max_seqs=2)
    lesson = make_lesson(probe, text, 0.4)
    seq = probe.open()
    probe.feed(seq, text.prompt, "none")
    expected = probe.feed(seq, text.rest, "all")
    assert expected is not None
    torch.testing.assert_close(answers(Frozen.open(folder), lesson, None), expected, rtol=1e-3, atol=1e-3)


def test_cells_and_what_is_held_make_up_the_past(lesson: Lesson) -> None:
    cells = len(lesson.sizes)
    assert torch.equal(lesson.past.cell.bincount(minlength=cells + 1)[:cells], lesson.sizes)
    assert lesson.past.cell.max() == cells and (lesson.past.cell == cells).any()


def test_with_everything_zoomed_in_answers_are_the_full_caches(
    probe: Probe, frozen: Frozen, lesson: Lesson
) -> None:
    full = answers(frozen, lesson, None)
    all_in = replace(lesson, rows=LENGTH)
    # Rows below the least worth are left out in an engine as well.
    torch.testing.assert_close(answers(frozen, all_in, plain(probe)), full, rtol=1e-2, atol=1e-2)
    assert divergence(full, full) == 0 < divergence(full, answers(frozen, lesson, plain(probe)))


def test_a_row_sees_no_more_than_fits_and_no_later_row(probe: Probe, frozen: Frozen, lesson: Lesson) -> None:
    one = answers(frozen, lesson, plain(probe))
    other = replace(lesson, past=replace(lesson.past, ids=[*lesson.past.ids[:-1], 5]))
    assert torch.equal(answers(frozen, other, plain(probe))[:-1], one[:-1])
    none = replace(lesson, rows=0)
    assert not torch.allclose(answers(frozen, none, plain(probe)), one)


def test_answers_teach_each_layer_what_it_should_have_zoomed_in(
    probe: Probe, frozen: Frozen, lesson: Lesson
) -> None:
    """The router has a gradient in every head of every layer, and forward it is a choice, not a blend."""
    full = answers(frozen, lesson, None)

    def loss(router: Router) -> Tensor:
        return divergence(full, answers(frozen, lesson, router))

    parts = {name: part.clone().requires_grad_() for name, part in vars(plain(probe)).items()}
    with_gradient = loss(Router(**parts))
    assert torch.equal(with_gradient, loss(plain(probe)))
    scale, bias = torch.autograd.grad(with_gradient, list(parts.values()))
    assert scale.isfinite().all() and bias.isfinite().all()
    assert (scale.abs().sum(dim=-1) > 0).all() and (bias != 0).all()


def test_a_model_that_does_not_fit_twice_is_refused_with_a_way_out(model: Path, monkeypatch) -> None:
    monkeypatch.setattr("minikv.calibration.frozen.available_bytes", lambda: 1000)
    with pytest.raises(ModelError, match="--logits 0"):
        Frozen.open(model)
