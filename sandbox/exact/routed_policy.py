"""pi of the sandbox's MoE on a prefix tree: its log-probabilities, their Jacobian, and the routes of every response.

It uses the training engine's own forward and backward, under any RoutingPlan. Routes are functions of the prefix, as a
replayed record is one: rows that two responses share have the same experts in both.

Letters beyond theory/contracts.py: n nodes, Y responses (theory/exact/tree.py), Q trainable parameters.
Paper: R3 (arXiv 2510.11370) Eq. 8, replayed experts under live gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.engines import EngineConfig, PartialWeights
from sandbox.engines.engine import SandboxEngine
from sandbox.engines.sampling_mismatch import is_unscored
from sandbox.engines.stale_weights import lagging
from sandbox.model import MoE
from sandbox.training.engine import SandboxTrainingEngine
from theory.algorithm import OptimizerSettings
from theory.contracts import Prompt, Rollouts
from theory.exact.policies import JacobianPolicy
from theory.exact.tree import PrefixTree
from theory.loop import take
from theory.objectives import preset
from theory.old_pass import OldPass
from theory.preparation import prepared
from theory.routing.passes import ModePlan, RoutingPlan
from theory.routing.record import RoutingRecord

# Any floor will do: it makes the old pass keep its scores, and this objective is never computed.
SHIFTED = preset("grpo", router_shift_floor=0.5)
"""An objective whose old pass keeps its routers' scores."""


@dataclass(frozen=True)
class RoutedPolicy(JacobianPolicy):
    """pi under one routing: log-probabilities, their Jacobian, and the experts that every response's rows used."""

    experts: RoutingRecord


def target_policy(model: MoE, tree: PrefixTree, prompt: Prompt, temperature: float = 1.0) -> RoutedPolicy:
    """pi at the model's weights and `temperature`, naturally routed: the policy whose E[R] is maximised."""
    return routed_policy(model, tree, exact_rollouts(model, tree, prompt, temperature), RoutingPlan("natural"))


def routed_policy(model: MoE, tree: PrefixTree, rollouts: Rollouts, plan: RoutingPlan) -> RoutedPolicy:
    """pi at the model's weights, routed by `plan` over `rollouts`, which are all responses of the tree.

    It has the rollouts' temperature. The training engine takes one backward per edge; each edge is read from the first
    response through it.
    """
    learner = SandboxTrainingEngine(model, OptimizerSettings())
    values, jacobians = [], []
    for t, owner_nV in enumerate(_owners(tree)):
        # The V edges of one node at a time.
        rows = [learner.token_gradients(rollouts.select(b), plan.select(b), t) for b in owner_nV.tolist()]
        values.append(torch.stack([logp_V for logp_V, _ in rows]).double())
        jacobians.append(torch.stack([gradient_VQ for _, gradient_VQ in rows]).double())
    # Another pass for the record: those above take a few responses each, and drop their routes.
    experts = learner.score(rollouts, plan).experts
    assert experts is not None, "a model with MoE layers was scored without a record of its routes"
    return RoutedPolicy(tree, tuple(values), tuple(jacobians), experts)


def _owners(tree: PrefixTree) -> list[Int[Tensor, "_n V"]]:
    """The first response through each edge."""
    # Initially beyond any index, so that `amin` finds the first response.
    owners = [torch.full((n * tree.num_tokens,), tree.num_responses) for n in tree.sizes]
    for rows, paths in tree.chunks():
        index_B = torch.arange(rows.start, rows.stop)
        for t, owner in enumerate(owners):
            on = paths.is_response_BT[:, t]
            flat = paths.nodes_BT[on, t] * tree.num_tokens + paths.tokens_BT[on, t]
            owner.scatter_reduce_(0, flat, index_B[on], "amin")
    return [owner.view(-1, tree.num_tokens) for owner in owners]


def router_shift(model: MoE, rollouts: Rollouts, passes: ModePlan, old: OldPass) -> Float[Tensor, "B T"]:
    """Delta of every token, nats: the shift of this model's routers, routed as in its gradient pass, from old's.

    It is the loop's own preparation of a mini-batch with all of these responses. The old pass must have kept its
    routers' scores (`SHIFTED`).
    """
    chosen = list(range(len(rollouts)))
    # Index 1 of 2: in the first mini-batch pi equals old, and its shift would be set to 0 without a pass.
    minibatch = take(rollouts, old, torch.zeros(len(rollouts), dtype=model.norm.dtype), chosen, index=1, num=2)
    learner = SandboxTrainingEngine(model, OptimizerSettings())
    found, _ = prepared(SHIFTED, passes, learner, minibatch, old.scores, old.gradient, chosen)
    assert found.router_shift_BT is not None, "SHIFTED needs the shift"
    return found.router_shift_BT


def edges_of(tree: PrefixTree, values_YT: Float[Tensor, "Y T"]) -> list[Float[Tensor, "_n V"]]:
    """The values of all responses and positions, as one value per edge, in float64."""
    return [values_YT[owner_nV, t].double() for t, owner_nV in enumerate(_owners(tree))]


def natural_logp(model: MoE, tree: PrefixTree, prompt: Prompt) -> list[Float[Tensor, "_n V"]]:
    """log pi of every edge, naturally routed, without its gradient."""
    # From the exact engine, whose bits are the trainer's: one walk, where `routed_policy` takes a backward per edge.
    return edges_of(tree, exact_rollouts(model, tree, prompt).padded().logp_mu_BT)


def exact_rollouts(model: MoE, tree: PrefixTree, prompt: Prompt, temperature: float = 1.0) -> Rollouts:
    """Every response of the tree with pi's own log-probabilities, from the engine without defects."""
    engine = rollout_engine(model, EngineConfig(), tree)
    engine.load_model(model, version=0)
    return engine.enumerate(prompt, tree, temperature=temperature)


def rollout_engine(model: MoE, engine: EngineConfig, tree: PrefixTree) -> SandboxEngine:
    """The configured engine for the model's sizes and dtype and the tree's end token; it has no weights yet."""
    stop_tokens = (tree.num_tokens - 1,) if tree.has_end else ()
    return SandboxEngine(model.config, engine.defects, stop_tokens, dtype=model.norm.dtype, kernels=model.kernels)


def check_one_policy(engine: EngineConfig, staleness: str, temperature: float = 1.0) -> None:
    """ValueError unless one hand-over determines mu, scored as it samples; `staleness` names the field for old weights.

    Every rollout of the exact lab has a new engine: one that keeps earlier weights would be the exact engine.
    """
    for defect in engine.defects:
        if isinstance(defect, PartialWeights) or lagging([defect]) is not None:
            raise ValueError(
                f"defects: expected none that keeps earlier weights (old weights are {staleness}), got {defect.words}"
            )
        if is_unscored(defect, temperature):
            raise ValueError(
                f"defects: expected an engine that scores the distribution of its draws, got {defect.words}"
            )


__all__ = [
    "SHIFTED", "RoutedPolicy", "check_one_policy", "edges_of", "exact_rollouts", "natural_logp", "rollout_engine",
    "routed_policy", "router_shift", "target_policy",
]  # fmt: skip
