"""The sandbox's MoE in exact training: its policy on a forest, and its engines with their replay modes.

mu is a rollout engine with any defect, old and pi are the training engine, and theory/loop.py decides how each pass
routes, as in sandbox/exact/audit.py, which takes one such step. The predictor's own trainer weights rows by their
probabilities. An engine's noise is K fixed draws, each with its own mu; a trajectory reports the error left by so few
draws (`draw_error`).

A *deepest* response is a node of the last depth with any last token: these cover every node, and all tokens are scored
at each. Letters beyond theory/exact/forest.py: K draws, b deepest responses, F feature rows, Q trainable parameters.
Papers: R3 (arXiv 2510.11370) Eq. 8; Pr2 (2606.00395) Eq. 4-8, Alg. 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.engines import EngineConfig
from sandbox.exact.audit import learner_of, moved, trainable
from sandbox.exact.routed_policy import SHIFTED, check_one_policy, rollout_engine, router_shift
from sandbox.model import MoE
from sandbox.training.engine import SandboxTrainingEngine
from theory.algorithm import Algorithm, OptimizerSettings
from theory.collection import Collected
from theory.contracts import Prompt, Response, Rollouts
from theory.exact.engines import MovablePolicy, Rollout
from theory.exact.forest import Forest
from theory.exact.levels import Edges, expected_length
from theory.exact.policies import TreePolicy
from theory.exact.tree import Paths
from theory.loop import hand_over
from theory.old_pass import OldPass, old_pass
from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of
from theory.routing.passes import PASSES, Mode, ModePlan, RoutingPlan
from theory.routing.predictor import PredictorSettings, PredictorTrainer
from theory.top_tokens import TopTokens

NATURAL = RoutingPlan("natural")
PREDICTOR_RATE = 1e-3
"""The predictor's default learning rate, as in a run (theory/routing/predictor.py)."""


@dataclass(frozen=True)
class MoePolicy:
    """pi of a model on a forest, each context a prompt; its parameters are the trainable ones, in the model's order.

    `sequences` are the deepest responses, at the policy's temperature. `routing` is natural or a replay.
    """

    tree: Forest
    model: MoE
    sequences: Rollouts
    routing: RoutingPlan = NATURAL

    @staticmethod
    def of(forest: Forest, model: MoE, prompts: Sequence[Prompt], temperature: float = 1.0) -> MoePolicy:
        """The naturally routed policy; ValueError unless there is one prompt per context."""
        if len(prompts) != forest.num_contexts:
            raise ValueError(f"prompts: expected one for each of {forest.num_contexts} contexts, got {len(prompts)}")
        return MoePolicy(forest, model, _deepest(forest, prompts, model.norm.dtype, temperature))

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of every context."""
        # The deepest responses come context by context, equally many in each.
        num = len(self.sequences) // self.tree.num_contexts
        return [response.prompt for response in self.sequences.responses[::num]]

    @property
    def parameters(self) -> Float[Tensor, " Q"]:
        """The trainable parameters."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in trainable(self.model)])

    def moved(self, step: Float[Tensor, " Q"]) -> MoePolicy:
        """The policy at parameters + step, naturally routed."""
        return MoePolicy(self.tree, moved(self.model, step), self.sequences)

    def routed(self, routing: RoutingPlan) -> MoePolicy:
        """The same weights, with another routing of the deepest responses."""
        return replace(self, routing=routing)

    @cached_property
    def _pass(self) -> tuple[list[torch.nn.Parameter], Float[Tensor, "N V"], RouterFeatures | None]:
        """The parameters, log pi of every edge with its graph, and the routers' live logits of the rows in the plan."""
        learner = SandboxTrainingEngine(self.model, OptimizerSettings())
        forward, routing = learner.differentiable(self.sequences, self.routing)
        assert forward.logp_top_BTK is not None, "the deepest responses were scored without all tokens"
        edges = [forward.logp_top_BTK[owner_n, t] for t, owner_n in enumerate(owners(self.tree))]
        return learner.parameters, torch.cat(edges), routing.features

    @property
    def features(self) -> RouterFeatures | None:
        """The routers' live logits in this pass, on the rows that its routing requests."""
        return self._pass[2]

    def logp(self) -> list[Float[Tensor, "_n V"]]:
        """log pi of every edge."""
        return list(self._pass[1].detach().double().split(list(self.tree.sizes)))

    def pullback(self, cotangents: Sequence[Float[Tensor, "_n V"]]) -> Float[Tensor, " Q"]:
        """sum over edges of cotangent x grad log pi(edge)."""
        parameters, logp_NV, _ = self._pass
        weights_NV = torch.cat(list(cotangents)).to(logp_NV)
        # The graph is kept: `_pass` is cached, and several pull-backs share it.
        parts = torch.autograd.grad(logp_NV, parameters, weights_NV, retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts]).double()

    def squared_norms(self, coefficients_BT: Float[Tensor, "B T"], paths: Paths) -> Float[Tensor, " B"]:
        """||sum_t c_t grad log pi_t||^2 of each path, with one pull-back per path."""
        norms, parts = [], (paths.nodes_BT, paths.tokens_BT, paths.is_response_BT)
        for b, c_T in enumerate(coefficients_BT):
            edges = self.tree.zero_edges()
            self.tree.scatter(edges, c_T[None], Paths(*(x[b : b + 1] for x in parts)))
            norms.append(self.pullback(edges).square().sum())
        return torch.stack(norms)


def owners(forest: Forest) -> list[Int[Tensor, " _n"]]:
    """The first deepest response through each node, by depth."""
    T, W = forest.max_length, forest.num_continuing
    return [torch.arange(forest.num_nodes(t)) * W ** (T - 1 - t) for t in range(T)]


def _deepest(forest: Forest, prompts: Sequence[Prompt], dtype: torch.dtype, temperature: float) -> Rollouts:
    T, V = forest.max_length, forest.num_tokens
    # The last token may be any: all V tokens are scored in its place.
    tokens_bT = torch.cat([forest.prefixes(T - 1), torch.zeros(forest.num_nodes(T - 1), 1, dtype=torch.int64)], 1)
    zero_T, mask_T = torch.zeros(T, dtype=dtype), torch.ones(T, dtype=torch.bool)
    responses = tuple(
        Response(prompts[c], tokens_T, zero_T, mask_T, "length", 0)
        for c, tokens_T in zip(forest.context_of_node(T - 1).tolist(), tokens_bT, strict=True)
    )
    num = len(responses) * T
    # All V tokens as the "likeliest" ones of every position: a pass then scores the whole distribution.
    top = TopTokens.packed(
        torch.arange(V).repeat(num, 1), torch.zeros(num, V, dtype=dtype), offsets_of([T] * len(responses)), V
    )
    return Rollouts(responses, temperature=temperature, top=top)


# ---- engines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeRollout(Rollout):
    """A rollout with its old pass, and the probabilities of its feature rows, which sum to 1."""

    old: OldPass | None = None
    weight_F: Float[Tensor, " F"] | None = None


Made = TypeVar("Made")


def _once(make: Callable[[MovablePolicy], Made]) -> Callable[[MovablePolicy], Made]:
    """The function with its last result kept: rollouts of one policy share its pass."""
    last: tuple[MovablePolicy, Made] | None = None

    def made(policy: MovablePolicy) -> Made:
        nonlocal last
        # By identity: policies are frozen, and a step makes a new one.
        if last is None or last[0] is not policy:
            last = (policy, make(policy))
        return last[1]

    return made


def _shift(rolled: Rollouts, passes: ModePlan, old: OldPass) -> Callable[[MovablePolicy], list[Float[Tensor, " _n"]]]:
    """The shift of a policy's routers from old's at every node, from one scoring pass of it."""

    def shift(policy: MovablePolicy) -> list[Float[Tensor, " _n"]]:
        now = moe(policy)
        # Without the V tokens per position: only the routers' scores are needed.
        shift_bT = router_shift(now.model, replace(rolled, top=None), passes, old).double()
        return [shift_bT[owner_n, t] for t, owner_n in enumerate(owners(now.tree))]

    return _once(shift)


def moe(policy: MovablePolicy) -> MoePolicy:
    """The policy, as an MoePolicy; ValueError for another kind."""
    if not isinstance(policy, MoePolicy):
        raise ValueError(f"policy: expected that of an MoE, got {type(policy).__name__}")
    return policy


@dataclass
class MoeEngine:
    """A rollout engine with defects and a replay mode; one object serves one run, whose predictor it holds.

    `num_draws` is K, the number of fixed draws of its noise, seeded by `seed`; without noise one is enough. The
    predictor learns at `predictor_rate`, whatever the policy's rate.
    """

    config: EngineConfig
    mode: Mode = "none"
    num_draws: int = 1
    seed: int = 0
    predictor_rate: float = PREDICTOR_RATE
    _trainer: PredictorTrainer | None = None

    def roll_out(self, sampling: MovablePolicy, policy: MovablePolicy) -> list[MoeRollout]:
        """The rollouts of all draws, each with its old pass; without a replay of mu, all share one old pass."""
        now, forest = moe(policy), moe(policy).tree
        temperature = now.sequences.temperature
        check_one_policy(self.config, "training.lag", temperature)
        # Old's routers are scored whether or not an objective needs them: it is one look-up per row.
        algorithm = Algorithm(objective=SHIFTED, mode=self.mode, temperature=temperature)
        engine, predictor = rollout_engine(now.model, self.config, forest.tree), self._predictor(now.model)
        hand_over(algorithm, engine, learner_of(moe(sampling).model, self.mode, predictor), version=0)
        keeps = algorithm.passes.rollout == "predicted"
        # A repeated prompt has noise of its own: one walk makes all K draws, in shared passes.
        found = engine.walk(now.prompts * self.num_draws, forest.tree, self.seed, temperature, keeps)
        # The walk's roots are draw-major, and children stay with their parents: a chunk of any depth is one draw.
        logp_mu = list(zip(*(x_nV.double().chunk(self.num_draws) for x_nV in found.logp), strict=True))
        record = found.record(now.model)
        # From the row of the prompt's last token on, which predicts the first response token: `row_weights`' rows.
        features = found.features(now.model, len(now.prompts[0].tokens) - 1) if keeps else None
        learner, shared, rollouts = learner_of(now.model, self.mode, predictor), None, []
        for k, mu in enumerate(logp_mu):
            own = range(k * len(now.sequences), (k + 1) * len(now.sequences))
            if shared is None or algorithm.passes.records_rollout:
                kept = None if features is None else features.select(own)
                rolled = replace(now.sequences, experts=record.select(own), features=kept)
                logp_old, old, trained = _scored(algorithm, learner, rolled, forest, self.seed)
                shared = logp_old, old, trained, _shift(rolled, algorithm.passes, old)
            logp_old, old, trained, shift = shared
            weight_F = row_weights(forest, mu)
            rollouts.append(MoeRollout(mu, logp_old, trained, shift, old=old, weight_F=weight_F))
        return rollouts

    def learn(self, rollouts: Sequence[Rollout], trained: Sequence[TreePolicy]) -> float | None:
        """Takes one step of the predictor on the live logits of `trained`, rows weighted by their probability under mu.

        Returns its expected loss before the step, in nats; None if no pass is predicted.
        """
        if self._trainer is None:
            return None
        teachers, logits, weights = [], [], []
        for rollout, policy in zip(rollouts, trained, strict=True):
            assert isinstance(rollout, MoeRollout) and isinstance(policy, MoePolicy), "a rollout of another engine"
            teacher, live = None if rollout.old is None else rollout.old.teacher, policy.features
            assert teacher is not None and live is not None and rollout.weight_F is not None, "a pass without features"
            teachers.append(teacher)
            logits.append(live.logits.detach())
            # Each draw of the noise counts 1 / K: over all draws the weights sum to 1, as the trainer expects.
            weights.append(rollout.weight_F / len(rollouts))
        weight_F = torch.cat(weights).to(logits[0])
        features, rate = RouterFeatures.concat(teachers), self.predictor_rate
        return self._trainer.step(features, torch.cat(logits), rate, weight_F=weight_F)["predictor/loss"]

    def _predictor(self, model: MoE) -> dict[int, Float[Tensor, "D E"]] | None:
        """W_p by layer, initially zero; None if no pass is predicted."""
        if not PASSES[self.mode].trains_predictor:
            return None
        if self._trainer is None:
            # Multiplier 1: `learn` gives the predictor's own rate, where a run gives the model's.
            sizes, settings = model.config, PredictorSettings(learning_rate_multiplier=1.0)
            self._trainer = PredictorTrainer(
                sizes.moe_layers, sizes.hidden_size, sizes.num_experts, settings, dtype=model.norm.dtype
            )
        return self._trainer.weights()


def _scored(
    algorithm: Algorithm, learner: SandboxTrainingEngine, rolled: Rollouts, forest: Forest, seed: int
) -> tuple[Edges, OldPass, Callable[[MovablePolicy], TreePolicy]]:
    """log old of every edge, the old pass, and the map from a policy to the one whose gradients are taken."""
    rewards_PG = torch.zeros(1, len(rolled))  # an old pass does not read them
    old = old_pass(0, algorithm, learner, Collected(rolled, rewards_PG, {}), seed)
    assert old.scores.logp_top is not None, "the deepest responses were scored without all tokens"
    logp_BTV = old.scores.logp_top.padded().double()
    logp_old = [logp_BTV[owner_n, t] for t, owner_n in enumerate(owners(forest))]
    if algorithm.passes.gradient == "natural":
        return logp_old, old, lambda policy: policy
    return logp_old, old, _once(lambda policy: moe(policy).routed(old.gradient))


def row_weights(forest: Forest, logp_mu: Edges) -> Float[Tensor, " F"]:
    """The expected share of each row of the deepest responses among all rows of mu's responses.

    A node occurs in one row per deepest descendant; together these rows have its probability.
    """
    T, W = forest.max_length, forest.num_continuing
    length = expected_length(forest, logp_mu)
    each = [r_n.repeat_interleave(W ** (T - 1 - t)) / W ** (T - 1 - t) for t, r_n in enumerate(forest.reach(logp_mu))]
    return torch.stack(each, dim=1).reshape(-1) / length


__all__ = ["PREDICTOR_RATE", "MoeEngine", "MoePolicy", "MoeRollout", "owners", "row_weights"]
