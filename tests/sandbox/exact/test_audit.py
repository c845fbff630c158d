"""The sandbox's MoE as an exact problem: its policies are the engines' own, its gradients autograd's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sandbox.engines import EngineConfig
from sandbox.exact import audit
from sandbox.exact.audit import ENGINES, RoutedProblem, moe_problem
from sandbox.exact.routed_policy import RoutedPolicy, exact_rollouts
from sandbox.model import MoE
from sandbox.training.engine import SandboxTrainingEngine
from tests.sandbox.exact.tree_world import (
    PROMPT,
    REWARD_Y,
    ROUNDING,
    TOKEN_IS,
    TREE,
    World,
    furthest,
    same_edges,
)
from theory.algorithm import OptimizerSettings
from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.levels import token_kl
from theory.exact.problem import true_gradient, value
from theory.routing.measures import difference_counts
from theory.routing.passes import MODES, Mode, RoutingPlan
from theory.streams import stream

# ---- what the policies are -------------------------------------------------------------------------------------------


def test_cells_are_all_pairings(world: World) -> None:
    """Every engine meets every mode once, and only replaying modes have a policy of their own to train."""
    assert list(world.off) == [(name, mode) for name in ENGINES for mode in MODES]
    for (_, mode), problem in world.off.items():
        assert (problem.trained is None) == (mode == "none")
        assert problem.mode == mode


def test_conditionals_sum_to_one(world: World) -> None:
    """Each of mu, old, target and trained gives every prefix a distribution, and all responses sum to 1."""
    for problem in world.off.values():
        policies = [problem.logp_mu, problem.logp_old, problem.target.logp()]
        policies += [] if problem.trained is None else [problem.trained.logp()]
        for logp in policies:
            assert max(float(x.logsumexp(1).abs().max()) for x in logp) < ROUNDING
            assert abs(float(TREE.log_probabilities(logp).exp().sum()) - 1) < ROUNDING


def test_on_policy_token_is_is_unbiased(world: World) -> None:
    """Where mu, old and pi are one, the token weight is 1 and the surrogate's gradient is the true one."""
    problem = world.on["exact", "none"]
    assert estimate(problem, TOKEN_IS, Group(None, "none")).bias < ROUNDING
    # And with a defect it is not.
    assert estimate(world.on["weights-fp8", "none"], TOKEN_IS, Group(None, "none")).bias > 1e-3


def test_responses_score_as_in_training(world: World) -> None:
    """log pi of every response is what the training engine's `score` says of that response alone."""
    learner = SandboxTrainingEngine(world.now, OptimizerSettings())
    rollouts = exact_rollouts(world.now, TREE, PROMPT)
    log_pi_Y = TREE.log_probabilities(world.off["exact", "none"].target.logp())
    for y in range(0, TREE.num_responses, 3):
        scored = learner.score(rollouts.select([y]), RoutingPlan("natural"))
        assert abs(float(scored.logp_BT.sum() - log_pi_Y[y])) < ROUNDING


# ---- gradients -------------------------------------------------------------------------------------------------------


def expected_reward(learner: SandboxTrainingEngine) -> Tensor:
    """E_pi[R] with its graph through the model, all responses in one batch: autograd's view of J_seq."""
    rollouts = exact_rollouts(learner.model, TREE, PROMPT)
    batch = rollouts.padded()
    logits_BSV = learner.model(batch.tokens_BS[:, :-1])
    logp_BS = logits_BSV.log_softmax(-1).gather(-1, batch.tokens_BS[:, 1:, None])[..., 0]
    first = len(PROMPT.tokens) - 1
    log_pi_Y = torch.where(batch.is_response_BT, logp_BS[:, first:], 0.0).sum(1)
    return (log_pi_Y.exp() * REWARD_Y).sum()


def test_true_gradient_is_autograd(world: World) -> None:
    """The enumerated score-function gradient is d E_pi[R] / d theta through the model, for every parameter."""
    learner = SandboxTrainingEngine(world.now, OptimizerSettings())
    problem = world.off["exact", "none"]
    J = expected_reward(learner)
    gradients = torch.cat([g.reshape(-1) for g in torch.autograd.grad(J, learner.parameters)])
    found = true_gradient(problem)
    assert abs(value(problem) - float(J.detach())) < ROUNDING
    assert float((found - gradients).norm() / gradients.norm()) < ROUNDING
    assert float(gradients.norm()) > 1e-3


def affected(problem: RoutedProblem) -> Tensor:
    """(Y, T): whether a route that reaches the logits of that position differs between trained and target.

    Those are the routes of the predicting row, and of earlier rows below the last layer: nobody attends to its output.
    """
    assert isinstance(problem.trained, RoutedPolicy) and isinstance(problem.target, RoutedPolicy)
    a, b = problem.trained.experts, problem.target.experts
    differs_RL = difference_counts(a, b) > 0
    out = torch.zeros(TREE.num_responses, TREE.max_length, dtype=torch.bool)
    for y in range(TREE.num_responses):
        rows = differs_RL[int(a.offsets[y]) : int(a.offsets[y + 1])]
        for t in range(int(TREE.lengths[y])):
            row = len(PROMPT.tokens) + t - 1
            out[y, t] = rows[row].any() or rows[:row, :-1].any()
    return out


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "exact"])
@pytest.mark.parametrize("mode", ["R2", "R3", "Pr2", "Pr3"])
def test_replay_changes_exactly_what_routes_reach(world: World, engine: str, mode: Mode) -> None:
    """trained is target, gradient included, at every position that no changed route reaches, and nowhere else."""
    problem = world.off[engine, mode]
    trained, target = problem.trained, problem.target
    assert isinstance(trained, RoutedPolicy) and isinstance(target, RoutedPolicy)
    reached_YT = affected(problem)
    assert torch.equal(reached_YT.any(1) | (problem.differs_Y & ~reached_YT.any(1)), problem.differs_Y)
    paths = TREE.paths(0, TREE.num_responses)
    for t in range(TREE.max_length):
        on = paths.is_response_BT[:, t]
        nodes, tokens = paths.nodes_BT[on, t], paths.tokens_BT[on, t]
        gap_n = (trained.values[t] - target.values[t]).abs().amax(1)[nodes]
        gap_jacobian_n = (trained.jacobians[t] - target.jacobians[t])[nodes, tokens].abs().amax(1)
        reached_n = reached_YT[on, t]
        assert float(gap_n[~reached_n].amax() if (~reached_n).any() else 0.0) < ROUNDING
        assert float(gap_jacobian_n[~reached_n].amax() if (~reached_n).any() else 0.0) < 1e-11
        assert bool((gap_n[reached_n] > 1e-7).all())


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["exact", "weights-fp8", "router-noise"])
def test_r2_on_policy_leaves_the_target_untouched(world: World, engine: str) -> None:
    """MiniRL Table 1, R2's first mini-batch: before a step trained is target bit for bit, whatever the engine does."""
    problem = world.on[engine, "R2"]
    assert isinstance(problem.trained, RoutedPolicy) and isinstance(problem.target, RoutedPolicy)
    assert problem.trained is not problem.target
    assert same_edges(problem.trained.logp(), problem.target.logp())
    assert same_edges(list(problem.trained.jacobians), list(problem.target.jacobians))
    assert problem.staleness == 0 and not problem.differs_Y.any()


def test_the_other_cells_of_table_1_do_not(world: World) -> None:
    """R3's first mini-batch, and both modes' later ones, train another policy than the target where routes differ."""
    cells = [world.on["weights-fp8", "R3"], world.off["weights-fp8", "R2"], world.off["weights-fp8", "R3"]]
    for problem in cells:
        assert problem.differs_Y.any() and problem.staleness > 0
        assert problem.trained is not None
        assert furthest(problem.trained.logp(), problem.target.logp()) > 1e-3


def test_r3_routes_as_the_engine_did(world: World) -> None:
    """R3's old pass closes the gap that routes make: with noisy routers, mu and old then differ by gates alone."""
    natural, replayed = world.off["router-noise", "none"], world.off["router-noise", "R3"]
    gaps = [token_kl(TREE, p.logp_mu, p.logp_old) for p in (natural, replayed)]
    # Measured 0.35 of it.
    assert gaps[1] < gaps[0] / 2
    # mu is the same in both, and R2's old is natural.
    assert same_edges(list(natural.logp_mu), list(replayed.logp_mu))
    assert same_edges(list(natural.logp_old), list(world.off["router-noise", "R2"].logp_old))


@pytest.mark.parametrize(("predicted", "plain"), [("Pr2", "R2"), ("Pr3", "R3")])
def test_a_zero_predictor_predicts_nothing(world: World, predicted: Mode, plain: Mode) -> None:
    """With W_p = 0, Pr2 is R2 and Pr3 is R3, in mu, old, trained and routes, bit for bit."""
    zero = {number: torch.zeros(8, 4, dtype=torch.float64) for number in (0, 1)}
    problem = moe_problem(
        world.model, ENGINES["weights-fp8"], predicted, TREE, PROMPT, REWARD_Y, step_Q=world.step_Q, predictor=zero,
        target=world.target,
    )  # fmt: skip
    other = world.off["weights-fp8", plain]
    assert problem.trained is not None and other.trained is not None
    assert same_edges(list(problem.logp_mu), list(other.logp_mu))
    assert same_edges(list(problem.logp_old), list(other.logp_old))
    assert same_edges(problem.trained.logp(), other.trained.logp())
    assert torch.equal(problem.differs_Y, other.differs_Y)


def test_folding_is_predicting(world: World) -> None:
    """Pr3's mu, whose gates hold W_p, is Pr2's old pass with predicted gates (Pr2 Eq. 4-6, App. C.2)."""
    pr2, pr3 = world.off["exact", "Pr2"], world.off["exact", "Pr3"]
    # h W + h W_p against h (W + W_p): measured 2e-15.
    assert furthest(list(pr3.logp_mu), list(pr2.logp_old)) < ROUNDING
    assert furthest(list(pr3.logp_mu), list(world.off["exact", "none"].logp_mu)) > 1e-3
    live = moe_problem(
        world.model, EngineConfig(), "Pr2", TREE, PROMPT, REWARD_Y, step_Q=world.step_Q,
        predictor=audit.router_drift(world.model, world.step_Q), old_gates="live", target=world.target,
    )  # fmt: skip
    assert furthest(list(live.logp_old), list(pr2.logp_old)) > 1e-4


def test_a_step_of_the_last_router_is_predicted(world: World) -> None:
    """Where only the last router moves, by h dW, W_p = dW gives Pr2 pi's own routes; R2's are stale."""
    now = MoE(world.model.config).double()
    now.load_state_dict(world.model.state_dict())
    drift = torch.randn(4, 8, generator=stream(3, "drift"), dtype=torch.float64)
    with torch.no_grad():
        list(now.router_parameters())[-1].add_(drift)
    pairs = zip(now.parameters(), world.model.parameters(), strict=True)
    step_Q = torch.cat([(new - old).detach().reshape(-1) for new, old in pairs])
    cells = {
        mode: problem
        for _, mode, problem in audit.moe_cells(
            world.model, TREE, PROMPT, REWARD_Y, engines={"exact": EngineConfig()}, modes=("R2", "Pr2"), step_Q=step_Q
        )
    }
    assert cells["R2"].staleness > 0.02
    assert cells["Pr2"].staleness == 0
    assert cells["Pr2"].trained is not None
    assert same_edges(cells["Pr2"].trained.logp(), cells["Pr2"].target.logp())


# ---- bounds and levels -----------------------------------------------------------------------------------------------


def test_replay_bias_is_bounded(world: World) -> None:
    """The gradient that replay adds is at most 2 M mu(routes differ), and is 0 where no rewarded response feels one.

    A route of an earlier row at the last layer counts as changed, and no logit feels it: there the bound is loose.
    """
    ratios = []
    for (_, mode), problem in world.off.items():
        bound = audit.replay_bias(problem)
        assert bool(bound.holds(ROUNDING))
        if mode != "none" and bool((affected(problem).any(1) & (REWARD_Y > 0)).any()):
            ratios.append(float(bound.ratio))
        else:
            assert float(bound.lhs) < ROUNDING
    assert len(ratios) > 10 and min(ratios) > 1e-4
    # The left side is a difference of two true gradients: of J_seq under trained, and under the target. Short responses
    # are rewarded too.
    reward_Y = torch.linspace(1, 2, TREE.num_responses, dtype=torch.float64)
    problem = replace(world.off["weights-fp8", "R3"], reward_Y=reward_Y)
    assert isinstance(problem.trained, RoutedPolicy)
    under_trained = replace(problem, target=problem.trained, trained=None)
    gap = float((true_gradient(under_trained) - true_gradient(problem)).norm())
    assert abs(float(audit.replay_bias(problem).lhs) - gap) < ROUNDING


def test_a_step_reaches_its_staleness(world: World) -> None:
    """KL(old || pi) of the found step is the one asked for, where no route flips on the way, and 0 is no step."""
    direction_Q = audit.random_direction(world.model, stream(9, "direction"))
    step_Q = audit.step_at(world.model, direction_Q, TREE, PROMPT, 1e-6)
    problem = moe_problem(world.model, EngineConfig(), "none", TREE, PROMPT, REWARD_Y, step_Q=step_Q)
    # The KL of 1e-6 is a sum of terms of 1e-3: 1e-16 / 1e-6, times a margin.
    assert abs(token_kl(TREE, problem.logp_old, problem.target.logp()) / 1e-6 - 1) < 1e-6
    assert not audit.step_at(world.model, direction_Q, TREE, PROMPT, 0.0).any()


def test_known_policies_are_recognised_by_their_routes(world: World) -> None:
    """A known policy stands in only where its routes are the replayed ones, and is then what would be computed."""
    r2, r3 = world.off["exact", "R2"], world.off["weights-fp8", "R3"]
    # R2's old pass does not know the engine: all engines share one trained policy.
    assert all(world.off[name, "R2"].trained is r2.trained for name in ENGINES)
    assert r3.trained is not r2.trained
    fresh = moe_problem(
        world.model, ENGINES["weights-fp8"], "R2", TREE, PROMPT, REWARD_Y, step_Q=world.step_Q,
        target=world.target,
    )  # fmt: skip
    assert fresh.trained is not None and r2.trained is not None and fresh.trained is not r2.trained
    assert same_edges(fresh.trained.logp(), r2.trained.logp())
