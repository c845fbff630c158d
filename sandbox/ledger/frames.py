"""The ledger as dataframes, for notebooks: outcomes, a row each, and metrics over a run's updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from sandbox.ledger.cells import NUM_WINDOWS, Regime, key
from sandbox.ledger.claim import Arm, Claim, Row
from sandbox.ledger.verdicts import Outcome


def outcomes_frame(found: Sequence[Outcome]) -> pd.DataFrame:
    """A row an outcome: claim, regime, prediction, arms, n, effect with its 95% interval, p after Holm, verdict.

    Effects on the scale `ratio` are factors. What is open has missing numbers and an empty verdict.
    """
    rows = []
    for one in found:
        control, is_ratio = one.prediction.control, one.prediction.scale == "ratio"
        numbers = (math.nan,) * 3 if one.effect is None else (one.effect.mean, one.effect.low, one.effect.high)
        effect, low, high = (math.exp(x) if is_ratio else x for x in numbers)
        rows.append({
            "claim": one.claim.number, "sentence": one.claim.sentence, "regime": one.regime,
            "prediction": one.prediction.words, "arm": one.prediction.treatment.name,
            "against": control.name if isinstance(control, Arm) else f"{control:g}",
            "measure": one.prediction.measure.name, "scale": one.prediction.scale, "n": len(one.values),
            "effect": effect, "low": low, "high": high, "expected": one.prediction.expected,
            "margin": one.prediction.margin, "p": math.nan if one.p is None else one.p, "verdict": one.word or "",
        })  # fmt: skip
    return pd.DataFrame(rows)


def series_frame(
    claim: Claim, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row], metric: str
) -> pd.DataFrame:
    """A row an arm, seed and window: the share of the updates at its middle, and the metric's mean over it."""
    found = []
    for arm in claim.arms:
        for seed in seeds:
            row = rows.get(key(regime, arm, seed))
            for window, value in enumerate([] if row is None else row["series"].get(metric, [])):
                if value is not None:
                    share = (window + 0.5) / NUM_WINDOWS
                    found.append({"arm": arm.name, "seed": seed, "share": share, metric: value})
    return pd.DataFrame(found, columns=["arm", "seed", "share", metric])


__all__ = ["outcomes_frame", "series_frame"]
