"""Laws of the audit's rows: sums over all responses, at the distances that were asked for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from lab.audit import AuditConfig, audit
from lab.audit.cases import draw_reward, exact_cases
from lab.audit.config import AuditObjective, GroupBlock
from theory.exact.problem import Problem
from theory.exact.tree import PrefixTree
from theory.objectives import Objective
from theory.streams import stream

pytestmark = pytest.mark.unchecked


def string_logp(edges: list[Tensor], tokens: tuple[int, ...]) -> Tensor:
    """log-probabilities of a string's tokens, walking down the tree; no end token."""
    node, parts = 0, []
    for t, token in enumerate(tokens):
        parts.append(edges[t].log_softmax(1)[node, token])
        node = node * edges[t].shape[1] + token
    return torch.stack(parts)


def by_hand(
    problem: Problem, objective: Objective, size: int, advantage: Callable[[Tensor, float], Tensor]
) -> tuple[Tensor, float, Tensor]:
    """Mean, trace of the covariance times size, and truth: over every group of `size` strings, by autograd."""
    tree = problem.target.tree
    logits = [x.clone().requires_grad_() for x in problem.target.logp()]  # log-probabilities are logits, too
    strings = list(itertools.product(range(tree.num_tokens), repeat=tree.max_length))
    mu = torch.stack([string_logp(list(problem.logp_mu), s) for s in strings])
    old = torch.stack([string_logp(list(problem.logp_old), s) for s in strings])
    pi = torch.stack([string_logp(logits, s) for s in strings])
    R, p_mu = problem.reward_Y, mu.sum(1).exp()
    value = (pi.sum(1).exp() * R).sum()
    truth = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, logits, retain_graph=True)])
    mean, second, mean_reward = torch.zeros_like(truth), 0.0, float((p_mu * R).sum())
    for chosen in itertools.product(range(len(strings)), repeat=size):
        rows = list(chosen)
        probability = float(p_mu[rows].prod())
        advantages = advantage(R[rows], mean_reward)
        output = objective(pi[rows], old[rows], mu[rows], advantages, torch.ones_like(mu[rows], dtype=torch.bool))
        parts = torch.autograd.grad(output.objective, logits, retain_graph=True)
        gradient = torch.cat([g.reshape(-1) for g in parts])
        mean += probability * gradient
        second += probability * float(gradient.square().sum())
    return mean, size * (second - float(mean.square().sum())), truth


HANDS: list[tuple[str, str, str, Callable[[Tensor, float], Tensor]]] = [
    ("token", "infinite", "mean", lambda R, mean: R - mean),
    ("token", "infinite", "none", lambda R, mean: R),
    ("none", "2", "own", lambda R, mean: R - R.mean()),
    ("sequence", "2", "own", lambda R, mean: R - R.mean()),
]


@pytest.mark.parametrize(("label", "group", "baseline", "advantage"), HANDS, ids=[" ".join(h[:3]) for h in HANDS])
def test_a_row_is_the_sum_over_all_groups(
    config: AuditConfig,
    frame: pd.DataFrame,
    label: str,
    group: str,
    baseline: str,
    advantage: Callable[[Tensor, float], Tensor],
) -> None:
    """Bias, cosine, variance and error of rows are those of summing autograd over every group of strings."""
    case = next(c for c in exact_cases(config, config.policies[0]).each if c.keys["length"] == 3)
    level = (1e-2, 3e-3)
    objective = next(one.build() for one in config.objectives if one.name == label)
    size = 1 if group == "infinite" else int(group)
    mean, variance, truth = by_hand(case.problem(*level), objective, size, advantage)
    found = frame.query(
        "kind == 'tabular' and length == 3 and seed == 0 and reward == @case.keys['reward'] and objective == @label "
        "and asked_discrepancy == 1e-2 and asked_staleness == 3e-3 and group == @group and baseline == @baseline"
    )
    assert len(found) == 1
    row, length = found.iloc[0], float(truth.norm())
    # Both sides are sums of some 100 float64 terms: measured agreement 1e-14, x 100.
    assert row["bias"] == pytest.approx(float((mean - truth).norm()) / length, abs=1e-12)
    assert row["cosine"] == pytest.approx(float(mean @ truth) / float(mean.norm()) / length, abs=1e-12)
    assert row["variance"] == pytest.approx(variance / length**2, rel=1e-10)
    error = math.sqrt(float((mean - truth).square().sum()) + variance / 64) / length
    assert row["error_64"] == pytest.approx(error, rel=1e-10)


def test_distances_are_those_asked_for(frame: pd.DataFrame) -> None:
    """KL(mu || old) and KL(old || pi) per token are the levels of the config, to the bisection's relative 1e-9."""
    for measured, asked in (("kl_mu_old", "asked_discrepancy"), ("kl_old_pi", "asked_staleness")):
        assert frame[measured].to_numpy() == pytest.approx(frame[asked].to_numpy(), rel=1e-6, abs=1e-12)
    same = frame[frame["asked_staleness"] == 0]
    assert same["kl_mu_pi"].to_numpy() == pytest.approx(same["kl_mu_old"].to_numpy(), rel=1e-12)


def test_the_full_weight_is_unbiased(frame: pd.DataFrame) -> None:
    """With the whole sequence's weight and an infinite group the expected gradient is the true one; token's is not."""
    infinite = frame[(frame["group"] == "infinite") & (frame["kind"] == "tabular")]
    bias = infinite.groupby("objective")["bias"].min()
    assert infinite[infinite["objective"] == "sequence"]["bias"].max() < 1e-12  # float64 rounding, measured 1e-15
    assert bias["token"] > 1e-4 and bias["none"] > 1e-4


def test_where_all_is_rejected_there_is_no_drift_metric(config: AuditConfig) -> None:
    """No kept token, so `drift_tokens` is nan, and the rows of other objectives have their numbers."""
    asked = {"name": "geo_rs", "lo": 20.0, "hi": 30.0}
    rejecting = AuditObjective.model_validate({"preset": "reinforce", "label": "nothing", "correction": asked})
    block = config.policies[0].model_copy(update={"lengths": (2,), "seeds": 1})
    few = {"policies": (block,), "objectives": (rejecting, config.objectives[0]), "groups": (GroupBlock(),)}
    found = audit(config.model_copy(update=few)).set_index("objective")["drift_tokens"]
    assert found.loc[["nothing"]].isna().all() and (found.loc[["none"]] > 0).all()


def test_the_split_is_the_bias_with_one_gap_closed(config: AuditConfig, frame: pd.DataFrame) -> None:
    """bias_discrepancy is the bias of the same case at staleness 0; without any gap only the group's size biases."""
    keys = ["policy", "length", "seed", "reward", "objective", "group", "baseline", "asked_discrepancy"]
    alone = frame[frame["asked_staleness"] == 0].set_index(keys)["bias"]
    both = frame[frame["asked_staleness"] > 0].set_index(keys)["bias_discrepancy"]
    assert (alone == both.loc[alone.index]).all()
    reinforce = frame[frame["objective"] == "none"]
    # A group's own mean has 1/G of each response in it, which leaves (G - 1)/G of the gradient.
    expected = np.where(reinforce["group"] == "2", 0.5, 0.0)
    assert reinforce["bias_on_policy"].to_numpy() == pytest.approx(expected, abs=1e-12)
    staleness = frame[(frame["asked_staleness"] == 0)]
    assert staleness["bias_staleness"].to_numpy() == pytest.approx(staleness["bias_on_policy"].to_numpy(), abs=1e-14)


def test_policies_may_have_objectives_of_their_own(frame: pd.DataFrame) -> None:
    """A block's `objectives` leaves the others out; every pairing of the rest is there exactly once."""
    linear = frame[frame["kind"] == "bigram"]
    assert set(linear["objective"]) == {"none", "token"}
    assert len(linear) == 2 * 2 * 4 * 2 * 3  # seeds, rewards, levels, objectives, groups
    assert len(frame) == len(linear) + 6 * 2 * 2 * 4 * 4 * 3
    assert set(linear["policy"]) == {"bigram, 3 tokens with an end"}


def test_the_same_config_gives_the_same_numbers(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Rows depend on the seed alone, bit for bit, and not on which other rewards or objectives are audited."""
    block = config.policies[0].model_copy(update={"lengths": (3,)})
    part = config.model_copy(update={"policies": (block,), "rewards": ("last",), "objectives": config.objectives[1:2]})
    again = audit(part).reset_index(drop=True)
    query = "kind == 'tabular' and length == 3 and reward == 'last' and objective == 'token'"
    pd.testing.assert_frame_equal(again, frame.query(query).reset_index(drop=True))
    assert audit(part.model_copy(update={"seed": 1}))["bias"].ne(again["bias"]).all()
    first, second = (again.loc[again["seed"] == seed, "variance"].to_numpy() for seed in (0, 1))
    assert (first != second).all()  # one seed, one policy


def test_a_reward_is_never_constant() -> None:
    """Draws that pay every response the same are drawn again: with 4 responses a third of sparse ones would be."""
    config = AuditConfig.model_construct(groups=(GroupBlock(),))
    tree = PrefixTree(2, 2)
    for seed in range(50):
        reward_Y = draw_reward(config, tree, "sparse", stream(seed, "test"))
        assert reward_Y.min() < reward_Y.max()
