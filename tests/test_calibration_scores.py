"""Scores of heads and layers on attention made by hand, and against dense float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch

from minikv.cache.policies import LayerView
from minikv.calibration.scores import (
    attention_rows,
    best_heads,
    copy_scores,
    eviction_error,
    overlap,
    retrieval_scores,
    stability,
    without_negatives,
)


def view_of(n: int = 12, rows: int = 3, heads: int = 4, kv_heads: int = 2, width: int = 8) -> LayerView:
    """Random queries of the last `rows` of `n` entries."""
    generator = torch.Generator().manual_seed(n + rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return LayerView(
        layer=0,
        keys=normal(kv_heads, n, width),
        values=normal(kv_heads, n, width),
        log_mass=torch.zeros(kv_heads, n),
        counts=torch.ones(kv_heads, n, dtype=torch.int64),
        positions=torch.arange(n).expand(kv_heads, n),
        valid=torch.ones(kv_heads, n, dtype=torch.bool),
        num_tokens=n,
        group=heads // kv_heads,
        output_weight=normal(10, heads * width),
        queries=normal(heads, rows, width),
        query_heads=torch.arange(heads),
        query_positions=torch.arange(n - rows, n),
    )


def dense_rows(view: LayerView, keep: torch.Tensor) -> torch.Tensor:
    """Attention weights by the definition: one loop, float64."""
    assert view.queries is not None and view.query_positions is not None
    heads, rows, width = view.queries.shape
    weights = torch.zeros(heads, rows, view.keys.shape[1], dtype=torch.float64)
    for head in range(heads):
        lane = head // view.group
        for row in range(rows):
            seen = [j for j in range(int(view.query_positions[row]) + 1) if keep[lane, j]]
            products = view.keys[lane, seen].double() @ view.queries[head, row].double()
            powers = torch.exp(products / math.sqrt(width))
            weights[head, row, seen] = powers / powers.sum()
    return weights


def test_attention_rows_are_causal_and_take_each_heads_own_lane() -> None:
    view = view_of()
    everything = torch.ones(2, 12, dtype=torch.bool)
    torch.testing.assert_close(
        attention_rows(view).double(), dense_rows(view, everything), rtol=1e-5, atol=1e-6
    )
    some = everything.clone()
    some[0, 2:7] = False
    some[1, 5] = False
    torch.testing.assert_close(
        attention_rows(view, some).double(), dense_rows(view, some), rtol=1e-5, atol=1e-6
    )


def test_retrieval_score_is_one_for_the_span_alone_and_zero_for_an_even_spread() -> None:
    positions = torch.tensor([7, 8, 9])
    weights = torch.zeros(4, 3, 10)
    weights[0, :, 4] = 1.0
    for row, position in enumerate(positions):
        weights[1, row, : position + 1] = 1 / (position + 1)
    weights[2, :, 0] = 1.0
    weights[3, :, 3:5] = 0.5
    scores = retrieval_scores(weights, positions, (3, 5))
    assert scores[0] == pytest.approx(1) and scores[3] == pytest.approx(1)
    assert scores[1] == pytest.approx(0, abs=1e-6)
    assert scores[2] == pytest.approx(-sum((2 / n) / (1 - 2 / n) for n in (8, 9, 10)) / 3)


def test_a_longer_span_or_answer_counts_no_more() -> None:
    for length, rows in ((1, 2), (4, 4), (8, 9)):
        weights = torch.zeros(1, rows, 2000)
        weights[0, :, 50] = 0.3
        weights[0, :, 0] = 0.7
        positions = torch.arange(2000 - rows, 2000)
        score = retrieval_scores(weights, positions, (50, 50 + length))
        assert score[0] == pytest.approx(0.3, abs=0.01)


def test_a_token_that_occurs_twice_in_the_answer_counts_once_per_step() -> None:
    ids = torch.tensor([9, 5, 5, 9, 9, 5])
    weights = torch.zeros(3, 2, 6)
    weights[0, 0, 1], weights[0, 1, 2] = 1.0, 1.0  # the right token, in the span, both times
    weights[1, 0, 1], weights[1, 1, 3] = 1.0, 1.0  # once outside the span
    weights[2, :, 5] = 1.0  # the right token, outside the span
    scores = copy_scores(weights, ids, (1, 3), torch.tensor([5, 5]))
    assert scores.tolist() == [1.0, 0.5, 0.0]


def test_a_wrong_token_in_the_span_is_no_copy() -> None:
    weights = torch.zeros(1, 2, 4)
    weights[0, :, 1] = 1.0
    assert copy_scores(weights, torch.tensor([3, 4, 5, 6]), (1, 3), torch.tensor([4, 5])).tolist() == [0.5]


def test_eviction_error_is_the_relative_change_after_the_output_projection() -> None:
    view = view_of(n=20, rows=4)
    keep = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) < 0.4
    keep[:, -4:] = True
    outputs = []
    for kept in (torch.ones_like(keep), keep):
        weights = dense_rows(view, kept)
        heads = [weights[head] @ view.values[head // view.group].double() for head in range(4)]
        outputs.append(torch.cat(heads, dim=1) @ view.output_weight.double().T)
    full, compressed = outputs
    expected = ((compressed - full).norm(dim=1) / full.norm(dim=1)).mean()
    assert eviction_error(view, keep) == pytest.approx(float(expected), rel=1e-5)


def test_keeping_everything_costs_nothing() -> None:
    view = view_of()
    assert eviction_error(view, torch.ones(2, 12, dtype=torch.bool)) == 0


def test_stability_is_certain_for_clear_heads_and_split_between_equal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    trials = torch.rand(60, 2, 5, generator=generator) * 0.1
    trials[:, 0, 3] += 0.5  # a clear winner of layer 0; the others are alike
    share = stability(trials, top=2, resamples=200, seed=1)
    assert share[0, 3] == 1
    assert share.sum(dim=1).tolist() == pytest.approx([2, 2])
    assert 0 < share[0, [0, 1, 2, 4]].max() < 1
    assert torch.equal(share, stability(trials, top=2, resamples=200, seed=1))


def test_best_heads_are_ranked_and_ties_go_to_the_lower() -> None:
    scores = torch.tensor([[0.1, 0.5, 0.5, 0.2], [0.0, 0.0, 0.0, 0.0]])
    assert best_heads(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert overlap(scores, scores.flip(1), 2) == 2  # a layer where no head copies has no copy heads


def test_shifted_scores_keep_their_order() -> None:
    scores = torch.tensor([[-0.02, 0.3, -0.01]])
    assert without_negatives(scores).tolist() == [pytest.approx([0.0, 0.32, 0.01])]
    assert torch.equal(without_negatives(scores.abs()), scores.abs())
