"""The predicted orders of convergence are the measured ones; levels and rewards are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from theory.exact.levels import (
    REWARDS,
    disturbed,
    expected_length,
    logit_noise,
    scale_at,
    sequence_kl,
    token_kl,
)
from theory.exact.policies import LinearPolicy, TabularPolicy
from theory.exact.rates import RATES, Policy, measure, rate, slope
from theory.exact.tree import PrefixTree
from theory.streams import stream


@pytest.fixture(scope="module", params=[LinearPolicy, TabularPolicy], ids=["shared", "free"])
def cases(request: pytest.FixtureRequest) -> list[tuple[Policy, Tensor, Tensor]]:
    """Six random policies of ragged responses; rewards uniform in [0, 1], so that nothing cancels."""
    tree, generator = PrefixTree(3, 4, has_end=True), stream(0, "rates", request.param.__name__)
    cases = []
    for _ in range(6):
        policy = request.param.random(tree, generator)
        direction = torch.randn(policy.parameters.shape, generator=generator, dtype=torch.float64)
        reward_Y = torch.rand(tree.num_responses, generator=generator, dtype=torch.float64)
        cases.append((policy, direction / direction.norm(), reward_Y))
    return cases


@pytest.mark.parametrize("name", RATES)
def test_slope_is_as_predicted(cases: list[tuple[Policy, Tensor, Tensor]], name: str) -> None:
    """Each measured slope is within 0.005 of its prediction: the next order adds at most eps = 1e-2 of the leading."""
    (measured,) = measure(cases, names=[name])
    assert (measured.name, measured.predicted) == (name, RATES[name][0])
    assert measured.slope == pytest.approx(measured.predicted, abs=5e-3)
    assert measured.high - measured.low < 1e-2


def test_slope_of_known_powers() -> None:
    """A gap 3 eps^k has slope k; gaps that vanish have none."""
    scales = np.geomspace(1e-3, 1e-1, 5).tolist()
    for k in (0.0, 1.0, 2.5):
        assert slope(scales, [3 * eps**k for eps in scales]) == pytest.approx(k, abs=1e-12)
    with pytest.raises(ValueError, match="expected positive gaps"):
        slope(scales, [0.0] * 5)


def test_rate_has_the_interval_of_a_mean() -> None:
    """Mean of 1, 2, 3 is 2 with t-interval 2 +- 4.303 / sqrt(3)."""
    measured = rate("x", 2.0, [1.0, 2.0, 3.0])
    assert (measured.slope, measured.num_policies) == (2.0, 3)
    assert measured.high - 2.0 == pytest.approx(4.302652729696142 / 3**0.5)
    assert 2.0 - measured.low == pytest.approx(4.302652729696142 / 3**0.5)
    with pytest.raises(ValueError, match="at least 2 policies, got 1"):
        rate("x", 2.0, [1.0])


def test_kl_of_responses_is_the_sum_over_them() -> None:
    """sequence_kl = sum_y p(y) log(p(y)/q(y)); a token's share divides by the mean length."""
    tree, generator = PrefixTree(3, 4, has_end=True), stream(1, "levels")
    p, q = (TabularPolicy.random(tree, generator).logp() for _ in range(2))
    log_p, log_q = tree.log_probabilities(p), tree.log_probabilities(q)
    direct = float((log_p.exp() * (log_p - log_q)).sum())
    assert sequence_kl(tree, p, q) == pytest.approx(direct, rel=1e-12)
    length = float((log_p.exp() * tree.lengths).sum())
    assert expected_length(tree, p) == pytest.approx(length, rel=1e-12)
    assert token_kl(tree, p, q) == pytest.approx(direct / length, rel=1e-12)


@pytest.mark.parametrize("target", [0.0, 1e-5, 3e-3, 0.1])
def test_scale_reaches_the_level_asked_for(target: float) -> None:
    """A disturbed policy stands at the KL asked for; scales are tried up to the largest, which is no power of two."""
    tree, generator = PrefixTree(4, 4), stream(2, "levels")
    logp, noise = TabularPolicy.random(tree, generator).logp(), logit_noise(tree, generator)

    def distance(scale: float) -> float:
        return token_kl(tree, disturbed(logp, noise, scale), logp)

    # The KL is quadratic in the scale and, near 1e-12, resolved to float64's 1e-16: hence the absolute part.
    assert distance(scale_at(distance, target)) == pytest.approx(target, rel=1e-6, abs=1e-15)
    with pytest.raises(ValueError, match=r"expected a scale up to 2\.0 to reach 100"):
        scale_at(distance, 100.0, largest=2.0)
    with pytest.raises(ValueError, match=r"expected more than the \S+ that rounding leaves at scale 0, got 1e-30"):
        scale_at(distance, 1e-30)
    assert scale_at(lambda scale: scale, 1.5, largest=2.0) == pytest.approx(1.5)


@pytest.mark.parametrize("has_end", [False, True])
def test_rewards_read_the_response(has_end: bool) -> None:
    """`last` looks at the last answer token alone, `sum_modulo` at the sum; all lie in [0, 1] and are mixed."""
    tree = PrefixTree(4, 3, has_end)
    paths = tree.paths(0, tree.num_responses)
    for name, reward in REWARDS.items():
        values = reward(tree, stream(3, name))
        assert values.shape == (tree.num_responses,)
        assert 0 <= values.min() < values.max() <= 1
    end = 3 if has_end else None
    answers = [
        [a for a in y[m].tolist() if a != end] for y, m in zip(paths.tokens_BT, paths.is_response_BT, strict=True)
    ]
    last, total = (REWARDS[name](tree, stream(3, name)).tolist() for name in ("last", "sum_modulo"))
    assert len({(a[-1], r) for a, r in zip(answers, last, strict=True) if a}) == tree.num_continuing
    assert all(r == 0 for a, r in zip(answers, last, strict=True) if not a)
    sums = {(sum(a) % tree.num_continuing, r) for a, r in zip(answers, total, strict=True)}
    assert len(sums) == tree.num_continuing and sum(r for _, r in sums) == 1
