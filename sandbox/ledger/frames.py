"""The ledger for notebooks: outcomes as a dataframe, and metrics over a run's updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sandbox.ledger.cells import Regime, finished
from sandbox.ledger.claim import Claim, Row
from sandbox.ledger.figures import over_windows
from sandbox.ledger.verdicts import Finding


def outcomes_frame(found: Sequence[Finding]) -> pd.DataFrame:
    """One row per prediction and finding: claim, regime, whether it decides, arms, n, effect with its 95% interval,
    test, one-sided p's that it holds and fails, its own reading, and the claim's verdict there.

    Effects on the scales `ratio` and `ratio_of_means` are factors. Missing values are nan or empty.
    """
    rows = []
    for finding in found:
        for one in finding.outcomes:
            is_ratio, (arm, against) = one.prediction.is_factor, one.prediction.side_names
            numbers = (math.nan,) * 3 if one.effect is None else (one.effect.mean, one.effect.low, one.effect.high)
            effect, low, high = (np.exp(x) if is_ratio else x for x in numbers)
            holds, fails = (math.nan, math.nan) if one.p is None else one.p
            rows.append({
                "claim": finding.claim.number, "sentence": finding.claim.sentence, "regime": finding.regime,
                "decides": finding.decides, "prediction": one.prediction.words, "arm": arm, "against": against,
                "measure": one.prediction.measure.name, "scale": one.prediction.scale, "n": len(one.values),
                "effect": effect, "low": low, "high": high, "expected": one.prediction.expected,
                "margin": one.prediction.margin, "test": "" if one.effect is None else one.effect.test,
                "p_holds": holds, "p_fails": fails, "stand": one.stand or "", "verdict": finding.word or "",
            })  # fmt: skip
    return pd.DataFrame(rows)


def means(claim: Claim, regime: Regime, rows: Mapping[str, Row], metric: str) -> dict[str, dict[float, float]]:
    """The metric's means over seeds, by arm and window middle (a share of the updates), for arms that have runs."""
    found: dict[str, dict[float, float]] = {}
    for arm in claim.arms:
        points = over_windows(metric, finished(regime, arm, claim.seeds(regime.name), rows))
        if points:
            found[arm.name] = {place: mean for place, mean, *_ in points}
    return found


__all__ = ["means", "outcomes_frame"]
