"""The simulation of a run whose rates are known has its measured stages."""

from __future__ import annotations

import pytest

from tests.pages.simulation import RATES, predictions, read


def test_a_run_gives_its_own_stages_back() -> None:
    """With the rates of a run, the simulation of that run has its measured stages; the step is their sum."""
    first, told = read()[RATES], predictions()[RATES]
    for part, seconds in first.median.items():
        if part == "step":
            seconds = sum(first.median[name] for name in ("rollout", "training", "push"))
        assert told[part] == pytest.approx(seconds, rel=1e-9), part  # sums of some hundred events in float64
