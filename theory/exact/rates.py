"""Orders of convergence: how fast a gap closes as pi = mu + eps x direction approaches mu, predicted, then measured.

A gap that goes as eps^k has slope k on log-log axes. The slope is fitted for each of several policies and directions,
and its interval is that of the mean over them. Letters: theory/exact/tree.py.
Paper: MiniRL (arXiv 2512.01374) sec. 2.3, whose "first order" the slopes quantify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from theory.exact.estimator import estimate
from theory.exact.groups import Group
from theory.exact.levels import sequence_kl
from theory.exact.policies import LinearPolicy, TabularPolicy
from theory.exact.problem import Problem, value
from theory.objectives import Objective, correction, preset

SCALES = tuple(float(x) for x in np.geomspace(1e-4, 1e-2, 9))
"""Scales of the fit: small enough for the leading term, large enough for float64's 16 digits in a slope-2 gap."""

Policy = LinearPolicy | TabularPolicy
Gap = Callable[[Policy, Float[Tensor, " Q"], float, Float[Tensor, " Y"]], float]


@dataclass(frozen=True)
class Rate:
    """A predicted and a measured slope: its mean over policies and the 95% t-interval of that mean."""

    name: str
    predicted: float
    slope: float
    low: float
    high: float
    num_policies: int


def slope(scales: Sequence[float], gaps: Sequence[float]) -> float:
    """The least-squares slope of log gap against log scale. Raises ValueError where a gap is not positive."""
    if not all(gap > 0 for gap in gaps):
        raise ValueError(f"expected positive gaps to take logarithms of, got {min(gaps)}")
    # On log-log axes, so that every scale weighs alike: the largest gaps would dominate a fit of the gaps.
    return float(np.polyfit(np.log(scales), np.log(gaps), 1)[0])


def rate(name: str, predicted: float, slopes: Sequence[float]) -> Rate:
    """Mean and interval of slopes, one per policy. Raises ValueError for fewer than 2."""
    if len(slopes) < 2:
        raise ValueError(f"expected slopes of at least 2 policies, got {len(slopes)}")
    mean, error = float(np.mean(slopes)), float(stats.sem(slopes))
    half = float(stats.t.ppf(0.975, len(slopes) - 1)) * error
    return Rate(name, predicted, mean, mean - half, mean + half, len(slopes))


# ---- the gaps --------------------------------------------------------------------------------------------------------


def reinforce(weight: str) -> Objective:
    """A log pi times a weight on pi/mu: "none", or the name of a correction, untruncated."""
    if weight == "none":
        return preset("reinforce")
    uncut = {} if weight == "token_is" else {"cap": math.inf}
    return preset("reinforce", correction=correction(weight, numerator="pi", **uncut))


def _at(mu: Policy, direction: Tensor, eps: float, reward_Y: Tensor) -> Problem:
    # mu is old as well: these gaps are of pi against mu alone.
    logp_mu = mu.logp()
    return Problem(mu.moved(eps * direction), logp_mu, logp_mu, reward_Y)


def weight_gap(objective: Objective) -> Gap:
    """||E_mu[estimator] - grad J_seq|| at pi = mu + eps d, without a baseline.

    Token weight: grad J_seq - grad J_token = E_mu[R sum_t (W - w_t) g_t], and W - w_t = O(eps) while R and g_t stay:
    slope 1. No weight: W - 1 = O(eps) too: slope 1; what differs is the constant. Prefix weight: W - W_(<=t) is the
    weight of what comes after t, O(eps) again: slope 1. Length normalisation: at eps = 0 the gap is
    E_mu[R sum_t (1 - 1/|y|) g_t], which is not a rescaled gradient where lengths differ: slope 0.
    """

    def gap(mu: Policy, direction: Tensor, eps: float, reward_Y: Tensor) -> float:
        problem = _at(mu, direction, eps, reward_Y)
        result = estimate(problem, objective, Group(None, "none"))
        # Length normalisation changes the gradient's scale, which a learning rate can undo: only direction counts.
        return result.direction_bias if objective.aggregation.name == "length_norm" else result.bias

    return gap


def improvement_gap(mu: Policy, direction: Tensor, eps: float, reward_Y: Tensor) -> float:
    """|J_seq(pi) - J_seq(mu) - eps <d, grad J_token(mu)>|.

    At pi = mu the surrogate's gradient is the true one (MiniRL Eq. 2 and 4), so this is the remainder of a first-order
    Taylor expansion: slope 2.
    """
    start, moved = _at(mu, direction, 0.0, reward_Y), _at(mu, direction, eps, reward_Y)
    surrogate = estimate(start, reinforce("token_is"), Group(None, "none")).mean
    return abs(value(moved) - value(start) - eps * float(direction @ surrogate))


def kl_gap(mu: Policy, direction: Tensor, eps: float, reward_Y: Tensor) -> float:
    """KL(mu || pi) of responses: its first derivative at pi = mu is E_mu[grad log pi] = 0, its second the Fisher
    information: slope 2. So a bias of slope 1 grows as the root of the KL."""
    return sequence_kl(mu.tree, mu.logp(), mu.moved(eps * direction).logp())


RATES: dict[str, tuple[float, Gap]] = {
    "bias of the token weight": (1.0, weight_gap(reinforce("token_is"))),
    "bias of no weight": (1.0, weight_gap(reinforce("none"))),
    "bias of the prefix weight": (1.0, weight_gap(reinforce("prefix_tis"))),
    "bias of length normalisation": (
        0.0,
        weight_gap(preset("reinforce", correction=correction("token_is", numerator="pi"), aggregation="length_norm")),
    ),
    "error of the predicted improvement": (2.0, improvement_gap),
    "KL(mu || pi)": (2.0, kl_gap),
}
"""Each gap with its predicted slope; the derivation is in the gap's docstring."""


def measure(
    policies: Sequence[tuple[Policy, Float[Tensor, " Q"], Float[Tensor, " Y"]]],
    scales: Sequence[float] = SCALES,
    names: Sequence[str] = tuple(RATES),
) -> list[Rate]:
    """The named rates as measured over these policies, each with its direction and rewards."""
    rates = []
    for name in names:
        predicted, gap = RATES[name]
        slopes = [slope(scales, [gap(mu, d, eps, reward) for eps in scales]) for mu, d, reward in policies]
        rates.append(rate(name, predicted, slopes))
    return rates
