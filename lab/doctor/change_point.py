"""Whether a series over steps changes: two rank tests, of a level and of a trend, with exact null distributions.

Null hypothesis of both: the n values are exchangeable, every order equally likely (a constant level under noise of any
law, heavy tails included). The statistics depend on ranks alone, so their null distribution depends on n alone; it is
drawn from NUM_ORDERS random orders, and p = (1 + orders at least as extreme) / (1 + NUM_ORDERS), whose level is exact
for values without ties (Phipson and Smyth, 2010). Under a trend both tests fire; steps/shape.py says which fits better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from theory.streams import stream

NUM_ORDERS = 4999
FEWEST = 8
"""Values needed: with 6, even the clearest change is not significant at 5 % (2 orders in 20 are as clear)."""
LEVEL = 0.01


@dataclass(frozen=True)
class Change:
    """The p-values of two tests of a series: `p` for a change of level, `trend_p` for a trend."""

    p: float
    trend_p: float

    @property
    def is_clear(self) -> bool:
        """Whether either test rejects at LEVEL."""
        return min(self.p, self.trend_p) < LEVEL


def change(values: Sequence[float]) -> Change | None:
    """Both tests of the series; None below FEWEST values. ValueError unless all are finite."""
    x = torch.tensor(list(values), dtype=torch.float64)
    if not bool(x.isfinite().all()):
        raise ValueError(f"values: expected finite numbers, got {[v for v in values if not abs(v) < float('inf')][:3]}")
    n = len(x)
    if n < FEWEST:
        return None
    rank_1n = _midranks(x)[None]
    null_level, null_trend = _null(n)
    # Two-sided: either direction is a trend.
    return Change(p_value(_scan(rank_1n).max(), null_level), p_value(_trend(rank_1n)[0].abs(), null_trend))


def _midranks(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Ranks from 1; equal values share their mean rank."""
    below_n = (x[None] < x[:, None]).sum(1).double()
    equal_n = (x[None] == x[:, None]).sum(1).double()
    return below_n + (equal_n + 1) / 2


def _scan(rank_mn: Float[Tensor, "m n"]) -> Float[Tensor, "m k"]:
    """|sum_{i <= t} (r_i - (n + 1)/2)| / sqrt(t (n - t)) for t = 1 .. n - 1: Pettitt's (1979), standardised."""
    n = rank_mn.shape[1]
    # Not t = n, where the sum is 0 and so is n - t.
    t = torch.arange(1, n, dtype=torch.float64)
    return (rank_mn - (n + 1) / 2).cumsum(1)[:, :-1].abs() / (t * (n - t)).sqrt()


def _trend(rank_mn: Float[Tensor, "m n"]) -> Float[Tensor, " m"]:
    """Sum of r_i (i - (n - 1)/2): Spearman's correlation with time, up to its scale."""
    n = rank_mn.shape[1]
    return rank_mn @ (torch.arange(n, dtype=torch.float64) - (n - 1) / 2)


@lru_cache(maxsize=64)  # 80 kB each, and a course that is watched asks for one more at every step
def _null(n: int) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Both statistics (of the trend, its magnitude) for NUM_ORDERS random orders of n ranks."""
    generator = stream(0, "change point", str(n))
    # argsort of uniforms is a random permutation; +1 makes it ranks from 1.
    rank_mn = torch.rand((NUM_ORDERS, n), dtype=torch.float64, generator=generator).argsort(1).double() + 1
    return _scan(rank_mn).max(1).values, _trend(rank_mn).abs()


def p_value(value: Tensor, null_m: Float[Tensor, " m"]) -> float:
    """The share of null draws that are at least as large; the value counts as a draw, so that the level is exact."""
    # The margin counts an equal statistic as at least as extreme, however its sums were rounded.
    return (1 + int((null_m >= value - 1e-9).sum())) / (1 + len(null_m))
