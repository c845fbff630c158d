"""GMPO: the geometric mean of a response's clipped token ratios, where GSPO clips the mean of the unclipped ones.

    J = (1/G) sum_i A_i exp((1/|y|) sum_t l_t),  l_t = min(log r_t, eps_high) where A > 0, max(log r_t, -eps_low) where
    A < 0.

One extreme ratio moves a geometric mean by 1/|y| of its logarithm, and a clip in log space stops that token alone.
Source: GMPO (arXiv 2507.20673), by the code of verl 0.9.1 (`geo_mean`) and TRL 1.16 (GMPOTrainer), which agree; the
bounds of 0.4 in log space are the paper's. Differs from source: (1) a weight of the engine gap multiplies token by
token, so that their mean multiplies the response's term; verl takes the weights' geometric mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from theory.names import listed
from theory.objectives import ratios
from theory.objectives.aggregations import length_norm
from theory.objectives.corrections import NoCorrection
from theory.objectives.factors import LARGEST, Factor, pick, scaled_exp
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import TRUST_REGIONS, Tokens
from theory.objectives.trust_regions.base import WeightRatio, Widths, product


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class GeometricClip(Widths):
    """w A exp(mean of the response's clipped log-ratios), on each of its tokens; widths are in nats.

    Gradient (sum_t w_t) A exp(mean) / |y| grad log pi of each token that no bound stops.
    """

    name: ClassVar[str] = "geometric_clip"
    weight_ratio: ClassVar[WeightRatio] = "old/mu"
    is_tokenwise: ClassVar[bool] = False
    takes_router_shift: ClassVar[bool] = True

    eps_low: float = 0.4
    eps_high: float = 0.4

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """True where A > 0 and r > exp(eps_high), and where A < 0 and r < exp(-eps_low)."""
        # math.exp raises where the exponential is infinite.
        high, low = math.inf if self.eps_high > LARGEST else math.exp(self.eps_high), math.exp(-self.eps_low)
        return (advantages_B1 > 0) & (ratio_BT > high), (advantages_B1 < 0) & (ratio_BT < low)

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w A exp(mean)."""
        high_BT, low_BT = self.clipped(tokens, log_ratio_BT.detach().exp(), advantages_B1)
        # With A = 0 nothing moves: left in, an infinite mean times 0 would be nan in the gradient.
        moves_BT = tokens.is_response_BT & ~(high_BT | low_BT) & (advantages_B1 != 0)
        # A clipped token adds its bound to the mean as a constant, without gradient.
        bound_BT = torch.where(high_BT | low_BT, pick(high_BT, self.eps_high, -self.eps_low, like=log_ratio_BT), 0.0)
        log_BT = torch.where(moves_BT, log_ratio_BT, bound_BT)
        mean_B1 = log_BT.sum(1, keepdim=True) / tokens.is_response_BT.sum(1, keepdim=True).clamp(min=1)
        term_BT = scaled_exp(weight, mean_B1.expand_as(log_BT), advantages_B1)
        # `scaled_exp` takes no scale of 0. A nan weight stays, so that it stops the run.
        return torch.where((advantages_B1 == 0) & ~weight.log_BT.isnan(), 0.0, term_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the bounds."""
        bounds = f"at most {self.eps_high:g} where A > 0, at least {-self.eps_low:g} where A < 0"
        return f"{product(weight, 'exp((1/|y_i|) sum_s l_s)', 'A')} [l_s = log {ratio.replace('_t', '_s')}, {bounds}]"


PRESETS = (
    Objective("gmpo", "group_norm", ratios.token, GeometricClip(), NoCorrection(), length_norm, title="GMPO"),
)  # fmt: skip
