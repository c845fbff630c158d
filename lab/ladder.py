"""The ladder of inference engines: its measurements against one trainer, and its table.

A rung's metrics are means over independent draws with 95% intervals, so that the ladder of real engines
(`firstorder ladder`) and that of simulated defects (`firstorder defects`) can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t as student

TITLES = {
    "rollout_corr/k3_kl": "k3 KL(mu, old)",
    "rollout_corr/extreme_frac_tau2": "F(2)",
    "rollout_corr/probs_diff_mean": "mean of abs(old - mu)",
    "rollout_corr/probs_diff_max": "max of abs(old - mu)",
    "routing/router_disagreement": "routers that differ",
    "routing/token_disagreement": "tokens with one",
}
"""Registered name of each measurement of a rung, and its column title in the table."""


@dataclass(frozen=True)
class SeedMean:
    """A metric's mean over seeds, and half the width of its 95% interval (Student's t); infinite for one seed."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} ± {self.half_width:.1g}"


def seed_mean(values: Sequence[float]) -> SeedMean:
    """mean +- t_{0.975, n-1} s / sqrt(n), for n independent draws."""
    n = len(values)
    if n < 2:
        return SeedMean(fmean(values), float("inf"))
    return SeedMean(fmean(values), float(student.ppf(0.975, n - 1)) * stdev(values) / n**0.5)
