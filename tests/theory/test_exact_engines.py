"""Engine errors are what their names say, start where they are told to, and vanish at scale 0."""

from __future__ import annotations

import math
from statistics import mean

import pytest
import torch

from theory.exact.engines import BY_SCALE, ERRORS, NUM_DRAWS, engine, engine_at
from theory.exact.forest import Forest
from theory.exact.levels import token_kl
from theory.exact.networks import NetworkPolicy
from theory.exact.policies import TabularPolicy
from theory.exact.trajectory import mean_entropy
from theory.exact.tree import PrefixTree
from theory.streams import stream

FOREST = Forest.uniform(PrefixTree(4, 3), 2, 2)
WITH_LEVEL = [name for name in ERRORS if name not in BY_SCALE]


def policy(seed: int = 0) -> NetworkPolicy:
    return NetworkPolicy.random(FOREST, stream(seed, "engines"), scale=2.0, num_hidden=8)


@pytest.mark.parametrize("name", ["exact", *ERRORS])
def test_no_error_at_scale_zero(name: str) -> None:
    """mu is pi, to rounding, at scale 0: also at another policy than the first."""
    first, other = policy(), policy(1)
    for mu in engine(name, 0.0, first, stream(0, "noise")).samplers(other):
        assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(mu, other.logp(), strict=True))


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_a_policy_and_stays_the_same(name: str) -> None:
    """mu sums to 1 at every node, differs from pi, and is the same when it is asked again or built from that stream."""
    first = policy()
    one, two = (engine(name, 0.4, first, stream(0, "noise")) for _ in range(2))
    for mu, again, built in zip(one.samplers(first), one.samplers(first), two.samplers(first), strict=True):
        assert all(torch.allclose(x.exp().sum(1), torch.ones(len(x)).double()) for x in mu)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(mu, again, built, strict=True))
        assert token_kl(FOREST, mu, first.logp()) > 1e-4


@pytest.mark.parametrize("name", WITH_LEVEL)
def test_a_level_is_where_the_first_policy_starts(name: str) -> None:
    """KL(mu || pi) per token is the one asked for, on average over an engine's draws."""
    first = policy()
    found = engine_at(name, 0.03, first, stream(0, "noise"))
    assert mean(token_kl(FOREST, mu, first.logp()) for mu in found.samplers(first)) == pytest.approx(0.03, rel=1e-6)


def test_errors_of_a_context_do_not_follow_the_policy() -> None:
    """fixed, low_rank and shared add the same logits to any policy: of rank 3 (V - 1), 1, and one row for all."""

    def added(name: str, seed: int) -> torch.Tensor:
        first, at = policy(), policy(seed)
        mu = engine(name, 0.5, first, stream(0, "noise")).samplers(at)[0]
        gap = torch.cat([a - b for a, b in zip(mu, at.logp(), strict=True)])
        return gap - gap.mean(1, keepdim=True)

    for name, rank in (("fixed", 3), ("low_rank", 1), ("shared", 1)):
        assert torch.allclose(added(name, 1), added(name, 2), atol=1e-12)
        assert int(torch.linalg.matrix_rank(added(name, 1), rtol=1e-9)) == rank
    assert torch.allclose(added("shared", 1), added("shared", 1)[:1].expand(sum(FOREST.sizes), -1), atol=1e-12)


def test_fresh_noise_has_many_samplers() -> None:
    """As many mu as draws, all different."""
    first = policy()
    found = engine("fresh", 0.5, first, stream(0, "noise")).samplers(first)
    assert len(found) == NUM_DRAWS
    assert len({float(mu[0][0, 0]) for mu in found}) == NUM_DRAWS


def test_temperatures_change_the_entropy() -> None:
    """A sharper engine has less entropy than pi, a flatter one more; the two undo each other's logits."""
    first = policy()
    entropy = {
        name: mean_entropy(FOREST, engine(name, 0.3, first, stream(0, "noise")).samplers(first)[0])
        for name in ("sharper", "exact", "flatter")
    }
    assert entropy["sharper"] < entropy["exact"] - 0.01
    assert entropy["flatter"] > entropy["exact"] + 0.01
    sharp, own = engine("sharper", 0.3, first, stream(0, "noise")).samplers(first)[0][0], first.logp()[0]
    assert torch.allclose((sharp / 1.3).log_softmax(1), own, atol=1e-12)


def test_top_p_keeps_the_fewest_likeliest_tokens() -> None:
    """The kept tokens hold the share, without the least likely of them they do not, and their proportions are pi's."""
    first, share = policy(), 0.8
    for mu_nV, pi_nV in zip(
        engine("top_p", 1 - share, first, stream(0, "x")).samplers(first)[0], first.logp(), strict=True
    ):
        for mu_V, pi_V in zip(mu_nV, pi_nV, strict=True):
            kept = mu_V > -math.inf
            p_V = pi_V.exp()
            assert float(p_V[kept].sum()) >= share > float(p_V[kept].sum() - p_V[kept].min())
            assert kept.all() or float(p_V[kept].min()) >= float(p_V[~kept].max())
            assert torch.allclose(mu_V[kept].exp(), p_V[kept] / p_V[kept].sum(), atol=1e-14)


def test_a_share_of_all_keeps_the_rarest_token() -> None:
    """At scale 0 a token of probability e^-40 stays, where rounding puts the mass in front of it at 1."""
    rare = torch.tensor([[0.2, -1.6, -3.5, -0.8, -2.4, -2.7, -0.9, -41.3]])
    first = TabularPolicy(PrefixTree(8, 1), (rare,))
    (found,) = engine("top_p", 0.0, first, stream(0, "x")).samplers(first)[0]
    torch.testing.assert_close(found, first.logp()[0])


def test_rounding_is_to_the_nearest_point_of_the_grid() -> None:
    """At 1/7 the weights take at most 15 values; mu is the policy there. Weights of 0 have no grid, and stay."""
    first = policy()
    theta = first.parameters
    step = theta.abs().max() / 7
    rounded = torch.round(theta / step) * step
    assert len(rounded.unique()) <= 15
    mu = engine("rounded", 1 / 7, first, stream(0, "x")).samplers(first)[0]
    expected = first.moved(rounded - theta).logp()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mu, expected, strict=True))
    none = first.moved(-theta)
    (of_none,) = engine("rounded", 1 / 7, none, stream(0, "x")).samplers(none)
    assert all(torch.equal(a, b) for a, b in zip(of_none, none.logp(), strict=True))


@pytest.mark.parametrize(("scale", "kind"), [(1 / 8, torch.float8_e4m3fn), (1 / 4, torch.float8_e5m2)])
def test_floating_is_fp8(scale: float, kind: torch.dtype) -> None:
    """At 1/8 and 1/4 mu is the policy at the weights that torch's two FP8 types hold, which have no
    exponent for some: subnormal weights are left out, and none is too large."""
    drawn = policy()
    first = drawn.moved(-torch.where(drawn.parameters.abs() < 2**-6, drawn.parameters, 0.0))
    theta = first.parameters
    assert float(theta.abs().max()) < 448
    mu = engine("floating", scale, first, stream(0, "x")).samplers(first)[0]
    expected = first.moved(theta.to(kind).double() - theta).logp()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mu, expected, strict=True))


def test_bad_engines_are_refused() -> None:
    """An unknown name, a negative scale, a level for an error that jumps: each in one line."""
    first, generator = policy(), stream(0, "x")
    for build in (engine, engine_at):
        with pytest.raises(ValueError, match=r"engine error.*'fixd'.*fixed"):
            build("fixd", 0.1, first, generator)
    with pytest.raises(ValueError, match=r"fixed: expected a scale >= 0, got -0\.1"):
        engine("fixed", -0.1, first, generator)
    with pytest.raises(ValueError, match=r"top_p: expected a scale.*got level 0\.1"):
        engine_at("top_p", 0.1, first, generator)
