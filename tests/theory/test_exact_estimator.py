"""Exact moments against the same sums written out: every group of responses, one by one, through autograd."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.theory.exact_runs import REJECTING
from tests.theory.exact_world import World, log_probabilities, make_world
from theory import advantages
from theory.exact.estimator import Estimate, estimate
from theory.exact.expected import expected_update
from theory.exact.groups import Group
from theory.exact.policies import JacobianPolicy
from theory.exact.problem import Problem, true_gradient, value
from theory.exact.rates import reinforce
from theory.objectives import PRESETS, Objective, correction, preset
from theory.streams import stream

KINDS = ["bigram", "counts", "tabular"]
OBJECTIVES: dict[str, Objective] = {
    **PRESETS,
    **REJECTING,
    "grpo, k3_rs": preset("grpo", correction=correction("k3_rs", max_k3=0.02)),
    "ppo, icepop": preset("ppo", correction=correction("icepop", lo=0.8, hi=1.25)),
    "m2po": preset("grpo_dapo", m2_budget=2e-2, eps_low=0.0, eps_high=0.0),
    "cispo, leave_one_out": preset("cispo", advantage="leave_one_out"),
}


def jacobian(world: World) -> Tensor:
    """d log pi / d parameters of every token of every response, (Y, T, Q), by autograd."""
    policy = world.problem.target
    return torch.autograd.functional.jacobian(
        lambda flat: log_probabilities(policy, flat, world.paths), policy.parameters
    )


def brute_force(world: World, objective: Objective, G: int) -> tuple[Tensor, float]:
    """Mean and G x variance of the gradient of one group, over all Y^G groups."""
    paths, tree, J_YTQ = world.paths, world.tree, jacobian(world)
    pi, old, mu = (
        tree.gather(logp, paths)
        for logp in (world.problem.target.logp(), world.problem.logp_old, world.problem.logp_mu)
    )
    probability_Y = mu.sum(1).exp()
    if objective.m2_budget:  # of a mini-batch that holds all groups in proportion to their probabilities
        rows_MG = torch.cartesian_prod(*[torch.arange(tree.num_responses)] * G)
        A_B1 = advantages.ADVANTAGES[objective.advantage](world.problem.reward_Y[rows_MG]).view(-1, 1)
        p_B1, rows = probability_Y[rows_MG].prod(1).repeat_interleave(G)[:, None], rows_MG.view(-1)
        mask = paths.is_response_BT[rows]
        objective = objective.within_budget(pi[rows], old[rows], mu[rows], A_B1, mask, p_B1)
    mean, second = torch.zeros(J_YTQ.shape[2]), torch.zeros(())
    groups = itertools.product(range(tree.num_responses), repeat=G)
    # One order for all of a group's: no objective knows the order (test_objective_masks.py).
    times = Counter(tuple(sorted(group)) for group in groups)
    for group, number in times.items():
        rows = torch.tensor(group)
        leaf = pi[rows].clone().requires_grad_()
        A = advantages.ADVANTAGES[objective.advantage](world.problem.reward_Y[rows][None])[0]
        out = objective(leaf, old[rows], mu[rows], A, paths.is_response_BT[rows], has_metrics=False).objective
        gradient = torch.einsum("bt,btq->q", torch.autograd.grad(out, leaf)[0], J_YTQ[rows])
        probability = number * probability_Y[rows].prod()
        mean, second = mean + probability * gradient, second + probability * gradient.square().sum()
    return mean, G * float(second - mean.square().sum())


def require_moments_of_all_groups(world: World, name: str, G: int) -> None:
    exact = estimate(world.problem, OBJECTIVES[name], Group(G))
    mean, variance = brute_force(world, OBJECTIVES[name], G)
    assert exact.num_draws is None
    assert torch.allclose(exact.mean, mean, atol=1e-12)
    assert exact.variance == pytest.approx(variance, abs=1e-12)


def of_one_kind(name: str) -> tuple[str, str]:
    """The two ways in which moments depend on the size of a group: by the advantage and by the denominator."""
    return OBJECTIVES[name].advantage, OBJECTIVES[name].aggregation.name


@pytest.mark.parametrize(("name", "G"), [(n, 3 - i % 2) for i, n in enumerate(sorted(OBJECTIVES, key=of_one_kind))])
def test_moments_are_those_of_all_groups(name: str, G: int) -> None:
    """Mean and variance agree with the sum over all Y^G groups, to rounding (1e-12 of values near 0.1).

    Each objective in groups of one size, each denominator in groups of both.
    """
    require_moments_of_all_groups(make_world(V=3, T=2), name, G)


def test_a_budget_counts_how_often_each_sign_occurs() -> None:
    """M2PO's bounds in groups of 3 are those of all groups together: here the chance of a sign, and not the size of
    its advantages, decides whether a token is clipped."""
    require_moments_of_all_groups(make_world(V=3, T=2, seed=4), "m2po", 3)


@pytest.mark.parametrize(("kind", "name"), list(zip(KINDS, ["minirl", "grpo", "grpo_dapo, seq_mis"], strict=True)))
def test_moments_of_every_kind_of_policy(kind: str, name: str) -> None:
    """The same for shared and for free parameters, over ragged responses of up to 3 tokens."""
    require_moments_of_all_groups(make_world(kind, V=3, T=3, seed=1), name, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_end", [False, True])
def test_true_gradient_is_that_of_the_value(kind: str, has_end: bool) -> None:
    """grad J_seq (MiniRL Eq. 2) is autograd of J_seq = E_pi[R] (Eq. 1)."""
    world = make_world(kind, V=3, T=3, has_end=has_end)
    policy, reward_Y = world.problem.target, world.problem.reward_Y
    flat = policy.parameters.clone().requires_grad_()
    J = (log_probabilities(policy, flat, world.paths).sum(1).exp() * reward_Y).sum()
    assert value(world.problem) == pytest.approx(J.item(), abs=1e-13)
    assert torch.allclose(true_gradient(world.problem), torch.autograd.grad(J, flat)[0], atol=1e-13)


def test_a_jacobian_is_as_good_as_a_formula() -> None:
    """A policy given by its values and its Jacobian has the moments of the policy itself."""
    world = make_world("counts")
    policy, tree, paths = world.problem.target, world.tree, world.paths
    J_YTQ = jacobian(world)
    per_edge = [torch.zeros(n, tree.num_tokens, J_YTQ.shape[2]) for n in tree.sizes]
    for t in range(tree.max_length):
        on = paths.is_response_BT[:, t]
        per_edge[t][paths.nodes_BT[on, t], paths.tokens_BT[on, t]] = J_YTQ[on, t]
    given = JacobianPolicy(tree, tuple(policy.logp()), tuple(per_edge))
    problem = Problem(given, world.problem.logp_mu, world.problem.logp_old, world.problem.reward_Y)
    left = estimate(problem, preset("minirl"), Group(4))
    right = estimate(world.problem, preset("minirl"), Group(4))
    assert torch.allclose(left.mean, right.mean, atol=1e-13)
    assert torch.allclose(left.truth, right.truth, atol=1e-13)
    assert left.variance == pytest.approx(right.variance, abs=1e-12)


def test_the_sequence_weight_is_unbiased() -> None:
    """With the whole weight W = pi(y)/mu(y) and no cut the estimator's mean is grad J_seq (MiniRL Eq. 2)."""
    for kind in KINDS:
        world = make_world(kind, V=3, T=4)
        for group in (Group(None, "none"), Group(None, "mean")):
            assert estimate(world.problem, reinforce("seq_tis"), group).bias < 1e-12


def test_a_group_s_own_mean_shrinks_by_its_own_share() -> None:
    """On-policy, group_mean gives (G - 1)/G of the true gradient, and leave_one_out all of it."""
    world = make_world(distance=0.0)
    for G in (2, 5):
        shrunk = estimate(world.problem, preset("reinforce"), Group(G))
        assert torch.allclose(shrunk.mean, (G - 1) / G * shrunk.truth, atol=1e-13)
        assert shrunk.scale == pytest.approx((G - 1) / G, abs=1e-12)
        assert shrunk.direction_bias < 1e-6  # the root of 1 - cosine^2, itself exact to 1e-15
        whole = estimate(world.problem, preset("reinforce", advantage="leave_one_out"), Group(G))
        assert whole.bias < 1e-12


@pytest.mark.parametrize("G", [None, 4])
def test_a_response_that_mu_never_samples_adds_nothing(G: int | None) -> None:
    """Where mu cuts the tail off, weights on pi/mu are infinite off its support: the mean is the expected update's."""
    world = make_world()
    p = world.problem
    cut = [torch.where(x_nV == x_nV.min(1, keepdim=True).values, -math.inf, x_nV).log_softmax(1) for x_nV in p.logp_mu]
    problem = Problem(p.policy, cut, p.logp_old, p.reward_Y)
    weighted = preset("reinforce", correction=correction("token_is", numerator="pi"))
    exact = estimate(problem, weighted, Group(G))
    assert torch.allclose(exact.mean, expected_update(problem, weighted, Group(G)).gradient, atol=1e-12)
    assert 0 < exact.variance < math.inf


def test_an_infinite_group_is_the_limit_of_large_ones() -> None:
    """Means and variances of leave-one-out groups go to the infinite group's as 1/G."""
    world = make_world()
    limit = estimate(world.problem, reinforce("token_is"), Group(None, "mean"))
    objective = preset("reinforce", correction=correction("token_is", numerator="pi"), advantage="leave_one_out")
    gaps = []
    for G in (8, 16, 32):
        finite = estimate(world.problem, objective, Group(G))
        assert torch.allclose(finite.mean, limit.mean, atol=1e-13)  # the weight makes the baseline immaterial
        gaps.append(abs(finite.variance - limit.variance))
    assert gaps[0] / gaps[1] == pytest.approx(2, rel=0.2)
    assert gaps[1] / gaps[2] == pytest.approx(2, rel=0.2)


def test_error_joins_bias_and_variance() -> None:
    """error(n)^2 ||truth||^2 = ||mean - truth||^2 + variance / n."""
    exact = estimate(make_world().problem, preset("minirl"), Group(4))
    for n in (4, 1024):
        squared = exact.error(n) ** 2 * exact.truth.square().sum()
        expected = (exact.mean - exact.truth).square().sum() + exact.variance / n
        assert squared.item() == pytest.approx(expected.item(), rel=1e-12)
    assert exact.error(10**15) == pytest.approx(exact.bias, rel=1e-6)


def test_sampled_groups_agree_with_enumerated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many groups to enumerate they are drawn, and labelled so: 1% at 20,000 groups."""
    from theory.exact import groups

    world = make_world()
    exact = estimate(world.problem, preset("grpo_dapo"), Group(6))
    monkeypatch.setattr(groups, "MAX_GROUPS", 10)
    with pytest.raises(ValueError, match="expected a generator"):
        estimate(world.problem, preset("grpo_dapo"), Group(6))
    drawn = estimate(world.problem, preset("grpo_dapo"), Group(6), generator=stream(0, "groups"))
    assert drawn.num_draws == 20_000
    # The root of 20,000 draws is 141: the mean is good to 1%, and the variance, a difference of moments, to 3%.
    assert float((drawn.mean - exact.mean).norm() / exact.mean.norm()) < 0.01
    assert drawn.variance == pytest.approx(exact.variance, rel=0.03)


def test_bad_problems_are_refused() -> None:
    """A wrong number of rewards, a nan reward, a KL penalty, what needs infinite groups or routers: one line each."""
    world = make_world()
    p, num = world.problem, world.tree.num_responses
    with pytest.raises(ValueError, match=rf"expected {num} rewards, one per response, got shape \({num - 1},\)"):
        Problem(p.target, p.logp_mu, p.logp_old, p.reward_Y[1:])
    with pytest.raises(ValueError, match="expected finite rewards, got nan"):
        Problem(p.target, p.logp_mu, p.logp_old, torch.full_like(p.reward_Y, math.nan))
    with pytest.raises(ValueError, match=r"expected kl_coefficient 0, got 0\.1"):
        estimate(p, preset("grpo", kl_coefficient=0.1), Group(4))
    with pytest.raises(ValueError, match=r"grpo: advantage optimal_token: expected an infinite group .*, got one of 4"):
        estimate(p, preset("grpo", advantage="optimal_token"), Group(4))
    with pytest.raises(ValueError, match=r"router_shift_floor 0.8: expected a policy with routers.*got LinearPolicy"):
        estimate(p, preset("gmpo", router_shift_floor=0.8), Group(4))


def test_an_estimate_without_a_direction_has_no_direction_bias() -> None:
    """A mean of 0 has no angle to the truth: cosine and direction bias are nan, not perfect; a rescaled truth has 0."""
    truth = torch.ones(3)
    nothing = Estimate(torch.zeros(3), truth, 0.0)
    assert math.isnan(nothing.cosine)
    assert math.isnan(nothing.direction_bias)
    assert Estimate(2 * truth, truth, 0.0).direction_bias < 1e-7
