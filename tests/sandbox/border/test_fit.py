"""Laws of sandbox/border/fit.py: the planted border is found, the planted number wins."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sandbox.border.fit import RATED, RIDGE, alike, auc, chances, deviance, expected, fit_all, logistic, points


def planted(num_seeds: int, border: float, steepness: float, seed: int = 0) -> pd.DataFrame:
    """Runs over a grid of KL and N that collapse with P = sigma(steepness log(KL N / border))."""
    generator, lines = np.random.default_rng(seed), []
    for run in range(num_seeds):
        for kl in (0.01, 0.03, 0.1, 0.3):
            for n in (1, 2, 4, 8, 16):
                p = 1 / (1 + math.exp(-steepness * math.log(kl * n / border)))
                noisy = kl * math.exp(0.1 * generator.standard_normal())
                lines.append({"seed": run, "kl": noisy, "f2": kl**0.7, "chi2": 2 * kl, "length": 21.0, "N": n,
                              "collapsed": float(generator.random() < p)})  # fmt: skip
    return pd.DataFrame(lines)


def test_the_planted_border_is_found():
    """With KL x N planted, x* is the planted border within its interval, and b the steepness to 10%."""
    runs = planted(200, border=0.8, steepness=3.0)
    (found,) = fit_all(runs, ["KL x N"])
    assert found.low < 0.8 < found.high and found.high / found.low < 1.2
    assert found.slope == pytest.approx(3.0, rel=0.1)


def test_the_planted_number_wins():
    """The planted KL x N has the least deviance of the candidates that are not multiples of it."""
    names = ["KL", "N", "KL x N", "sqrt(KL) x N", "KL x sqrt(N)", "F(2) x N"]
    assert fit_all(planted(60, 0.8, 4.0), names, num_draws=5)[0].name == "KL x N"


def test_numbers_that_cannot_be_told_apart_share_the_draws() -> None:
    """Every draw of seeds has one best number; of two that are one number but for half a percent, either is best in
    some, and both are as good; one that knows less is not."""
    runs = planted(30, 0.8, 4.0)
    runs["length"] *= np.exp(0.005 * np.random.default_rng(2).standard_normal(len(runs)))
    names = ["KL x N", "KL x length x N", "KL"]
    fits = {one.name: one for one in fit_all(runs, names, num_draws=40)}
    assert sum(one.num_best for one in fits.values()) == 40
    assert min(fits[name].num_best for name in names[:2]) > 0 == fits["KL"].num_best
    assert {one.name for one in alike(list(fits.values()))} == set(names[:2])


def test_all_numbers_are_compared_on_the_same_runs() -> None:
    """A run whose chi2 has no logarithm counts for none of them, and no deviance is nan."""
    runs = planted(10, 0.8, 4.0)
    runs.loc[3, "chi2"] = -1e-4
    fits = fit_all(runs, num_draws=5)
    assert {one.num_runs for one in fits} == {len(runs) - 1}
    assert all(math.isfinite(one.deviance) for one in fits)


def test_a_number_that_knows_nothing_explains_nothing():
    """On shuffled outcomes the deviance falls by a chi2 of one degree of freedom: less than 11 (p = 1e-3)."""
    runs = planted(30, 0.8, 4.0)
    runs["collapsed"] = np.random.default_rng(1).permutation(runs["collapsed"].to_numpy())
    (found,) = fit_all(runs, ["KL x N"], num_draws=5)
    assert 0 <= found.null - found.deviance < 11 and found.auc == pytest.approx(0.5, abs=0.08)


def test_auc_and_logistic_by_hand():
    """Complete separation has auc 1 and a finite slope; P at the mean equals the share where x is symmetric."""
    x, y = np.array([-2.0, -1.0, 1.0, 2.0]), np.array([0.0, 0.0, 1.0, 1.0])
    assert auc(x, y) == 1.0 and auc(-x, y) == 0.0 and auc(np.zeros(4), y) == 0.5
    a, b = logistic(x, y)
    assert a == pytest.approx(0.0, abs=1e-4) and 1.0 < b < 20.0


def test_the_interval_is_that_of_draws_with_their_runs_repeated() -> None:
    """Draws are fitted all at once, by how often each has a run; one at a time, on its runs written out, each has the
    same border, so that the quantiles are the same, and the same best number."""
    runs, names = planted(20, 0.8, 3.0), ["KL x N", "KL", "F(2) x N"]
    generator, by_seed = np.random.default_rng(0), [own for _, own in runs.groupby("seed")]
    draws = [pd.concat([by_seed[i] for i in generator.integers(20, size=20)]) for _ in range(30)]
    each = {name: [logistic(*(xy := points(name, draw))) + xy for draw in draws] for name in names}
    best = [min(names, key=lambda name: deviance(*each[name][i])) for i in range(30)]
    for found in fit_all(runs, names, num_draws=30):
        borders = [math.exp(-a / b) for a, b, _, _ in each[found.name]]
        assert (found.low, found.high) == pytest.approx(tuple(np.quantile(borders, [0.025, 0.975])), rel=1e-6)
        assert found.num_best == best.count(found.name)


def test_no_other_line_is_nearer() -> None:
    """At the fit the gradient of the penalised loss is zero, also where one run is far off or x separates all."""
    generator = np.random.default_rng(5)
    for x in (generator.standard_normal(60), np.linspace(-50, 50, 60), np.append(generator.standard_normal(59), 1e4)):
        y = (x + 0.5 * generator.standard_normal(60) > 0).astype(float)
        a, b = logistic(x, y)
        excess = 1 / (1 + np.exp(-np.clip(a + b * x, -700, 700))) - y
        assert excess.sum() == pytest.approx(0.0, abs=1e-6)
        assert (excess * x).sum() + RIDGE * b == pytest.approx(0.0, abs=1e-4)


def test_runs_of_one_kind_have_no_border():
    """Without a collapse, or without a survivor, there is nothing to fit, and that is said."""
    runs = planted(2, 0.8, 4.0).assign(collapsed=0.0)
    with pytest.raises(ValueError, match="expected some that collapsed and some that did not, got 40 runs of one kind"):
        fit_all(runs)


def test_runs_of_the_same_line_collapse_as_often_as_expected() -> None:
    """Drawn from one logistic line, 4,000 more runs collapse as often as the regression says, within four SDs; those of
    a remedy that moves the border tenfold do not. The gap is each run's own."""
    generator = np.random.default_rng(3)

    def draw(number: int, border: float) -> pd.DataFrame:
        kl, n = np.exp(generator.uniform(-4, 1, number)), generator.choice([1.0, 4.0, 16.0], number)
        chance = 1 / (1 + np.exp(-2.0 * np.log(kl * n / border)))
        fell = (generator.random(number) < chance).astype(float)
        return pd.DataFrame({"kl": kl, "f2": kl, "chi2": kl, "length": 20.0, "N": n, "collapsed": fell})

    unaided, same, moved = draw(4000, 0.5), draw(4000, 0.5), draw(4000, 5.0)
    spread = 4 * math.sqrt(4000 / 4)
    assert abs(expected("KL x N", unaided, same) - same["collapsed"].sum()) < spread
    assert expected("KL x N", unaided, moved) - moved["collapsed"].sum() > spread
    exact = same.assign(kl=0.0)
    assert expected("KL x N", unaided, exact) == 0.0


def test_the_planted_power_of_the_rate_wins() -> None:
    """Of runs at two rates that collapse by KL x N x rate^2, that number is the best; at one rate all are KL x N."""
    fast = planted(40, border=0.8, steepness=4.0).assign(rate=2e-3)
    # At half the rate the border lies four times as far out.
    slow = planted(40, border=3.2, steepness=4.0, seed=1).assign(rate=1e-3)
    both = fit_all(pd.concat([fast, slow]), ["KL x N", *RATED], num_draws=5)
    assert [one.name for one in both] == ["KL x N x rate^2", "KL x N x rate", "KL x N"]
    at_one = {one.name: one for one in fit_all(fast, ["KL x N", *RATED], num_draws=5)}
    assert at_one["KL x N x rate"].deviance == pytest.approx(at_one["KL x N"].deviance, rel=1e-4)
    assert at_one["KL x N x rate"].border == pytest.approx(2e-3 * at_one["KL x N"].border, rel=1e-3)


def test_a_shift_moves_every_run_along_the_fit() -> None:
    """log 2 more is twice the number: the chances of runs with twice the KL."""
    runs = planted(10, 0.8, 4.0)
    doubled = runs.assign(kl=2 * runs["kl"])
    assert chances("KL x N", runs, runs, shift=math.log(2)) == pytest.approx(chances("KL x N", runs, doubled))
    assert chances("KL x N", runs, runs).sum() == pytest.approx(expected("KL x N", runs, runs))
