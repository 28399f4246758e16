"""Sampling: checked against plain numpy, with fixed seeds, and free of batch mates."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.errors import ConfigError, RequestError
from minikv.sampling import LOGPROB_FLOOR, Sampler, SamplingParams, nucleus, sample_batch, top_ids

VOCAB = 50
logit_rows = st.lists(
    # few distinct values, so that ties are common
    st.one_of(st.integers(-4, 4).map(float), st.floats(-8, 8, width=32)),
    min_size=1,
    max_size=40,
)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def reference_distribution(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that sampling draws from, written out naively."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    probs = np.zeros(len(row))
    probs[ranked] = softmax(row[ranked] / params.temperature)
    kept, total = [], 0.0
    for i in ranked:
        if kept and total >= params.top_p and params.top_p < 1:
            break
        kept.append(i)
        total += probs[i]
    final = np.zeros(len(row))
    for i in kept:
        if probs[i] >= params.min_p * probs.max():
            final[i] = probs[i]
    return final / final.sum()


def frequencies(row: list[float], draws: int = 4000, **options) -> np.ndarray:
    sampler = Sampler(SamplingParams(seed=7, **({"temperature": 1.0} | options)), [], len(row))
    logits = torch.tensor(row)
    ids = [sampler.sample(logits).token_id for _ in range(draws)]
    return np.bincount(ids, minlength=len(row)) / draws


def draw_once(logits: torch.Tensor, **options) -> int:
    return Sampler(SamplingParams(**options), [], len(logits)).sample(logits).token_id


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.15},
    ],
)
def test_draws_follow_the_reference_distribution(options):
    row = [2.0, 1.5, 1.5, 0.3, -1.0, 2.2, 0.3, -5.0]
    params = SamplingParams(**({"temperature": 1.0} | options))
    expected = reference_distribution(np.array(row), params)
    observed = frequencies(row, **options)
    assert not observed[expected == 0].any()
    # 4 standard deviations of a count of 4000 draws, and 4 draws for rare tokens with their long tails
    assert (np.abs(observed - expected) <= 4 * np.sqrt(expected * (1 - expected) / 4000) + 4 / 4000).all()


@given(row=logit_rows, top_k=st.integers(1, 45))
@settings(max_examples=200, deadline=None)
def test_top_ids_are_the_largest_with_ties_to_the_lower_id(row, top_k):
    values = np.array(row, dtype=np.float32)
    count = min(top_k, len(row))
    expected = sorted(range(len(row)), key=lambda i: (-values[i], i))[:count]
    assert top_ids(torch.from_numpy(values), count).tolist() == expected


@given(row=logit_rows, top_p=st.floats(0.001, 1.0))
@settings(max_examples=400, deadline=None)
def test_the_nucleus_is_the_smallest_that_reaches_top_p(row, top_p):
    probs = torch.softmax(torch.tensor(row, dtype=torch.float32), dim=0)
    kept = nucleus(probs.numpy(), top_p).tolist()
    plain = probs.numpy().astype(np.float64)
    ranked = sorted(range(len(row)), key=lambda i: (-plain[i], i))
    assert kept == sorted(ranked[: len(kept)])
    assert kept
    # Sums in another order differ in the last digits.
    assert len(kept) == len(row) or plain[kept].sum() >= top_p - 1e-9
    assert len(kept) == 1 or plain[ranked[: len(kept) - 1]].sum() < top_p + 1e-9


def test_the_nucleus_is_right_on_a_large_vocabulary():
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0, 6.0, 30.0):
        probs = torch.softmax(torch.randn(60_000, generator=generator) * scale, dim=0)
        ranked = torch.sort(probs, descending=True, stable=True)
        for top_p in (1e-6, 0.3, 0.95, 0.9999):
            needed = int((ranked.values.double().cumsum(0) < top_p - 1e-12).sum()) + 1
            assert nucleus(probs.numpy(), top_p).tolist() == ranked.indices[:needed].sort().values.tolist()


def test_top_p_keeps_one_token_and_one_turns_it_off():
    row = [0.0, 3.0, 1.0]
    assert frequencies(row, 200, top_p=1e-9)[1] == 1
    assert (frequencies(row, 500, top_p=1.0) > 0).all()
    assert frequencies([0.0, 0.0, 0.0, 0.0], 400, top_p=0.5)[2:].sum() == 0


def test_a_top_p_that_rounding_keeps_out_of_reach_keeps_all():
    probs = torch.full((7,), 1 / 7) * 0.9999
    assert nucleus(probs.numpy(), 0.99999).tolist() == list(range(7))


def test_top_k_of_one_is_greedy_even_among_ties():
    assert frequencies([1.0, 2.0, 2.0], 100, top_k=1)[1] == 1


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert (frequencies([0.0, 0.5, 0.2], 500, top_k=1000) > 0).all()


def test_min_p_of_one_keeps_only_the_likeliest():
    assert frequencies([1.0, 2.0, 1.9], 100, min_p=1.0)[1] == 1


def test_a_tiny_temperature_takes_the_likeliest_without_overflow():
    assert frequencies([1.0, 50.0, -50.0, -math.inf], 50, temperature=1e-5)[1] == 1
    assert draw_once(torch.tensor([1.0, 2.0]), temperature=1e-300) == 1


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(150_001)
    logits[[777, 40_000, 150_000]] = 1.0
    assert draw_once(logits) == 777
    assert sample_batch(logits[None], [Sampler(SamplingParams(), [], 150_001)])[0].token_id == 777


def test_tokens_at_minus_infinity_are_never_drawn():
    observed = frequencies([-math.inf, 0.0, -math.inf, 0.0], 300)
    assert observed[[0, 2]].sum() == 0


def test_repetition_penalty_covers_prompt_and_output_once_each():
    logits = torch.tensor([3.0, 2.9, -1.0, -1.1])
    params = SamplingParams(repetition_penalty=2.0)
    sampler = Sampler(params, [0, 0, 2], 4)
    # 3.0 / 2 = 1.5 and -1.0 * 2 = -2.0, however often they occur
    assert sampler.sample(logits).token_id == 1
    # now also 2.9 / 2 = 1.45: token 0 leads again
    assert sampler.sample(logits).token_id == 0
    assert logits.tolist() == pytest.approx([3.0, 2.9, -1.0, -1.1])
    assert Sampler(params, [], 4).sample(logits).token_id == 0


def test_presence_and_frequency_penalties_cover_the_output_only():
    logits = torch.tensor([1.0, 0.4, 0.0])
    presence = Sampler(SamplingParams(presence_penalty=0.8), [0, 1, 2], 3)
    assert [presence.sample(logits).token_id for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler(SamplingParams(frequency_penalty=0.35), [0, 1, 2], 3)
    assert [frequency.sample(logits).token_id for _ in range(4)] == [0, 0, 1, 0]


def test_an_observed_token_counts_like_a_sampled_one():
    sampler = Sampler(SamplingParams(presence_penalty=2.0), [], 2)
    sampler.observe(0)
    assert sampler.sample(torch.tensor([1.0, 0.0])).token_id == 1


def test_logit_bias_is_added_and_can_ban():
    logits = torch.tensor([1.0, 0.5, 0.0])
    assert draw_once(logits, logit_bias={0: -100.0, 2: 0.6}) == 2
    assert logits.tolist() == [1.0, 0.5, 0.0]


def test_logit_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="token id 50, but the vocabulary ends at 49"):
        Sampler(SamplingParams(logit_bias={50: 1.0}), [], 50)


def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0])
    params = SamplingParams(
        logprobs=3, logit_bias={0: 100.0}, temperature=0.7, top_k=1, repetition_penalty=1.5
    )
    got = Sampler(params, [1], 4).sample(logits).logprob
    expected = np.log(softmax(logits.numpy()))
    assert got.token_id == 0
    assert got.logprob == pytest.approx(expected[0], abs=1e-5)
    assert [token_id for token_id, _ in got.top] == [1, 2, 0]
    assert [value for _, value in got.top] == pytest.approx(expected[[1, 2, 0]], abs=1e-5)


def test_logprobs_of_zero_give_the_chosen_token_only_and_none_gives_nothing():
    logits = torch.tensor([0.0, 1.0])
    assert Sampler(SamplingParams(logprobs=0), [], 2).sample(logits).logprob.top == ()
    assert Sampler(SamplingParams(), [], 2).sample(logits).logprob is None
    assert len(Sampler(SamplingParams(logprobs=9), [], 2).sample(logits).logprob.top) == 2


def test_logprobs_of_minus_infinity_are_finite():
    got = Sampler(SamplingParams(logprobs=2), [], 2).sample(torch.tensor([0.0, -math.inf])).logprob
    assert got.top == ((0, 0.0), (1, LOGPROB_FLOOR))


def test_a_seed_repeats_and_completions_of_one_request_differ():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))

    def run(seed: int | None, index: int = 0) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [], VOCAB, index)
        return [sampler.sample(logits).token_id for _ in range(20)]

    assert run(3) == run(3)
    assert run(3, index=1) == run(4) != run(3)
    assert run(None) != run(None)


def mixed_samplers() -> list[Sampler]:
    options = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {},
        {"temperature": 1.2, "top_k": 5, "frequency_penalty": 0.5},
    ]
    return [Sampler(SamplingParams(seed=9, **option), [1, 2], VOCAB) for option in options]


def test_a_batch_gives_what_each_row_gives_alone_in_any_order():
    generator = torch.Generator().manual_seed(5)
    steps = [torch.randn(7, VOCAB, generator=generator) for _ in range(6)]
    alone, together, shuffled = mixed_samplers(), mixed_samplers(), mixed_samplers()
    order = [4, 0, 6, 2, 5, 1, 3]
    for logits in steps:
        expected = [sampler.sample(row) for sampler, row in zip(alone, logits, strict=True)]
        assert sample_batch(logits, together) == expected
        got = sample_batch(logits[order], [shuffled[i] for i in order])
        assert got == [expected[i] for i in order]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_a_request_error(bad):
    logits = torch.zeros(VOCAB)
    logits[30] = bad
    for options in ({}, {"temperature": 1.0}, {"logprobs": 1}):
        with pytest.raises(RequestError, match="not finite"):
            draw_once(logits, **options)
    with pytest.raises(RequestError, match="not finite"):
        draw_once(torch.full((VOCAB,), -math.inf))


def test_a_row_of_nan_fails_alone():
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(5))
    expected = sample_batch(logits, mixed_samplers())
    logits[0] = logits[2] = math.nan
    got = sample_batch(logits, mixed_samplers())
    assert [i for i, sample in enumerate(got) if isinstance(sample, RequestError)] == [0, 2]
    assert all(got[i] == expected[i] for i in (1, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, True, "1", None, 101)],
        *[("top_k", value) for value in (-1, 1.5, True, "3", None)],
        *[("top_p", value) for value in (0, 1.1, math.nan, "x", False)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("repetition_penalty", value) for value in (0, -1, math.inf, None)],
        *[("presence_penalty", value) for value in (2.1, -2.1, math.nan)],
        *[("frequency_penalty", value) for value in (2.1, -2.1, "0")],
        *[
            ("logit_bias", value)
            for value in ([1], {"5": 1.0}, {-1: 1.0}, {1: math.nan}, {1: "x"}, {True: 1.0})
        ],
        *[("seed", value) for value in (-1, 1.0, "1", 2**63, True)],
        *[("logprobs", value) for value in (-1, True, 1.0)],
        *[("n", value) for value in (0, None, 1.0, True)],
        *[("max_tokens", value) for value in (0, -5, 1.5, True, "9")],
        *[("stop", value) for value in ("", [""], ["a", ""], [1], 5, None)],
        *[("stop_token_ids", value) for value in ([-1], ["1"], 5, "12", [1.0])],
        *[("ignore_eos", value) for value in (1, "yes", None)],
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stops_are_kept_as_a_tuple_and_a_frozen_object_stays_so():
    stops, bias = ["a", "b"], {1: 2.0}
    params = SamplingParams(stop=stops, logit_bias=bias, stop_token_ids=[3])
    stops.append("c")
    bias[2] = 1.0
    assert params.stop == params.stop_strings == ("a", "b")
    assert params.logit_bias == {1: 2.0}
    assert params.stop_token_ids == (3,)
    assert SamplingParams(stop="x").stop_strings == ("x",)
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(beam_width=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options", [{"max_tokens": None}, {"seed": 0}, {"logprobs": 0}, {"top_p": 1}, {"min_p": 0}]
)
def test_values_at_the_edges_are_accepted(options):
    SamplingParams(**options)


@pytest.mark.parametrize(
    "values", [{"seed": 10**5000}, {"n": -(10**5000)}, {"temperature": 10**5000}, {"n": 129}]
)
def test_absurd_numbers_are_refused_in_one_sentence(values):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**values)
    assert len(str(caught.value)) < 200
