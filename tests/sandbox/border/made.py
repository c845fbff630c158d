"""Rows of the border study made by hand, for the tests of its tables and sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sandbox.claims import REGIMES
from sandbox.claims.border_arms import at
from sandbox.ledger.cells import key
from sandbox.ledger.claim import Arm

(BORDER,) = (regime for regime in REGIMES if regime.name == "border")
NUM_WINDOWS = 20


def rows(
    gap: str, remedy: str, n: int, num: int, num_collapsed: int = 0, *, preset: str = "grpo", kl: float = 0.3,
    updates: int = 400, first_seed: int = 104, changed: Callable[[Arm], Arm] | None = None,
    series: dict[str, list[float]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`num` rows of a place, of which the first `num_collapsed` fall to 0 after the initial accuracy of 0.3."""
    arm = at(gap, remedy, n, preset)
    arm = arm if changed is None else changed(arm)
    found = {}
    for i, seed in enumerate(range(first_seed, first_seed + num)):
        # A little apart, so that a mean over seeds has a spread.
        later = (0.0 if i < num_collapsed else 0.3) + 1e-6 * i
        name = key(BORDER, arm, seed)
        found[name] = {
            "cell": name, "regime": "border", "arm": arm.name, "seed": seed, "num_steps": updates // n,
            "evaluations": [[0, 0.3], *([(j + 1) * updates // 8 // n, later] for j in range(8))],
            "first": {"rollout_corr/k3_kl": kl, "rollout_corr/extreme_frac_tau2": kl / 2,
                      "rollout_corr/chi2_token": kl, "response_length/mean": 20.0},
            "series": {"rollout_corr/k3_kl": [kl] * NUM_WINDOWS} | (series or {}), "probes": {},
            "rules": [], "first_step": None,
        }  # fmt: skip
    return found
