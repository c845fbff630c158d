"""Laws of sandbox/border/fit.py: the planted border is found, the planted number wins."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sandbox.border.fit import auc, fit_all, logistic


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


def test_runs_of_one_kind_have_no_border():
    """Without a collapse, or without a survivor, there is nothing to fit, and that is said."""
    runs = planted(2, 0.8, 4.0).assign(collapsed=0.0)
    with pytest.raises(ValueError, match="expected some that collapsed and some that did not, got 40 runs of one kind"):
        fit_all(runs)
