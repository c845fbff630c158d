"""Laws of the tests for a change: their level holds under heavy tails, and they find what is planted."""

from __future__ import annotations

import math

import pytest
import torch

from lab.doctor.change_point import FEWEST, change
from theory.streams import stream

NUM = 400


def draws(law: str, num: int, n: int) -> torch.Tensor:
    """Independent values of a law, num series of n."""
    normal = torch.randn((num, n), generator=stream(0, "change point test", law), dtype=torch.float64)
    if law == "cauchy":
        return torch.tan(math.pi * (torch.special.ndtr(normal) - 0.5))
    return normal.exp() if law == "log-normal" else normal


@pytest.mark.parametrize("n", [FEWEST, 25])
def test_the_level_holds(n: int) -> None:
    """Without a change p < 0.05 in at most 5 % of series, within 4 binomial standard errors; likewise of the trend."""
    # The heaviest tails: only a statistic of ranks keeps its level on them.
    found = [change(row.tolist()) for row in draws("cauchy", NUM, n)]
    bound = 0.05 + 4 * (0.05 * 0.95 / NUM) ** 0.5
    assert sum(c.p < 0.05 for c in found if c) / NUM <= bound
    assert sum(c.trend_p < 0.05 for c in found if c) / NUM <= bound


def test_the_power_is_stated() -> None:
    """Of 16 values with a shift of 3 standard deviations in the middle 99 % are clear."""
    shift = torch.tensor([0.0] * 8 + [3.0] * 8, dtype=torch.float64)
    found = [change((row + shift).tolist()) for row in draws("normal", NUM, 16)]
    assert sum(c.is_clear for c in found if c) / NUM >= 0.95


def test_any_increasing_map_leaves_the_test_alone() -> None:
    """The statistics are of ranks: k3 and log k3 have the same p-values."""
    values = draws("log-normal", 1, 12)[0]
    assert change(values.tolist()) == change(values.log().tolist()) is not None


def test_short_and_constant_series() -> None:
    """Fewer than FEWEST values are not tested; a constant is no change; what is not finite is refused."""
    assert change([1.0] * (FEWEST - 1)) is None
    level = change([2.0] * 12)
    assert level is not None and level.p == 1 and level.trend_p == 1
    with pytest.raises(ValueError, match="expected finite numbers, got"):
        change([1.0] * 8 + [math.nan])
