"""Small training problems, and the sampled run that exact training is the limit of."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from theory import advantages
from theory.exact.engines import Engine, MovablePolicy
from theory.exact.forest import Forest
from theory.exact.groups import Group
from theory.exact.networks import NetworkPolicy
from theory.exact.policies import TabularPolicy
from theory.exact.rates import reinforce
from theory.exact.trajectory import ExactTask
from theory.exact.tree import Paths, PrefixTree
from theory.objectives import Objective, correction, preset
from theory.streams import stream

SETTLED: dict[str, Objective] = {
    "m2po": preset("grpo_dapo", m2_budget=2e-2, eps_low=0.0, eps_high=0.0),
    "optimal token": replace(reinforce("token_is"), advantage="optimal_token"),
    "gspo, optimal token": preset("gspo", advantage="optimal_token"),
    "m2po, optimal token": preset("grpo", advantage="optimal_token", m2_budget=2e-2, eps_low=0.0, eps_high=0.0),
}
"""Objectives that a whole batch settles something for before its gradient: bounds of a budget, baselines of tokens."""

REJECTING: dict[str, Objective] = {
    "minirl, geo_rs": preset("minirl", correction=correction("geo_rs", lo=0.8, hi=1.2)),
    "grpo_dapo, seq_mis": preset("grpo_dapo", correction=correction("seq_mis", lo=0.7, hi=1.3)),
}
"""Objectives that reject some responses."""

NORMALISED: dict[str, Objective] = {
    f"grpo, {name} over its mean": preset("grpo", correction=correction(name, cap=1.5), normalise_weights=True)
    for name in ("token_tis", "seq_tis")
}
"""Objectives whose weights a whole batch divides by their mean."""


def groups_of(objective: Objective, groups: list[Group]) -> list[Group]:
    """The groups that an objective can be enumerated with."""
    return [one for one in groups if one.num_responses is None or not objective.has_token_advantages]


def make_task(
    kind: str = "network", T: int = 3, prompts: int = 2, openings: int = 2, seed: int = 0
) -> tuple[ExactTask, MovablePolicy]:
    """Rewards 0, 0.5 or 1, all 0 in the last context, and a random first policy."""
    forest = Forest.uniform(PrefixTree(3, T, has_end=True), prompts, openings)
    generator = stream(seed, "exact runs", kind)
    reward_CY = torch.randint(3, (forest.num_contexts, forest.tree.num_responses), generator=generator).double() / 2
    if forest.num_contexts > 1:
        reward_CY[-1] = 0.0
    if kind == "tabular":
        return ExactTask(forest, reward_CY.view(-1)), TabularPolicy.random(forest, generator)
    return ExactTask(forest, reward_CY.view(-1)), NetworkPolicy.random(forest, generator, num_hidden=6)


def sampled_run(
    task: ExactTask,
    first: MovablePolicy,
    engine: Engine,
    objective: Objective,
    n: int,
    rate: float,
    num_updates: int,
    generator: torch.Generator,
) -> Tensor:
    """Parameters after updates from n sampled responses per prompt each, as a trainer makes them: its own way.

    Contexts and responses are drawn from mu, advantages are those of the group, the objective is called on the batch.
    """
    forest, policy = task.forest, first
    for _ in range(num_updates):
        mu, logp = engine.samplers(policy)[0], policy.logp()
        probability_Y = forest.log_probabilities(mu).exp()
        rows, gains = [], []
        for prompt in range(max(forest.prompts) + 1):
            drawn = torch.multinomial(
                torch.where(forest.prompt_of_response == prompt, probability_Y, 0.0), n, True, generator=generator
            )
            rows.append(drawn)
            gains.append(advantages.ADVANTAGES[objective.advantage](task.reward_Y[drawn][None])[0])
        batch, advantages_B = torch.cat(rows), torch.cat(gains)
        whole = forest.whole
        paths = Paths(whole.nodes_BT[batch], whole.tokens_BT[batch], whole.is_response_BT[batch])
        leaf_BT = forest.gather(logp, paths).requires_grad_()
        out = objective(leaf_BT, leaf_BT.detach(), forest.gather(mu, paths), advantages_B, paths.is_response_BT)
        edges = forest.zero_edges()
        forest.scatter(edges, torch.autograd.grad(out.objective, leaf_BT)[0], paths)
        policy = policy.moved(rate * policy.pullback(edges))
    return policy.parameters
