"""Classes of responses, and the float64 that everything exact is computed in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.theory.exact_runs import REJECTING
from theory.bounds import gradient, steps
from theory.exact.estimator import estimate
from theory.exact.groups import Group, classes
from theory.exact.levels import REWARDS, disturbed, expected_length, logit_noise
from theory.exact.policies import TabularPolicy
from theory.exact.problem import Problem, true_gradient
from theory.exact.tree import PrefixTree
from theory.objectives import correction, preset
from theory.streams import stream


def test_the_default_dtype_is_no_input() -> None:
    """Rewards and moments are float64 computations also where torch's default is float32: the same bits."""

    def everything() -> list[torch.Tensor]:
        tree = PrefixTree(3, 4)
        rewards = [shape(tree, stream(0, "rewards")) for shape in REWARDS.values()]
        draws = [torch.randn(n, 3, generator=stream(0, "policy"), dtype=torch.float64) for n in tree.sizes]
        policy = TabularPolicy(tree, tuple(draws))
        mu = disturbed(policy.logp(), logit_noise(tree, stream(0, "noise")), 0.1)
        problem = Problem(policy, mu, mu, rewards[0])
        found = [estimate(problem, preset(name), Group(4)) for name in ("minirl", "grpo_dapo")]
        return [*rewards, true_gradient(problem), *(e.mean for e in found)]

    wide = everything()
    torch.set_default_dtype(torch.float32)  # the fixture of tests/theory puts it back
    for x, y in zip(everything(), wide, strict=True):
        assert x.dtype == torch.float64
        assert torch.equal(x, y)


def test_classes_are_no_more_than_needed() -> None:
    """Lengths tell classes apart only where a denominator counts tokens; rejected responses are one length."""
    probability, reward = torch.full((4,), 0.25), torch.tensor([1.0, 1.0, 0.0, 0.0])
    kept, length = torch.tensor([True, True, True, False]), torch.tensor([1, 2, 3, 3])
    by_response = classes(probability, reward, kept, length, False)
    assert by_response.probability_C.tolist() == [0.25, 0.25, 0.5]
    assert classes(probability, reward, kept, length, True).num_tokens_C.tolist() == [0, 3, 1, 2]


def ragged(name: str) -> Problem:
    """A policy whose responses have up to four tokens, a noisy mu that is old as well, and a dense reward."""
    tree = PrefixTree(3, 4, has_end=True)
    policy = TabularPolicy.random(tree, stream(0, name, "policy"))
    mu = disturbed(policy.logp(), logit_noise(tree, stream(0, name, "noise")), 0.3)
    return Problem(policy, mu, mu, REWARDS["dense"](tree, stream(0, name, "reward")))


@pytest.mark.parametrize("objective", ["minirl", "grpo_dapo", "rejecting"])
def test_the_size_of_a_chunk_is_no_input(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses are worked on in pieces: seven at a time or all at once, gradients, moments and bounds are one."""
    problem = ragged("chunks")
    # Were old mu, nothing would be rejected.
    problem = replace(problem, logp_old=problem.target.logp())
    chosen = REJECTING["grpo_dapo, seq_mis"] if objective == "rejecting" else preset(objective)

    def everything() -> list[torch.Tensor]:
        found = [estimate(problem, chosen, group) for group in (Group(3), Group(None), Group(None, "none"))]
        chunked = (steps.step_cauchy_schwarz, gradient.gap_cauchy_schwarz, gradient.gap_fisher, gradient.gap_centred)
        # Bounds know no objective: once is enough.
        bounds = [bound(problem) for bound in chunked] if objective == "minirl" else []
        return [
            true_gradient(problem),
            *(x for e in found for x in (e.mean, torch.tensor(e.variance))),
            *(x for b in bounds for x in (b.lhs, b.rhs)),
        ]

    whole = everything()
    monkeypatch.setattr(PrefixTree.chunks, "__defaults__", (7,))
    for x, y in zip(everything(), whole, strict=True):
        # Sums of a few dozen float64 terms in another order.
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_an_infinite_group_divides_by_expectations() -> None:
    """A token mean divides by the mean length, and a rejection by the probability to be kept: both under mu."""
    problem = ragged("infinite")
    policy, mu, tree = problem.target, problem.logp_mu, problem.target.tree

    def mean(**changes: object) -> torch.Tensor:
        return estimate(problem, preset("reinforce", **changes), Group(None, "none")).mean

    mean_length = expected_length(tree, mu)
    assert mean_length > 1.5
    # A division of sums of some dozens of float64 terms.
    torch.testing.assert_close(mean(aggregation="token_mean") * mean_length, mean(), rtol=1e-12, atol=1e-15)
    # mu is old here: nothing is rejected, and with bounds that leave 1 out everything is, and no gradient is left.
    torch.testing.assert_close(mean(correction=correction("geo_rs", lo=0.9, hi=1.1)), mean(), rtol=1e-12, atol=1e-15)
    half = Problem(policy, mu, policy.logp(), problem.reward_Y)
    kept = estimate(half, preset("reinforce", correction=correction("geo_rs", lo=0.0, hi=1.0)), Group(None, "none"))
    log_mu_Y, log_old_Y = tree.log_probabilities(mu), tree.log_probabilities(policy.logp())
    is_kept_Y = log_old_Y <= log_mu_Y
    probability = float(log_mu_Y.exp()[is_kept_Y].sum())
    assert 0.1 < probability < 0.9
    rewards = torch.where(is_kept_Y, problem.reward_Y, 0.0)
    of_kept = estimate(replace(half, reward_Y=rewards), preset("reinforce"), Group(None, "none")).mean
    torch.testing.assert_close(kept.mean * probability, of_kept, rtol=1e-12, atol=1e-15)
