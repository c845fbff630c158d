"""The sandbox's own MoE as an exact problem: every response over a small vocabulary, with its routes.

mu is a rollout engine with any defect, old and pi are the training engine, and theory/loop.py decides how each pass
routes: nothing is modelled a second time here. A float64 model gives exact sums; in float32 they are off by about 1e-7.

Letters beyond theory/contracts.py: n nodes, Y responses (theory/exact/tree.py), Q trainable parameters, R rows.
Papers: MiniRL (arXiv 2512.01374) Table 1; R3 (2510.11370) Eq. 8; Pr2 (2606.00395) Eq. 4-7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sandbox.engines import ActivationPrecision, EngineConfig, RouterNoise, WeightPrecision
from sandbox.exact.routed_policy import (
    SHIFTED,
    RoutedPolicy,
    check_one_policy,
    edges_of,
    natural_logp,
    rollout_engine,
    routed_policy,
    router_shift,
    target_policy,
)
from sandbox.model import MoE
from sandbox.training.engine import SandboxTrainingEngine
from theory.algorithm import Algorithm, OptimizerSettings
from theory.bounds.bound import Bound
from theory.bounds.routing import replay_bias as replay_bias_bound
from theory.collection import Collected
from theory.contracts import Prompt, Rollouts
from theory.exact.levels import scale_at, token_kl
from theory.exact.policies import JacobianPolicy
from theory.exact.problem import Problem
from theory.exact.tree import PrefixTree
from theory.loop import hand_over
from theory.old_pass import old_pass
from theory.routing.measures import difference_counts
from theory.routing.passes import MODES, PASSES, Mode, RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.routing.record import RoutingRecord

ENGINES: dict[str, EngineConfig] = {
    "exact": EngineConfig(),
    "weights-bf16": EngineConfig(defects=(WeightPrecision(format="bf16"),)),
    "weights-fp8": EngineConfig(defects=(WeightPrecision(format="fp8_e4m3"),)),
    "activations-fp8": EngineConfig(defects=(ActivationPrecision(format="fp8_e4m3"),)),
    "router-noise": EngineConfig(defects=(RouterNoise(std=0.1),)),
}
"""The engines of an audit, by name, with one departure each: from none to noise that changes only the routing."""


@dataclass(frozen=True, kw_only=True)
class RoutedProblem(Problem):
    """A problem whose policies are passes of one MoE, and the differences of their routes.

    differs_Y: whether any route of a response under `trained` differs from that of `target`.
    disagreement: the share in [0, 1] of (row, layer) pairs, prompt rows included, of responses from mu, at which mu's
    experts differ from those that old's live logits choose. staleness: the same share for the experts of `trained`
    against those of `target`; 0 without replay.
    """

    mode: Mode
    differs_Y: Bool[Tensor, " Y"]
    disagreement: float
    staleness: float


# ---- weights ---------------------------------------------------------------------------------------------------------


def trainable(model: MoE) -> list[torch.nn.Parameter]:
    """The trainable parameters, in the order of `named_parameters`."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def random_direction(model: MoE, generator: torch.Generator) -> Float[Tensor, " Q"]:
    """A standard normal number per trainable parameter, in the order of `named_parameters`."""
    num = sum(parameter.numel() for parameter in trainable(model))
    # Drawn in float64 whatever the model's dtype: a draw in float32 would be another direction.
    return torch.randn(num, generator=generator, dtype=torch.float64).to(model.norm.dtype)


def moved(model: MoE, step_Q: Float[Tensor, " Q"]) -> MoE:
    """A copy at parameters + step. Raises ValueError unless the step has one number per trainable parameter."""
    copy = deepcopy(model)
    parameters = trainable(copy)
    sizes = [p.numel() for p in parameters]
    if len(step_Q) != sum(sizes):
        raise ValueError(f"step_Q: expected {sum(sizes)} numbers, one per trainable parameter, got {len(step_Q)}")
    with torch.no_grad():
        # In place: a view into one long vector may start at an address that is not aligned for the kernels.
        for parameter, part in zip(parameters, step_Q.split(sizes), strict=True):
            parameter.add_(part.view_as(parameter))
    return copy


def step_at(
    model: MoE, direction_Q: Float[Tensor, " Q"], tree: PrefixTree, prompt: Prompt, kl: float
) -> Float[Tensor, " Q"]:
    """The step along `direction_Q` after which pi is at KL(old || pi) = `kl` nats per token, both naturally routed.

    The KL jumps where a route flips: the step found may then be on either side of the jump.
    """
    old = natural_logp(model, tree, prompt)

    def distance(scale: float) -> float:
        return token_kl(tree, old, natural_logp(moved(model, scale * direction_Q), tree, prompt))

    return scale_at(distance, kl) * direction_Q


def router_drift(model: MoE, step_Q: Float[Tensor, " Q"]) -> dict[int, Float[Tensor, "D E"]]:
    """W_p by layer for that step, in hindsight: the change of the gate weights themselves, (W_pi - W_old)^T.

    It minimises Pr2's loss if nothing else changes (Eq. 8); routes still differ where the routers' inputs change.
    """
    after = moved(model, step_Q).router_parameters()
    pairs = zip(model.config.moe_layers, model.router_parameters(), after, strict=True)
    return {number: (new - old).detach().T.contiguous() for number, old, new in pairs}


# ---- problems --------------------------------------------------------------------------------------------------------


def moe_problem(
    model: MoE,
    engine: EngineConfig,
    mode: Mode,
    tree: PrefixTree,
    prompt: Prompt,
    reward_Y: Float[Tensor, " Y"],
    *,
    step_Q: Float[Tensor, " Q"] | None = None,
    predictor: Mapping[int, Float[Tensor, "D E"]] | None = None,
    old_gates: Literal["predicted", "live"] = "predicted",
    seed: int = 0,
    temperature: float = 1.0,
    target: RoutedPolicy | None = None,
    known: Sequence[RoutedPolicy] = (),
) -> RoutedProblem:
    """One global step on one prompt, enumerated: `model` has the weights that were rolled out, pi is `step_Q` further.

    mu: `engine` at `model`'s weights (under Pr3 with the predictor in its gates), with random draws seeded by `seed`.
    old: the training engine's old pass. `trained`: pi under the routes that the gradient passes of `mode` replay, None
    if they are natural. `target`: pi at `model` + `step_Q`, naturally routed, computed unless given. All are at
    `temperature`.
    `predictor` is W_p by layer, for Pr2 and Pr3 only; `old_gates` is Pr2's choice (Algorithm). `known` are policies at
    pi's weights, tree and prompt: one with the same routes is reused as `trained`.
    Raises ValueError for a model without MoE layers, an engine that keeps earlier weights or does not score its draws,
    a missing or superfluous predictor, and sizes that do not fit.
    """
    if not model.config.moe_layers:
        raise ValueError("model: expected at least 1 MoE layer, got 0")
    check_one_policy(engine, "step_Q", temperature)
    algorithm = Algorithm(objective=SHIFTED, mode=mode, old_gates=old_gates, temperature=temperature)
    learner = learner_of(model, mode, predictor)
    rollout = rollout_engine(model, engine, tree)
    hand_over(algorithm, rollout, learner, version=0)
    rollouts = rollout.enumerate(prompt, tree, seed, temperature)
    # All responses as one group: an old pass does not read rewards.
    old = old_pass(0, algorithm, learner, Collected(rollouts, reward_Y[None], {}), seed)
    now = model if step_Q is None else moved(model, step_Q)
    target = target_policy(now, tree, prompt, temperature) if target is None else target
    trained = None if mode == "none" else _replayed(now, tree, rollouts, old.gradient, known)
    # Gradients are taken on the replayed routes, if there are any.
    used = target if trained is None else trained
    shift_YT = router_shift(now, rollouts, algorithm.passes, old)
    assert rollouts.experts is not None and old.scores.natural is not None, "a pass over MoE layers left no record"
    logp_mu = edges_of(tree, rollouts.padded().logp_mu_BT)
    mu_Y = tree.log_probabilities(logp_mu).exp()
    return RoutedProblem(
        target, logp_mu, edges_of(tree, old.scores.logp_BT), reward_Y, trained,
        # A token's shift is that of the row that predicts it, hence the same for all V tokens of a node.
        [each_nV[:, 0] for each_nV in edges_of(tree, shift_YT)],
        mode=mode,
        differs_Y=_differing_pairs(used.experts, target.experts) > 0,
        disagreement=_share(rollouts.experts, old.scores.natural, mu_Y),
        staleness=_share(used.experts, target.experts, mu_Y),
    )  # fmt: skip


def _replayed(
    now: MoE, tree: PrefixTree, rollouts: Rollouts, plan: RoutingPlan, known: Sequence[RoutedPolicy]
) -> RoutedPolicy:
    for policy in known:
        if plan.record is not None and torch.equal(policy.experts.experts, plan.record.experts):
            return policy
    return routed_policy(now, tree, rollouts, plan)


def learner_of(model: MoE, mode: Mode, predictor: Mapping[int, Float[Tensor, "D E"]] | None) -> SandboxTrainingEngine:
    """The training engine of that mode around `model` itself, with W_p in its predictor.

    Raises ValueError if there is a predictor but the mode has no predicted pass, or the other way round.
    """
    if PASSES[mode].trains_predictor != (predictor is not None):
        got = "none" if predictor is None else f"one for layers {sorted(predictor)}"
        raise ValueError(f"predictor: expected one if and only if a pass is predicted, got {got} under {mode}")
    learner = SandboxTrainingEngine(model, OptimizerSettings(), None if predictor is None else PredictorSettings())
    if learner.predictor is not None and predictor is not None:
        learner.predictor.load_state_tensors({f"predictor.{number}.weight": W for number, W in predictor.items()})
    return learner


def _differing_pairs(a: RoutingRecord, b: RoutingRecord) -> Int[Tensor, " Y"]:
    """The number of (row, layer) pairs of each response at which the experts differ."""
    num_R = (difference_counts(a, b) > 0).sum(1)
    response_R = torch.repeat_interleave(torch.arange(len(a)), a.offsets.diff())
    return torch.zeros(len(a), dtype=torch.int64).index_add_(0, response_R, num_R)


def _share(a: RoutingRecord, b: RoutingRecord, mu_Y: Float[Tensor, " Y"]) -> float:
    """E_mu[differing pairs] / E_mu[pairs]: the limit of a run's router disagreement over many responses."""
    pairs_Y = a.offsets.diff() * len(a.layer_numbers)
    return float((mu_Y * _differing_pairs(a, b)).sum() / (mu_Y * pairs_Y).sum())


def moe_cells(
    model: MoE,
    tree: PrefixTree,
    prompt: Prompt,
    reward_Y: Float[Tensor, " Y"],
    *,
    engines: Mapping[str, EngineConfig] = ENGINES,
    modes: Sequence[Mode] = MODES,
    step_Q: Float[Tensor, " Q"] | None = None,
    seed: int = 0,
) -> Iterator[tuple[str, Mode, RoutedProblem]]:
    """(engine's name, mode, problem) for every pair; the target, the same for all, is computed once.

    The predictor is `router_drift` for the step (zero without a step).
    """
    if step_Q is None:
        step_Q = model.norm.new_zeros(sum(parameter.numel() for parameter in trainable(model)))
    predictor = router_drift(model, step_Q)
    target = target_policy(moved(model, step_Q), tree, prompt)
    known: list[RoutedPolicy] = []
    for name, engine in engines.items():
        for mode in modes:
            own = predictor if PASSES[mode].trains_predictor else None
            problem = moe_problem(
                model, engine, mode, tree, prompt, reward_Y,
                step_Q=step_Q, predictor=own, seed=seed, target=target, known=known,
            )  # fmt: skip
            # Modes that replay the same routes share the policy.
            known += [problem.trained] if isinstance(problem.trained, RoutedPolicy) else []
            yield name, mode, problem


def replay_bias(problem: RoutedProblem) -> Bound:
    """||E_mu[W' R grad log pi'] - grad J_seq|| <= 2 M mu(routes differ), with pi' = `trained` and W' = pi'/mu.

    The left side is the bias that replay alone adds: the gradient of J_seq under pi' against that under pi.
    Proof and tightness: `theory.bounds.routing.replay_bias`.
    """
    trained = problem.target if problem.trained is None else problem.trained
    mu_Y = problem.target.tree.log_probabilities(problem.logp_mu).exp()
    own, natural = (_response_gradients(policy, problem, mu_Y) for policy in (trained, problem.target))
    return replay_bias_bound(own, natural, mu_Y, problem.differs_Y)


def _response_gradients(policy: object, problem: Problem, mu_Y: Tensor) -> Float[Tensor, "Y Q"]:
    assert isinstance(policy, JacobianPolicy), f"a routed problem holds Jacobians, got {type(policy).__name__}"
    tree = policy.tree
    weight_Y = tree.log_probabilities(policy.logp()).exp() / mu_Y * problem.reward_Y
    rows = []
    for _, paths in tree.chunks():
        total_BQ = torch.zeros(len(paths.nodes_BT), policy.jacobians[0].shape[2], dtype=torch.float64)
        for t, J in enumerate(policy.jacobians):
            edge_BQ = J[paths.nodes_BT[:, t], paths.tokens_BT[:, t]]
            total_BQ += torch.where(paths.is_response_BT[:, t, None], edge_BQ, 0.0)
        rows.append(total_BQ)
    return weight_Y[:, None] * torch.cat(rows)


__all__ = [
    "ENGINES", "RoutedPolicy", "RoutedProblem", "learner_of", "moe_cells", "moe_problem", "moved", "random_direction",
    "replay_bias", "rollout_engine", "routed_policy", "router_drift", "step_at", "target_policy", "trainable",
]  # fmt: skip
