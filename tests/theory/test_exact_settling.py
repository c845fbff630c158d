"""Laws of what a whole batch settles before its gradient: bounds of a budget, baselines of tokens, the mean weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.theory.exact_runs import NORMALISED, SETTLED, make_task
from theory import advantages
from theory.exact.batch import Batch
from theory.exact.expected import Update
from theory.exact.forest import Forest
from theory.exact.groups import Group
from theory.exact.levels import Edges
from theory.exact.settling import log_mean
from theory.exact.tree import Paths
from theory.objectives import Objective, preset
from theory.streams import stream

OBJECTIVES: dict[str, Objective] = {"grpo": preset("grpo"), **SETTLED, **NORMALISED}


def in_proportion(forest: Forest) -> tuple[Edges, Tensor]:
    """A mu of quarters and halves, and as many of each response as it samples in 16 draws from every context."""
    quarters = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    mu = [torch.stack([quarters.roll(n + t).log() for n in range(size)]) for t, size in enumerate(forest.sizes)]
    counts_Y = (16 * forest.num_contexts * forest.log_probabilities(mu).exp()).round().long()
    return mu, torch.arange(forest.num_responses).repeat_interleave(counts_Y)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_in_mu_s_proportions_gives_the_expected_update(name: str) -> None:
    """A trainer's update on groups that hold each response as often as mu samples it, bounds and baselines of that
    batch included, at three distinct pi, old and mu: two prompts of two openings, to rounding."""
    objective = OBJECTIVES[name]
    task, old = make_task("tabular", T=2)
    forest, generator = task.forest, stream(1, "proportions")
    policy = old.moved(0.3 * torch.randn(old.parameters.shape, generator=generator, dtype=torch.float64))
    mu, rows_B = in_proportion(forest)
    assert len(rows_B) == 64
    whole = forest.whole
    paths = Paths(whole.nodes_BT[rows_B], whole.tokens_BT[rows_B], whole.is_response_BT[rows_B])
    pi_BT, old_BT, mu_BT = (forest.gather(x, paths) for x in (policy.logp(), old.logp(), mu))
    rewards_PG, A_BT = task.reward_Y[rows_B].view(2, -1), None
    A_B = advantages.group_mean(rewards_PG).view(-1)
    if objective.advantage == "optimal_token":
        squares = [x.exp().square().sum(1, keepdim=True).expand_as(x) for x in old.logp()]
        A_BT = advantages.optimal_token(rewards_PG, old_BT, forest.gather(squares, paths), paths.is_response_BT)
    settled = objective
    if objective.m2_budget:
        A_B1 = A_B[:, None] if A_BT is None else A_BT
        settled = objective.within_budget(pi_BT, old_BT, mu_BT, A_B1, paths.is_response_BT)
    leaf_BT = pi_BT.requires_grad_()
    out = settled(leaf_BT, old_BT, mu_BT, A_B, paths.is_response_BT, advantages_BT=A_BT)
    edges = forest.zero_edges()
    forest.scatter(edges, torch.autograd.grad(out.objective, leaf_BT)[0], paths)
    update = Update.at(Batch(forest, mu, old.logp(), task.reward_Y, objective, Group(None)), policy)
    found = policy.pullback(edges)
    assert torch.allclose(update.gradient, found, atol=1e-13) and float(found.norm()) > 1e-2


def test_the_mean_weight_is_of_kept_responses() -> None:
    """Two of three responses are kept, with ratios 1 and 2 and probabilities 0.6 and 0.2: a mean of 1.25. The rejected
    one's e^20 would be nearly all of it."""
    mu_BT = torch.tensor([[-0.5], [-1.6], [-25.0]])
    old_BT = mu_BT + torch.tensor([[0.0], [math.log(2)], [20.0]])
    objective = preset("reinforce", correction="seq_mis", normalise_weights=True)
    mean = log_mean(objective, old_BT, mu_BT, torch.ones(3, 1, dtype=torch.bool), torch.tensor([0.6, 0.2, 0.2]))
    assert mean == pytest.approx(math.log(1.25))
