"""Laws of the noise of a sampled update: its variance is that of real groups, its draws have their covariance."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.theory.exact_runs import SETTLED, groups_of, make_task
from theory import advantages
from theory.exact import noise
from theory.exact.batch import Batch
from theory.exact.engines import engine
from theory.exact.estimator import coefficients, estimate
from theory.exact.expected import Update
from theory.exact.groups import Group
from theory.exact.noise import draw, variance
from theory.exact.problem import Problem
from theory.exact.rates import reinforce
from theory.exact.training import Settings, train
from theory.objectives import AGGREGATIONS, PRESETS, Objective, preset
from theory.streams import stream

# The advantages, denominators and signs that a variance tells apart; test_exact_update.py has every objective.
OBJECTIVES = {name: PRESETS[name] for name in ("reinforce", "grpo", "grpo_dapo", "gspo", "minirl")} | SETTLED
GROUPS = [Group(None, "mean"), Group(None, "none"), Group(3)]


def updates(objective: Objective, group: Group, num_samplers: int = 1, **sizes: int) -> list[Update]:
    """Updates of a stale policy, one for each sampler."""
    task, policy = make_task(T=2, **sizes)
    generator = stream(0, "noise")
    step = torch.randn(policy.parameters.shape, generator=generator, dtype=torch.float64)
    old = policy.moved(0.1 * step)
    samplers = [engine("fixed", 0.5, old, generator).samplers(old)[0] for _ in range(num_samplers)]
    return [Update.at(Batch(task.forest, mu, old.logp(), task.reward_Y, objective, group), policy) for mu in samplers]


def response_gradients(update: Update) -> Tensor:
    """u(s, y): the gradient of each response at advantage +1 and -1, one pull-back each."""
    batch = update.batch
    mask_BT = batch.forest.whole.is_response_BT
    rows = []
    for sign in (1.0, -1.0):
        signs_B = torch.full((len(update.pi_BT),), sign, dtype=torch.float64)
        rows.append(pulled(update, coefficients(batch.objective, *logp(update), signs_B, mask_BT)))
    return torch.stack(rows)


def logp(update: Update) -> tuple[Tensor, Tensor, Tensor]:
    """log pi, log old and log mu of every token."""
    return update.pi_BT, update.batch.old_BT, update.batch.mu_BT


def pulled(update: Update, c_BT: Tensor) -> Tensor:
    """sum_t c_t grad log pi_t of each response, (B, Q)."""
    return torch.stack([update.pullback(torch.eye(len(c_BT)).double()[y, :, None] * c_BT) for y in range(len(c_BT))])


def covariance_of_draws(every: list[Update], centred: bool, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A draw is L e, e standard normal, so its covariance is L L^T: L is found a column at a time, e a unit vector."""
    place = [0, -1]  # of the next number asked for, and of the 1

    def unit(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        e = torch.zeros(math.prod(shape), dtype=torch.float64)
        if 0 <= place[1] - place[0] < len(e):
            e[place[1] - place[0]] = 1.0
        place[0] += len(e)
        return e.view(tuple(shape))

    monkeypatch.setattr(noise, "_normal", unit)
    generator, columns = stream(0, "unused"), []
    assert float(draw(every, centred, generator).abs().max()) == 0.0
    for i in range(place[0]):
        place[:] = [0, i]
        columns.append(draw(every, centred, generator))
    L = torch.stack(columns, dim=1)
    return L @ L.T


def all_groups(update: Update) -> tuple[Tensor, Tensor]:
    """Every ordered group of G responses of one prompt, for each prompt: its probability and its own estimate.

    Advantages and denominator are the group's, as a trainer computes them.
    """
    batch, G = update.batch, update.batch.group.num_responses
    assert G is not None
    u_sYQ, prompt_Y = response_gradients(update), batch.forest.prompt_of_response
    chances, estimates = [], []
    for prompt in range(int(prompt_Y.max()) + 1):
        rows = (prompt_Y == prompt).nonzero()[:, 0]
        y_MG = torch.cartesian_prod(*[rows] * G)
        p_y = batch.probability_Y / batch.probability_Y[rows].sum()
        A_MG = advantages.ADVANTAGES[batch.objective.advantage](batch.reward_Y[y_MG])
        by_length = batch.objective.aggregation.counts == "tokens"
        num_M = batch.forest.lengths[y_MG].sum(1).double() if by_length else torch.full((len(y_MG),), float(G)).double()
        total_MQ = torch.zeros(len(y_MG), u_sYQ.shape[2], dtype=torch.float64)
        for g in range(G):
            total_MQ += A_MG[:, g, None].abs() * u_sYQ[(A_MG[:, g] < 0).long(), y_MG[:, g]]
        chances.append(batch.probability_Y[rows].sum() * p_y[y_MG].prod(1))
        estimates.append(total_MQ / num_M[:, None])
    return torch.cat(chances), torch.cat(estimates)


# ---- variance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_variance_is_the_audit_s(name: str) -> None:
    """On one prompt, at three distinct pi, old and mu, it is the variance that the audit gives, to rounding."""
    objective = OBJECTIVES[name]
    for group in groups_of(objective, GROUPS):
        (update,) = updates(objective, group, prompts=1, openings=1)
        batch = update.batch
        audited = estimate(
            Problem(update.policy, batch.logp_mu, batch.logp_old, batch.reward_Y), objective, group
        ).variance
        assert variance([update]) == pytest.approx(audited, rel=1e-10)


def test_draws_are_standard_normal() -> None:
    """E||draw||^2 over 400 draws is the variance, to five standard errors."""
    every = updates(preset("reinforce"), Group(None))
    generator = stream(0, "draws")
    squares = torch.stack([draw(every, False, generator).square().sum() for _ in range(400)])
    assert float(squares.mean()) == pytest.approx(variance(every), abs=5 * float(squares.std()) / 20)
    assert 5 * float(squares.std()) / 20 < 0.3 * variance(every)


# ---- covariance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "centred"),
    [*itertools.product(["none", "token_is", "seq_tis", "per length"], [False, True]), ("optimal token", False)],
)
def test_draws_have_the_covariance_of_one_response(weight: str, centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With infinite groups it is that of a(y) u(y), y from a sampler at random, to rounding; so is the expectation.

    Centred, u is sum_t w_t g_t less its mean under mu given the prefix, a response at a time.
    """
    per_length = {"per length": preset("reinforce", aggregation="length_norm")}
    objective = (SETTLED | per_length).get(weight) or reinforce(weight)
    every = updates(objective, Group(None, "mean"), num_samplers=2)
    second, mean = 0.0, 0.0
    for one in every:
        batch = one.batch
        if batch.token_shares_BT is None:
            u_YQ = response_gradients(one)[0] - (conditional_means(one) if centred else 0)
            each_YQ = (batch.shares_sY[0] - batch.shares_sY[1])[:, None] * u_YQ
        else:
            on_BT = batch.forest.whole.is_response_BT
            each_YQ = pulled(one, coefficients(objective, *logp(one), batch.token_shares_BT, on_BT))
        p_Y = batch.probability_Y / len(every)
        second, mean = second + (p_Y[:, None] * each_YQ).T @ each_YQ, mean + p_Y @ each_YQ
    expected = torch.stack([one.gradient - one.drift if centred else one.gradient for one in every]).mean(0)
    assert torch.allclose(torch.as_tensor(mean), expected, atol=1e-14)
    found, covariance = covariance_of_draws(every, centred, monkeypatch), second - expected.outer(expected)
    assert torch.allclose(found, covariance, atol=1e-13) and float(covariance.trace()) > 1e-2
    assert centred or float(found.trace()) == pytest.approx(variance(every), rel=1e-10)


def conditional_means(update: Update) -> Tensor:
    """sum_t E_mu[w_t g_t | y_<t] of every response: the mean w_t g_t of all that pass its prefix."""
    batch, forest = update.batch, update.batch.forest
    on, rows = forest.whole.is_response_BT, torch.zeros(forest.num_responses, len(update.gradient)).double()
    signs_B = torch.ones(forest.num_responses, dtype=torch.float64)
    # The mean is of terms before the aggregation, which then gives each response's own factor to it.
    summed = replace(batch.objective, aggregation=AGGREGATIONS["token_sum"])
    c_BT = coefficients(summed, update.pi_BT, batch.old_BT, batch.mu_BT, signs_B, on)
    is_mean = batch.objective.aggregation.name == "length_norm"
    factor_Y1 = (1 / forest.lengths if is_mean else torch.ones(forest.num_responses))[:, None].double()
    for node in forest.node_BT[on].unique().tolist():
        at_BT = on & (forest.node_BT == node)
        p_BT = torch.where(at_BT, batch.probability_Y[:, None], 0.0)
        rows += at_BT.any(1)[:, None] * factor_Y1 * update.pullback(p_BT * c_BT / p_BT.sum())
    return rows


@pytest.mark.parametrize("name", ["grpo", "minirl"])
def test_draws_have_the_covariance_of_real_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With groups of 3 it is 3 times that of the estimate of a group of a prompt and sampler at random, to rounding."""
    every = updates(preset(name), Group(3), num_samplers=2)
    p_M, estimate_MQ = (torch.cat(both) for both in zip(*map(all_groups, every), strict=True))
    p_M = p_M / len(every)
    assert float(p_M.sum()) == pytest.approx(1.0)
    mean = p_M @ estimate_MQ
    assert torch.allclose(mean, torch.stack([one.gradient for one in every]).mean(0), atol=1e-13)
    covariance = 3 * ((p_M[:, None] * estimate_MQ).T @ estimate_MQ - mean.outer(mean))
    found = covariance_of_draws(every, False, monkeypatch)
    # Eigenvalues of 0 come out as 1e-17, their roots as 3e-9, and a draw's square again as 1e-17.
    assert torch.allclose(found, covariance, atol=1e-12) and float(covariance.trace()) > 1e-2
    assert float(found.trace()) == pytest.approx(variance(every), rel=1e-10)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_an_infinite_batch_is_the_expected_run() -> None:
    """batch_size inf gives every bit of the run without noise, and as B grows the run goes there as 1/sqrt(B)."""
    task, first = make_task(T=2)
    own = engine("fixed", 0.3, first, stream(0, "engine"))

    def run(batch_size: float, seed: int = 0) -> Tensor:
        settings = Settings(preset("minirl"), "sgd", 0.5, 4, batch_size=batch_size)
        return train(task, first, own, settings, stream(seed, "noise")).policy.parameters

    expected = train(task, first, own, Settings(preset("minirl"), "sgd", 0.5, 4)).policy.parameters
    assert torch.equal(run(math.inf), expected)
    far, near = (float((run(B) - expected).norm()) for B in (1e6, 1e10))
    # The same draws, a hundred times smaller; what is left is of second order, 1e-3 of it.
    assert far / near == pytest.approx(100, rel=0.01) and near > 0


def test_noise_is_of_its_stream() -> None:
    """The same generator gives the same run, another one another."""
    task, first = make_task(T=2)
    own, settings = (
        engine("fixed", 0.3, first, stream(0, "engine")),
        Settings(preset("minirl"), batch_size=8.0, num_updates=3),
    )
    one, two, other = (train(task, first, own, settings, stream(seed, "noise")) for seed in (0, 0, 1))
    assert one["reward"] == two["reward"] != other["reward"]


def test_bad_noise_is_refused() -> None:
    """A batch of 0, a flow with noise, a centred clip with noise, noise without a generator: one line each."""
    with pytest.raises(ValueError, match=r"batch_size: expected a number > 0, or inf for no noise, got 0"):
        Settings(preset("minirl"), batch_size=0.0)
    with pytest.raises(ValueError, match=r"flow: expected batch_size inf, got 8\.0"):
        Settings(preset("reinforce"), "flow", batch_size=8.0)
    with pytest.raises(ValueError, match="grpo: expected the trust region none under a centred score with noise"):
        Settings(preset("grpo"), centred=True, batch_size=8.0)
    task, first = make_task(T=2)
    own = engine("exact", 0.0, first, stream(0, "engine"))
    with pytest.raises(ValueError, match=r"generator: expected one for the noise of batch_size 8\.0, got None"):
        train(task, first, own, Settings(preset("minirl"), batch_size=8.0))
