"""Policies that score do so where the keys are: on a device that is only pretended, they mix nothing."""

from __future__ import annotations

import pytest
import torch
from pretended_device import DEVICE, Distant, pretended_device
from test_policies import SCORING_NAMES, policy_of, view_of

from minikv.cache.policies.compresskv import CompressKV
from minikv.kernels.backend import CPU


def scored(policy, view, monkeypatch):
    """Scores of a view on the device, brought to the host."""
    with pretended_device(monkeypatch, {}):
        there = view.on(DEVICE)
        tensors = [t for t in vars(there).values() if isinstance(t, torch.Tensor)]
        assert len(tensors) >= 6 and all(isinstance(t, Distant) for t in tensors)
        scores = policy.score(there)
        assert isinstance(scores, Distant)
        return scores.to(CPU)


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("name", SCORING_NAMES)
def test_scores_on_a_device_are_those_of_the_host(name, profiled, monkeypatch):
    policy = policy_of(name, 2, 3, profiled=profiled)
    for layer, lengths in enumerate(([30, 17], [9, 24])):
        view = view_of(policy, 2, 3, lengths, 40, layer)
        assert torch.equal(scored(policy, view, monkeypatch), policy.score(view))


@pytest.mark.parametrize("sharing", ["layer", "own", "weighted"])
def test_every_way_to_share_retrieval_heads_stays_there(sharing, monkeypatch):
    profile = policy_of("compresskv", 2, 3).profile
    policy = CompressKV(4, profile, sharing=sharing)
    view = view_of(policy, 2, 3, [30, 17], 40, 1)
    assert torch.equal(scored(policy, view, monkeypatch), policy.score(view))


def test_a_view_that_is_there_already_is_left_alone():
    policy = policy_of("snapkv", 2, 3)
    view = view_of(policy, 2, 3, [5, 9], 12)
    assert view.on(CPU) is view
