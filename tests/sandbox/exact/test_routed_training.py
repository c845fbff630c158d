"""Laws of the MoE in exact training: its updates are the audit's, and replay modes coincide where they must."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.flow import load_config
from sandbox.engines import EngineConfig, RouterNoise, WeightPrecision
from sandbox.exact.audit import learner_of, moe_problem, random_direction
from sandbox.exact.flow import SandboxFlow, moe_problem_of
from sandbox.exact.routed_policy import rollout_engine, target_policy
from sandbox.exact.routed_training import MoeEngine, MoePolicy, row_weights
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from tests.sandbox.exact.tree_world import tiny_moe
from theory.algorithm import Algorithm
from theory.collection import Collected
from theory.contracts import Prompt
from theory.exact.batch import Batch
from theory.exact.estimator import estimate
from theory.exact.expected import Update
from theory.exact.forest import Forest
from theory.exact.groups import Group
from theory.exact.rates import reinforce
from theory.exact.training import Settings, train
from theory.exact.trajectory import ExactTask, Trajectory
from theory.exact.tree import PrefixTree
from theory.loop import hand_over, take
from theory.objectives import Objective, Totals, preset
from theory.old_pass import old_pass
from theory.preparation import prepared
from theory.routing.passes import MODES, Mode
from theory.streams import stream

FOREST = Forest.uniform(PrefixTree(3, 2, has_end=True), num_prompts=1, num_openings=2)
PROMPTS = [Prompt("0, 0", (0, 0), ""), Prompt("0, 1", (0, 1), "")]
NOISE = EngineConfig(defects=(RouterNoise(std=2.0),))
EXACT = EngineConfig()
CONFIG = Path(__file__).parents[3] / "configs/flow/moe_small.yaml"
DR_GRPO = preset("dr_grpo")
RSPO = preset("gmpo", router_shift_floor=0.95)
# Sums of some hundred float64 terms of order 1.
ROUNDING = 1e-12


def reward(forest: Forest) -> Tensor:
    """Half of the responses earn 1."""
    return (torch.rand(forest.num_responses, generator=stream(1, "reward"), dtype=torch.float64) < 0.5).double()


def first(model: MoE | None = None) -> MoePolicy:
    """A random policy on two contexts."""
    return MoePolicy.of(FOREST, model or tiny_moe(3, stream(0, "model")), PROMPTS)


def run(
    mode: Mode, engine: EngineConfig, n: int, draws: int = 2, num_updates: int = 3, objective: Objective = DR_GRPO
) -> Trajectory:
    """A few updates, observed at both ends."""
    settings = Settings(objective, "adam", 0.05, num_updates, n, observe_every=9, has_variance=False)
    return train(ExactTask(FOREST, reward(FOREST)), first(), MoeEngine(engine, mode, draws), settings)


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether two runs end at the same parameters."""
    return torch.allclose(a.policy.parameters, b.policy.parameters, atol=1e-9)


# ---- against the audit -----------------------------------------------------------------------------------------------


def test_the_policy_is_the_audit_s() -> None:
    """On each context its log-probabilities, and a pull-back of random weights, are those of the audit's Jacobian."""
    policy, tree = first(), FOREST.tree
    edges = [torch.randn(n, 3, generator=stream(t, "edges"), dtype=torch.float64) for t, n in enumerate(FOREST.sizes)]
    total = torch.zeros_like(policy.parameters)
    for c, prompt in enumerate(PROMPTS):
        audited = target_policy(policy.model, tree, prompt)
        for mine, theirs in zip(policy.logp(), audited.logp(), strict=True):
            assert torch.allclose(mine.chunk(2)[c], theirs, atol=ROUNDING)
        total += audited.pullback([x.chunk(2)[c] for x in edges])
    assert torch.allclose(policy.pullback(edges), total, atol=ROUNDING)
    norms = policy.squared_norms(FOREST.values_BT(edges), FOREST.whole)
    audited = target_policy(policy.model, tree, PROMPTS[0])
    own = audited.squared_norms(FOREST.values_BT(edges)[: tree.num_responses], tree.paths(0, tree.num_responses))
    assert torch.allclose(norms[: tree.num_responses], own, atol=ROUNDING)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_is_the_audit_s(mode: Mode) -> None:
    """Under an FP8 engine, after a step of the weights, each mode's expected gradient is the audit's for it."""
    model, tree = tiny_moe(3, stream(0, "model")), FOREST.tree
    one = Forest.uniform(tree, 1)
    policy = MoePolicy.of(one, model, PROMPTS[:1])
    step_Q = 0.05 * random_direction(model, stream(0, "step"))
    engine = EngineConfig(defects=(WeightPrecision(format="fp8_e4m3"),))
    reward_Y = reward(one)
    (rollout,) = MoeEngine(engine, mode).roll_out(policy, policy)
    now = policy.moved(step_Q)
    sizes = model.config
    zero = {i: torch.zeros(sizes.hidden_size, sizes.num_experts, dtype=torch.float64) for i in sizes.moe_layers}
    predictor = zero if mode in ("Pr2", "Pr3") else None
    problem = moe_problem(model, engine, mode, tree, PROMPTS[0], reward_Y, step_Q=step_Q, predictor=predictor)
    for objective in (preset("minirl"), RSPO):
        batch = Batch(one, rollout.logp_mu, rollout.logp_old, reward_Y, objective, Group(None))
        audited = estimate(problem, objective, Group(None)).mean
        found = Update.at(batch, rollout.trained(now), rollout.router_shift(now)).gradient
        assert torch.allclose(found, audited, atol=ROUNDING)
        assert float(audited.norm()) > 1e-3


@pytest.mark.parametrize(("mode", "floor"), [("none", 0.9), ("R3", 0.95)])
def test_a_router_shift_is_the_loop_s_own_on_every_response(mode: Mode, floor: float) -> None:
    """RSPO's update is the probability-weighted sum of what a trainer makes of each response alone: its pass of pi,
    its shift from old's routers, its gradient through the model."""
    model, one = tiny_moe(3, stream(0, "model")), Forest.uniform(FOREST.tree, 1)
    rspo = preset("gmpo", router_shift_floor=floor)
    policy, engine = MoePolicy.of(one, model, PROMPTS[:1]), EngineConfig(defects=(WeightPrecision(format="fp8_e4m3"),))
    now = policy.moved(0.05 * random_direction(model, stream(0, "step")))
    (rollout,) = MoeEngine(engine, mode).roll_out(policy, policy)
    batch = Batch(one, rollout.logp_mu, rollout.logp_old, reward(one), rspo, Group(None))
    update = Update.at(batch, rollout.trained(now), rollout.router_shift(now))

    algorithm, sampler = Algorithm(rspo, mode), rollout_engine(model, engine, one.tree)
    hand_over(algorithm, sampler, learner_of(model, mode, None), version=0)
    rollouts = sampler.enumerate(PROMPTS[0], one.tree)
    old = old_pass(0, algorithm, learner_of(model, mode, None), Collected(rollouts, reward(one)[None], {}), 0)
    learner = learner_of(now.model, mode, None)
    probability_Y = rollouts.padded().logp_mu_BT.sum(1).exp()
    A_Y = reward(one) - probability_Y @ reward(one)
    total, shifts = torch.zeros_like(policy.parameters), []
    for y in range(one.num_responses):
        plan, minibatch = old.gradient.select([y]), take(rollouts, old, A_Y, [y], index=1, num=2)
        minibatch, _ = prepared(rspo, algorithm.passes, learner, minibatch, old.scores, plan, [y])
        forward, _ = learner.differentiable(minibatch.rollouts, plan)
        alone, shift_1T = forward.batch, minibatch.router_shift_BT
        J = rspo(
            forward.logp_BT, minibatch.logp_old_BT, alone.logp_mu_BT, A_Y[[y]], alone.is_response_BT,
            router_shift_BT=shift_1T, totals=Totals(1, 1),
        ).objective  # fmt: skip
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(J, learner.parameters)])
        total += probability_Y[y] * gradient
        assert shift_1T is not None
        shifts.append(shift_1T[alone.is_response_BT])
    assert torch.allclose(update.gradient, total, atol=ROUNDING)
    gamma = torch.cat(shifts).neg().exp()  # above the floor, and below it
    assert 0.0 < float(gamma.min()) < floor < float(gamma.max()) < 1.0


def test_rspo_starts_as_gmpo() -> None:
    """Where pi is old the routers have not moved: at N = 1 its run is GMPO's, and at N = 3 another."""
    runs = {
        (n, floor): run("R3", NOISE, n, objective=preset("gmpo", router_shift_floor=floor))
        for n, floor in itertools.product((1, 3), (0.95, 1.0))
    }
    assert same(runs[1, 0.95], runs[1, 1.0]) and not same(runs[3, 0.95], runs[3, 1.0])


# ---- where modes coincide --------------------------------------------------------------------------------------------


def test_at_n_1_a_replay_of_old_changes_nothing() -> None:
    """pi is old at the first update, whose routes it would choose: R2 and Pr2 are no replay, and Pr3 is R3."""
    none, R2, R3, Pr2, Pr3 = (run(mode, NOISE, 1) for mode in ("none", "R2", "R3", "Pr2", "Pr3"))
    assert same(none, R2) and same(none, Pr2) and same(R3, Pr3)
    assert not same(none, R3)


def test_off_policy_the_modes_part() -> None:
    """With three updates per rollout, no two of no replay, R2, R3 and Pr2 make the same run.

    Two rollouts: in the first one Pr2's predictor still is zero, so that it is R2.
    """
    runs = [run(mode, NOISE, 3, num_updates=6) for mode in ("none", "R2", "R3", "Pr2")]
    assert not any(same(a, b) for a, b in itertools.combinations(runs, 2))


@pytest.mark.parametrize("n", [1, 3])
def test_an_exact_engine_takes_old_s_routes(n: int) -> None:
    """R3 is then R2, to rounding, and at N = 1 every mode is no replay."""
    runs = {mode: run(mode, EXACT, n, draws=1) for mode in MODES}
    assert same(runs["R2"], runs["R3"]) and max(runs["R3"]["kl_mu_old"]) < ROUNDING
    assert n > 1 or all(same(runs["none"], other) for other in runs.values())
    assert n == 1 or not same(runs["none"], runs["R2"])


def test_r3_leaves_no_gap_where_only_the_choice_of_experts_errs() -> None:
    """With one expert a token, its weight is 1: mu under noisy routers is old under mu's routes.

    The gap that R3 leaves is 0, and an unweighted run is that with a sequence weight; without replay neither holds.
    """
    sizes = ModelConfig(
        vocab_size=3, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, num_experts=4,
        experts_per_token=1, expert_size=8, max_positions=8,
    )  # fmt: skip
    policy, task = first(MoE(sizes, stream(0, "one")).to(torch.float64)), ExactTask(FOREST, reward(FOREST))
    ends: dict[tuple[str, str], Tensor] = {}
    for mode in ("none", "R3"):
        for weight in ("none", "seq_tis"):
            settings = Settings(reinforce(weight), rate=0.05, num_updates=1, has_variance=False)
            found = train(task, policy, MoeEngine(NOISE, mode, 2), settings)
            ends[mode, weight] = found.policy.parameters
            assert (max(found["kl_mu_old"]) < ROUNDING) == (mode == "R3")
    assert torch.allclose(ends["R3", "none"], ends["R3", "seq_tis"], atol=1e-9)
    assert not torch.allclose(ends["none", "none"], ends["none", "seq_tis"], atol=1e-3)


# ---- draws, and the predictor ----------------------------------------------------------------------------------------


def test_draws_are_fixed_and_each_is_a_mu() -> None:
    """The same seed gives the same mu, three draws are three mu, and more draws state a smaller error."""
    policy = first()
    one, two = (MoeEngine(NOISE, "none", 3, seed=5).roll_out(policy, policy) for _ in range(2))
    assert all(torch.equal(a.logp_mu[1], b.logp_mu[1]) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a.logp_mu[1], b.logp_mu[1]) for a, b in itertools.combinations(one, 2))
    few, many = (run("none", NOISE, 1, draws=n, num_updates=0)["draw_error"][0] for n in (4, 64))
    assert few > 1.5 * many > 0


def test_rows_weigh_what_mu_reaches() -> None:
    """The weights of a node's rows sum to its probability over the expected length, and all of them to 1."""
    policy = first()
    mu = policy.logp()
    weight_bT = row_weights(FOREST, mu).view(-1, FOREST.max_length)
    reach = FOREST.reach(mu)
    length = sum(float(r_n.sum()) for r_n in reach)
    assert float(weight_bT.sum()) == pytest.approx(1.0)
    for t, r_n in enumerate(reach):
        assert torch.allclose(weight_bT[:, t].view(len(r_n), -1).sum(1), r_n / length)


def test_the_predictor_learns_from_the_second_update_on() -> None:
    """W_p is 0 until a rollout's second update, and lowers its own expected loss on the updates that follow."""
    policy, engine = first(), MoeEngine(NOISE, "Pr2", 2, predictor_rate=1e-2)
    settings = Settings(preset("dr_grpo"), rate=0.05, num_updates=1, has_variance=False)
    train(ExactTask(FOREST, reward(FOREST)), policy, engine, settings)
    assert engine._trainer is not None
    assert all(float(W.norm()) == 0 for W in engine._trainer.weights().values())
    rollouts = engine.roll_out(policy, policy)
    now = policy.moved(0.2 * random_direction(policy.model, stream(0, "drift")))
    trained = [rollout.trained(now) for rollout in rollouts]
    losses = [engine.learn(rollouts, trained) for _ in range(10)]
    assert losses[0] is not None and losses[-1] is not None and losses[-1] < 0.98 * losses[0]


def test_init_scale_is_a_factor_on_the_logits() -> None:
    """`policy: {init_scale: 2}` doubles the first policy's logits in every context, and changes no draw."""
    given = load_config(CONFIG, sandbox=lambda: SandboxFlow)

    def logp(scale: float) -> list[torch.Tensor]:
        policy = given.problems.policy.model_copy(update={"init_scale": scale})
        problems = given.problems.model_copy(update={"policy": policy})
        return list(moe_problem_of(given.model_copy(update={"problems": problems}), 0)[1].logp())

    for one, two in zip(logp(1.0), logp(2.0), strict=True):
        assert torch.allclose(two, torch.log_softmax(2 * one, -1), atol=1e-12)


def test_bad_policies_are_refused() -> None:
    """A prompt too few, and prompts of two lengths: one line with both numbers."""
    model = tiny_moe(3, stream(0, "model"))
    with pytest.raises(ValueError, match="prompts: expected one for each of 2 contexts, got 1"):
        MoePolicy.of(FOREST, model, PROMPTS[:1])
    ragged = MoePolicy.of(FOREST, model, [PROMPTS[0], Prompt("1", (1,), "")])
    with pytest.raises(ValueError, match=r"prompts: expected one length in tokens, got \[1, 2\]"):
        MoeEngine(EXACT).roll_out(ragged, ragged)
