"""Laws of one expected update: it is the audit's mean, the sum of its responses, and its drift what centring takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.theory.exact_runs import NORMALISED, REJECTING, SETTLED, groups_of, make_task
from theory.exact.batch import Batch
from theory.exact.engines import engine
from theory.exact.estimator import estimate
from theory.exact.expected import Update
from theory.exact.forest import Forest
from theory.exact.groups import Group
from theory.exact.levels import Edges
from theory.exact.policies import TabularPolicy
from theory.exact.problem import Problem
from theory.exact.rates import reinforce
from theory.objectives import AGGREGATIONS, PRESETS, Objective, preset
from theory.streams import stream

WEIGHTS = ["none", "token_is", "prefix_tis", "seq_tis"]


GROUPS = [Group(None, "mean"), Group(None, "none"), Group(3)]


OBJECTIVES: dict[str, Objective] = {
    **PRESETS,
    **SETTLED,
    **REJECTING,
    **NORMALISED,
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_update_is_the_audit_s(name: str) -> None:
    """On one prompt, at three distinct pi, old and mu, it is the mean that the audit gives, to rounding."""
    for kind, group in zip(("network", "tabular", "network"), groups_of(OBJECTIVES[name], GROUPS), strict=False):
        task, policy = make_task(kind, prompts=1, openings=1)
        generator = stream(0, "update", kind)
        old = policy.moved(0.3 * torch.randn(policy.parameters.shape, generator=generator, dtype=torch.float64))
        mu = engine("fixed", 0.5, old, generator).samplers(old)[0]
        update = Update.at(Batch(task.forest, mu, old.logp(), task.reward_Y, OBJECTIVES[name], group), policy)
        audited = estimate(Problem(policy, mu, old.logp(), task.reward_Y), OBJECTIVES[name], group)
        assert torch.allclose(update.gradient, audited.mean, atol=1e-13)


@pytest.mark.parametrize("group", GROUPS, ids=["mean", "none", "three"])
@pytest.mark.parametrize("name", ["reinforce", "grpo"])
def test_prompts_are_averaged_and_openings_compared(name: str, group: Group) -> None:
    """Two prompts give the mean of what the audit gives for each, whose openings share a baseline.

    Neither objective has a weight on mu: with one the mean would not depend on the baseline.
    """
    objective = preset(name)
    task, policy = make_task("tabular")
    assert isinstance(policy, TabularPolicy)
    logp, forest = policy.logp(), task.forest
    mu = engine("fixed", 0.5, policy, stream(0, "prompts")).samplers(policy)[0]
    update = Update.at(Batch(forest, mu, logp, task.reward_Y, objective, group), policy)
    one = Forest.uniform(forest.tree, 1, 2)

    def half(edges: Edges, prompt: int) -> list[Tensor]:
        return [x.chunk(2)[prompt] for x in edges]

    for prompt in range(2):
        own = TabularPolicy(one, tuple(half(list(policy.logits), prompt)))
        reward_Y = task.reward_Y.chunk(2)[prompt]
        audited = estimate(Problem(own, half(mu, prompt), own.logp(), reward_Y), objective, group)
        parts = update.gradient.split([x.numel() for x in policy.logits])
        mine = torch.cat([part.chunk(2)[prompt] for part in parts])
        assert torch.allclose(mine, audited.mean / 2, atol=1e-14)


@pytest.mark.parametrize("name", ["reinforce", "grpo", "minirl"])
def test_an_update_is_the_sum_of_its_responses(name: str) -> None:
    """Where every response has one sign of advantage, the whole is what its even and its odd responses add up to."""
    task, policy = make_task("network")
    mu = engine("fixed", 0.5, policy, stream(0, "sum")).samplers(policy)[0]
    batch = Batch(task.forest, mu, policy.logp(), task.reward_Y, preset(name), Group(None, "mean"))
    update = Update.at(batch, policy.moved(0.1 * torch.ones_like(policy.parameters)))
    shares_sY1 = update.batch.shares_sY[:, :, None]
    assert ((shares_sY1 > 0).sum(0) == 1).all() and (shares_sY1.sum(1) > 0).all()
    odd_Y1 = (torch.arange(shares_sY1.shape[1]) % 2 == 1)[:, None]
    halves = [update.combined(torch.where(half_Y1, shares_sY1, 0.0)) for half_Y1 in (odd_Y1, ~odd_Y1)]
    assert torch.equal(update.combined(shares_sY1), halves[0] + halves[1])


def test_the_drift_is_what_centring_takes_off() -> None:
    """Without a weight, gradient less drift is E_mu[A sum_t (g_t - E_mu[g_t | y_<t])], summed a response at a time."""
    task, policy = make_task(prompts=1, openings=2)
    forest, logp = task.forest, policy.logp()
    mu = engine("fixed", 0.5, policy, stream(0, "drift")).samplers(policy)[0]
    update = Update.at(Batch(forest, mu, logp, task.reward_Y, reinforce("none"), Group(None)), policy)
    scores = []  # of every edge, a depth at a time: one-hot cotangents
    for t, n in enumerate(forest.sizes):
        for node in range(n):
            for token in range(forest.num_tokens):
                edges = forest.zero_edges()
                edges[t][node, token] = 1.0
                scores.append(policy.pullback(edges))
    score_EQ = torch.stack(scores)
    flat_mu_E = torch.cat([x.reshape(-1) for x in mu]).exp()
    mean_NQ = (flat_mu_E[:, None] * score_EQ).view(-1, forest.num_tokens, score_EQ.shape[1]).sum(1)
    probability_Y = forest.log_probabilities(mu).exp()
    A_Y = task.reward_Y - (probability_Y * task.reward_Y).sum()
    centred = torch.zeros_like(update.gradient)
    for y in range(forest.num_responses):
        for t in range(int(forest.lengths[y])):
            g = score_EQ[forest.edge_BT[y, t]] - mean_NQ[forest.node_BT[y, t]]
            centred += probability_Y[y] * A_Y[y] * g
    assert float(update.drift.norm()) > 1e-2
    assert torch.allclose(update.gradient - update.drift, centred, atol=1e-14)


@pytest.mark.parametrize("aggregation", ["token_sum", "length_norm"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_only_an_unweighted_update_drifts(weight: str, aggregation: str) -> None:
    """E_mu[w_t g_t | y_<t] = 0 for the token, prefix and sequence weight (theory/exact/decomposition.py, fact 1).

    Under length_norm a prefix's mean is that of the advantage over the length.
    """
    task, policy = make_task()
    mu = engine("fixed", 0.5, policy, stream(0, "drift")).samplers(policy)[0]
    objective = replace(reinforce(weight), aggregation=AGGREGATIONS[aggregation])
    batch = Batch(task.forest, mu, policy.logp(), task.reward_Y, objective, Group(None))
    drift = Update.at(batch, policy).drift
    assert (float(drift.norm()) > 1e-3) == (weight == "none")
    assert weight == "none" or float(drift.norm()) < 1e-15


def test_tokens_that_are_never_sampled_count_for_nothing() -> None:
    """Under top-p the update is the limit of one where the cut tokens have a probability that goes to 0."""
    task, policy = make_task()
    cut = engine("top_p", 0.3, policy, stream(0, "x")).samplers(policy)[0]
    assert any((x == -math.inf).any() for x in cut)
    nearly = [x.clamp(min=-40.0).log_softmax(1) for x in cut]
    for weight in WEIGHTS:
        a, b = (
            Update.at(Batch(task.forest, mu, policy.logp(), task.reward_Y, reinforce(weight), Group(None)), policy)
            for mu in (cut, nearly)
        )
        if weight == "none":
            assert torch.allclose(a.gradient, b.gradient, atol=1e-12) and torch.allclose(a.drift, b.drift, atol=1e-12)
        assert a.gradient.isfinite().all() and a.drift.isfinite().all()
