"""Laws of the metric of drift: its expectation is an enumerated length, and its error that of repeated steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.exact_world import make_world
from theory import advantages
from theory.contracts import MiniBatch, Prompt, Response, Rollouts, UpdateStats
from theory.drift import drift_metrics, squared_drift
from theory.exact.drift_metric import token_drift
from theory.exact.expected import expected_update
from theory.exact.groups import Group
from theory.objectives import Objective, correction, preset
from theory.streams import stream

V = 6
TOKEN = preset("reinforce", correction=correction("token_is", numerator="pi"))
OBJECTIVES: dict[str, Objective] = {
    "no weight": preset("reinforce"),
    "pi/mu": TOKEN,
    "pi/mu up to 1.1": preset("reinforce", correction=correction("token_tis", numerator="pi", cap=1.1)),
    "IcePop": preset("reinforce", correction=correction("icepop", lo=0.8, hi=1.2)),
    "MiniRL": preset("minirl"),
    "PPO": preset("ppo"),
    "centred": preset("ppo", centering="full"),
}


def one_context(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi, log old and log mu of every token after one context."""
    logits, step, engine = torch.randn(3, V, generator=stream(seed, "drift metric"), dtype=torch.float64)
    old = (logits + 0.4 * step).log_softmax(-1)
    return logits, old, (old + 0.4 * engine).log_softmax(-1)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=8)
@given(seed=st.integers(0, 200), advantage=st.sampled_from([-1.5, 0.7]))
def test_the_expectation_is_the_length_in_logits(name: str, seed: int, advantage: float) -> None:
    """E_mu[x] = ||mu c - A pi||^2, and its root is within |E_mu[c] - A| of the length of E_mu[c grad log pi]."""
    objective = OBJECTIVES[name]
    logits, old, mu = one_context(seed)
    pi = logits.log_softmax(-1)
    column = [x[:, None] for x in (pi, old, mu)]
    every = torch.ones(V, 1, dtype=torch.bool)
    x_V1, kept_V1 = squared_drift(objective, *column, torch.full((V,), advantage, dtype=torch.float64), every)
    assert kept_V1.all()
    # c by another way: each token alone, d J by its own log pi.
    leaf = pi.clone().requires_grad_()
    rows = [[x[v].view(1, 1) for x in (leaf, old, mu)] for v in range(V)]
    bare = preset("ppo") if name == "centred" else objective
    values = torch.stack(
        [bare(*row, torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool)).objective for row in rows]
    )
    (c,) = torch.autograd.grad(values.sum(), leaf)
    length = (mu.exp() * c - advantage * pi.exp()).norm()
    expected = (mu.exp() @ x_V1[:, 0]).sqrt()
    torch.testing.assert_close(expected, length, atol=1e-12, rtol=0)
    free = logits.clone().requires_grad_()
    ((mu.exp() * c) @ free.log_softmax(-1)).backward()
    assert free.grad is not None
    missing = abs(float(mu.exp() @ c) - advantage)
    assert abs(float(expected - free.grad.norm())) <= missing + 1e-12
    if name == "no weight":
        assert missing < 1e-12 and float(expected) > 1e-3
    if name == "pi/mu":
        assert float(expected) < 1e-12


def test_the_audits_number_is_the_expectation_over_groups() -> None:
    """Over every pair of responses: E[sum of x] / E[tokens], advantages those of the pair, is the square of the
    audit's `drift_tokens`."""
    world = make_world("bigram", V=3, T=2)
    update = expected_update(world.problem, preset("reinforce"), Group(2))
    paths, tree = world.paths, world.tree
    pi, old, mu = (
        tree.gather(x, paths) for x in (world.problem.target.logp(), world.problem.logp_old, world.problem.logp_mu)
    )
    p_Y = mu.sum(1).exp()
    total = count = 0.0
    for i, j in itertools.product(range(tree.num_responses), repeat=2):
        pair = [i, j]
        advantages_B = advantages.group_mean(world.problem.reward_Y[pair][None])[0]
        rows = (x[pair] for x in (pi, old, mu))
        x_BT, _ = squared_drift(preset("reinforce"), *rows, advantages_B, paths.is_response_BT[pair])
        weight = float(p_Y[i] * p_Y[j])
        total += weight * float(x_BT.sum())
        count += weight * int(paths.is_response_BT[pair].sum())
    assert token_drift(update) == pytest.approx(math.sqrt(total / count), rel=1e-12)
    assert float(update.drift.norm()) > 1e-3


def test_a_weight_of_the_whole_gap_has_none_and_others_have_no_number() -> None:
    """Under pi/mu drift and metric are 0; where a token's part depends on others there is no metric."""
    problem = make_world("bigram", V=3, T=2).problem
    weighted = expected_update(problem, TOKEN, Group(4))
    assert float(weighted.drift.norm()) < 1e-14 and token_drift(weighted) < 1e-14
    for objective in (preset("gspo"), preset("reinforce", correction="seq_tis")):
        assert not objective.is_tokenwise
        assert drift_metrics(objective, [step(objective, 4, 0)]) == {}
        assert math.isnan(token_drift(expected_update(problem, objective, Group(4))))
        with pytest.raises(ValueError, match="expected an objective whose tokens add up one by one"):
            squared_drift(objective, *[torch.zeros(1, 1)] * 3, torch.ones(1), torch.ones(1, 1, dtype=torch.bool))


def test_a_policy_whose_responses_are_all_rejected_has_no_number() -> None:
    """No token is kept, so that there is nothing to average: nan, as the sampled metric is absent."""
    objective = preset("reinforce", correction=correction("geo_rs", lo=2.0, hi=3.0))
    update = expected_update(make_world("bigram", V=3, T=2).problem, objective, Group(None))
    assert objective.is_tokenwise and not update.batch.kept_Y.any()
    assert math.isnan(token_drift(update))
    assert drift_metrics(objective, [step(objective, 4, 0)]) == {}


def step(objective: Objective, num: int, seed: int, longest: int = 5) -> tuple[MiniBatch, UpdateStats]:
    """Responses of at least one token from one context's mu, advantages of 1 and -1."""
    logits, old, mu = (x.float() for x in one_context(0))
    generator = stream(seed, "drift metric", "steps")
    lengths = torch.randint(1, longest + 1, (num,), generator=generator).tolist()
    responses, pi_BT = [], torch.zeros(num, max(lengths))
    old_BT = torch.zeros_like(pi_BT)
    for b, T in enumerate(lengths):
        tokens = torch.multinomial(mu.exp(), T, replacement=True, generator=generator)
        responses.append(
            Response(Prompt("0", (1,), ""), tokens, mu[tokens], torch.ones(T, dtype=torch.bool), "stop", 0)
        )
        pi_BT[b, :T], old_BT[b, :T] = logits.log_softmax(-1)[tokens], old[tokens]
    made: Any = MiniBatch(
        Rollouts(tuple(responses)), old_BT, 2.0 * torch.randint(2, (num,), generator=generator) - 1, 0, 1
    )
    return made, UpdateStats({}, pi_BT)


def test_the_error_is_the_spread_of_repeated_steps() -> None:
    """Over 150 steps of 80 responses the standard error is the metric's own standard deviation within 15%."""
    found = [
        drift_metrics(preset("reinforce"), [step(preset("reinforce"), 40, 2 * s + i) for i in range(2)])
        for s in range(150)
    ]
    values, errors = (torch.tensor([one[f"rollout_corr/{name}"] for one in found]) for name in ("drift", "drift_se"))
    assert float(errors.mean() / values.std()) == pytest.approx(1.0, abs=0.15)


def test_the_error_of_two_responses_by_hand() -> None:
    """Of two tokens with x = a and b the error is |a - b| / 2, that of a mean of two, over 2 sqrt(m)."""
    objective = preset("reinforce")
    minibatch, stats = step(objective, 2, 0, longest=1)
    batch = minibatch.rollouts.padded()
    x_BT, kept_BT = squared_drift(
        objective, stats.logp_pi_BT, minibatch.logp_old_BT, batch.logp_mu_BT, minibatch.advantages_B,
        batch.is_response_BT,
    )  # fmt: skip
    assert kept_BT.sum(1).tolist() == [1, 1]
    a, b = (float(x) for x in x_BT.double().sum(1))
    found = drift_metrics(objective, [(minibatch, stats)])
    assert found["rollout_corr/drift_se"] == pytest.approx(abs(a - b) / 4 / math.sqrt((a + b) / 2), rel=1e-12)


def test_rejected_and_padded_tokens_are_left_out() -> None:
    """Off the mask nan goes nowhere, a rejected response has no part, and with none kept there is no number."""
    objective = preset("reinforce", correction=correction("geo_rs", lo=0.5, hi=2.0))
    nan = torch.full((2, 1), torch.nan)
    pi, old, mu = (torch.cat([torch.tensor(x)[:, None], nan], 1) for x in ([-1.0, -1.0], [-1.0, -1.0], [-1.2, -3.0]))
    mask = torch.tensor([[True, False], [True, False]])
    x_BT, kept_BT = squared_drift(objective, pi, old, mu, torch.tensor([1.0, 1.0]), mask)
    assert kept_BT.tolist() == [[True, False], [False, False]]
    expected = math.exp(-1.2) * (1 - math.exp(0.2)) ** 2
    assert x_BT[0, 0].item() == pytest.approx(expected, rel=1e-5) and x_BT.sum() == x_BT[0, 0]


def test_the_square_of_a_huge_ratio_is_a_number() -> None:
    """PPO bounds no ratio of a token with A < 0: mu (c - A pi/mu)^2 at c = A e^55 is e^100, above float32's largest."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    pi, old, mu = (torch.full((1, 1), x, dtype=torch.float32) for x in (-5.0, -60.0, -10.0))
    x_BT, _ = squared_drift(preset("ppo"), pi, old, mu, torch.full((1,), -1.0, dtype=torch.float32), mask)
    assert math.log(x_BT.item()) == pytest.approx(100.0, rel=1e-6)
