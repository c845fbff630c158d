"""SAPO: a smooth gate on the ratio instead of a clip: no token's gradient is cut off, those far from old fade.

    term = w g(r) A,  g(r) = (4/tau) sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg.

dg/dr = 4 sigmoid(tau (r - 1)) sigmoid(-tau (r - 1)), which is 1 at r = 1: on-policy it is GRPO's gradient.
Source: SAPO (arXiv 2511.20347), by AReaL's and ms-swift's pages on it and the code of verl 0.9.1 and TRL 1.16, which
agree; the paper's equation numbers were not available. tau_pos 1 and tau_neg 1.05 are the paper's defaults.
Differs from source: none known; verl clamps log r to 20 nats before the gate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from theory.fields import About, require_ranges
from theory.names import listed
from theory.objectives import ratios
from theory.objectives.aggregations import length_norm
from theory.objectives.corrections import NoCorrection
from theory.objectives.factors import Factor, or_zero, pick, sloped, times
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import TRUST_REGIONS, Tokens
from theory.objectives.trust_regions.base import WeightRatio, product

_SOURCE = "arXiv 2511.20347"


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class SoftGate:
    """w (4/tau) sigmoid(tau (r - 1)) A. Gradient w 4 sigmoid(z) sigmoid(-z) r A grad log r, z = tau (r - 1)."""

    name: ClassVar[str] = "soft_gate"
    weight_ratio: ClassVar[WeightRatio] = "old/mu"
    is_tokenwise: ClassVar[bool] = True
    takes_router_shift: ClassVar[bool] = True

    tau_pos: Annotated[float, About("temperature of the gate where A > 0", gt=0, source=_SOURCE)] = 1.0
    tau_neg: Annotated[float, About("temperature of the gate where A <= 0", gt=0, source=_SOURCE)] = 1.05

    def __post_init__(self) -> None:
        require_ranges(self)

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> None:
        """No bound."""
        return

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w g(r) A."""
        tau_B1 = pick(advantages_B1 > 0, self.tau_pos, self.tau_neg, like=log_ratio_BT)
        # In logarithms: r may overflow where the gate and its slope are finite.
        log_BT = log_ratio_BT.detach()
        # expm1 of log r: r - 1 would lose the digits of a ratio near 1.
        z_BT = tau_B1 * log_BT.expm1()
        gate = Factor.exp(math.log(4) - tau_B1.log() + logsigmoid(z_BT))
        # The slope in log r, which is what carries the gradient: r dg/dr, hence the last summand.
        slope = Factor.exp(or_zero(math.log(4) + logsigmoid(z_BT) + logsigmoid(-z_BT) + log_BT))
        value_BT, slope_BT = (times((weight * factor).value_BT, advantages_B1) for factor in (gate, slope))
        return sloped(value_BT, slope_BT, log_ratio_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the gate."""
        gate = f"g(r) = (4/tau) sigmoid(tau (r - 1)), tau = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"
        return f"{product(weight, f'g({ratio})', 'A')} [{gate}]"


PRESETS = (
    Objective("sapo", "group_norm", ratios.token, SoftGate(), NoCorrection(), length_norm, title="SAPO"),
)  # fmt: skip
