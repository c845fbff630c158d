"""The recorded spread with which a prediction's seeds are planned, and the recorded time of a claim's runs.

The SD is that of the prediction's arms at home, else of all arms that the ledger's predictions compare by that measure
there, else the largest of the other regimes, with at least NUM_DF degrees of freedom. Where seeds matter among the
claim's arms at home, so that the test will pair them (contrasts.py), it is that of the differences within a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from sandbox.ledger import contrasts
from sandbox.ledger.cells import Regime, finished
from sandbox.ledger.claim import Arm, Claim, Prediction, Row
from sandbox.ledger.contrasts import Column
from sandbox.ledger.verdicts import margin_of

NUM_DF = 10
"""The smallest number of degrees of freedom of a usable spread."""


@dataclass(frozen=True)
class ResidualSpread:
    """A residual SD on a prediction's scale, and its source."""

    sd: float
    of: str
    is_paired: bool = False
    """Whether it is the SD of the difference of the two sides within a seed, and not that of an arm."""


class Spreads:
    """The recorded spreads and times of a ledger's rows."""

    def __init__(self, claims: Sequence[Claim], regimes: Sequence[Regime], rows: Mapping[str, Row]) -> None:
        self.claims, self.rows = claims, rows
        self.regimes = {regime.name: regime for regime in regimes}
        self.seeds = sorted({row["seed"] for row in rows.values()})
        self.by_place: dict[tuple[Arm, str], list[Row]] = {}
        self.by_arm: dict[tuple[str, str], list[Row]] = {}
        for row in rows.values():
            self.by_arm.setdefault((row["regime"], row["arm"]), []).append(row)

    def of(self, prediction: Prediction, claim: Claim) -> ResidualSpread:
        """The spread with which a claim's prediction is planned, by the module's rule; events and times need none."""
        home = claim.home
        if prediction.measure.kind == "event":
            return ResidualSpread(0.5, "the exact test")
        if prediction.measure.kind == "time" and prediction.margin == 0.0:
            return ResidualSpread(math.nan, "the rates")
        if (found := self._paired(prediction, claim)) is not None:
            return ResidualSpread(found, "own arms, paired", is_paired=True)
        arms = [arm for side in prediction.sides for arm in side]
        alike = {arm.name for claim in self.claims for one in claim.predictions
                 if (one.measure.name, one.scale) == (prediction.measure.name, prediction.scale)
                 for side in one.sides for arm in side}  # fmt: skip
        found = self._pooled(prediction, (self.rows_of(arm, home) for arm in arms))
        if found is not None:
            return ResidualSpread(found, "own arms")
        found = self._pooled(prediction, (self.by_arm.get((home, name), []) for name in alike))
        if found is not None:
            return ResidualSpread(found, home)
        others = {
            name: sd
            for name in self.regimes
            if (sd := self._pooled(prediction, (self.by_arm.get((name, arm), []) for arm in alike))) is not None
        }
        worst = max(others, key=others.__getitem__, default=None)
        return ResidualSpread(math.nan, "unknown") if worst is None else ResidualSpread(others[worst], worst)

    def rows_of(self, arm: Arm, home: str) -> list[Row]:
        """An arm's rows at home; none if home is not among the regimes."""
        if home not in self.regimes:
            return []
        if (arm, home) not in self.by_place:
            self.by_place[arm, home] = finished(self.regimes[home], arm, self.seeds, self.rows)
        return self.by_place[arm, home]

    def seconds(self, claim: Claim) -> float:
        """Mean seconds of one thread per run of the claim, else of its home, else of all; nan without any."""
        own = [row for arm in claim.arms for row in self.rows_of(arm, claim.home)]
        for found in (own, [row for row in self.rows.values() if row["regime"] == claim.home], self.rows.values()):
            times = [row.get("cpu_seconds") or row.get("seconds") for row in found]
            known = [time for time in times if time]
            if known:
                return fmean(known)
        return math.nan

    def _paired(self, prediction: Prediction, claim: Claim) -> float | None:
        """The SD of the differences within a seed; None if the test would not pair seeds, or with fewer than NUM_DF
        degrees of freedom."""
        measure, scale = prediction.measure, prediction.scale
        # A time with a margin has the floor of `Effect.fall`, and an effect of one SD is in units of an arm's.
        in_sds = margin_of(prediction) == 0.0 and prediction.planned is None
        if measure.kind == "time" or in_sds or not all(prediction.sides):
            return None
        alike = [one for one in claim.predictions if (one.measure, one.scale) == (measure, scale)]
        groups = dict.fromkeys(side for one in alike for side in one.sides if side)
        arms = dict.fromkeys(arm for side in groups for arm in side)
        found = {arm: {row["seed"]: measure.of(row) for row in self.rows_of(arm, claim.home)} for arm in arms}
        kept = [seed for seed in self.seeds if all(math.isfinite(one.get(seed, math.nan)) for one in found.values())]
        if len(kept) <= NUM_DF:
            return None

        def column(side: tuple[Arm, ...]) -> Column:
            return contrasts.on_scale(np.mean([[found[arm][seed] for seed in kept] for arm in side], axis=0), scale)

        is_linear = scale in ("difference", "ratio_of_means")
        columns = [column((arm,)) for arm in arms] if is_linear else [column(side) for side in groups]
        if contrasts.choose(columns) != "paired":
            return None
        left, right = (column(side) for side in prediction.sides)
        if scale == "ratio_of_means":
            # As in `_pooled`: the error of a ratio of means comes from spreads relative to the means.
            if not (left.mean() > 0 and right.mean() > 0):
                return None
            left, right = left / left.mean(), right / right.mean()
        apart = left - right
        return float(apart.std(ddof=1)) if np.isfinite(apart).all() else None

    def _pooled(self, prediction: Prediction, arms: Iterable[Sequence[Row]]) -> float | None:
        """The residual SD over arms on the prediction's scale; None with fewer than NUM_DF degrees of freedom."""
        total, df = 0.0, 0
        for rows in arms:
            values = np.array([prediction.measure.of(row) for row in rows], dtype=np.float64)
            values = values[np.isfinite(values)]
            if len(values) < 2:
                continue
            if prediction.scale == "ratio_of_means":
                # The error of a ratio of means comes from each arm's spread relative to its own mean.
                values = values / values.mean() if values.mean() > 0 else values
            values = contrasts.on_scale(values, prediction.scale)
            values = values[np.isfinite(values)]
            if len(values) > 1:
                total, df = total + float(values.var(ddof=1)) * (len(values) - 1), df + len(values) - 1
        return math.sqrt(total / df) if df >= NUM_DF else None


__all__ = ["NUM_DF", "ResidualSpread", "Spreads"]
