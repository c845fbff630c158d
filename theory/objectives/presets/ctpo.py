"""CTPO: PPO on the product of the ratios up to the token, with bounds that widen as sqrt(t), as its logarithm does.

    term = min(c_t A, clip(c_t, exp(-eps_low sqrt t), exp(eps_high sqrt t)) A), and where A < 0 at least
    exp(eps_c sqrt t) A,  c_t = sg[prod_(s<=t) pi_s/old_s] pi_t/sg[pi_t].

The product is the weight that makes the gradient of token t unbiased for the prefix that led to it.
Source: CTPO (arXiv 2605.07331), by its abstract and its authors' code (horizon-llm/CTPO, `cum-token-cumprod-la`), whose
widths these are; equation numbers were not available. Differs from source: (1) t counts the response's own tokens,
observations left out, as in that code; (2) nothing is clamped, where the code caps log-ratios at 20 and log c at 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from theory.fields import About
from theory.names import listed
from theory.objectives import ratios
from theory.objectives.aggregations import token_mean
from theory.objectives.corrections import NoCorrection
from theory.objectives.factors import Factor
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import TRUST_REGIONS, Tokens
from theory.objectives.trust_regions.base import WeightRatio, Widths, product
from theory.objectives.trust_regions.ratio_bounds import held_ratio


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class SqrtClip(Widths):
    """w min(c A, clip(c, exp(-eps_low sqrt t), exp(eps_high sqrt t)) A), and where A < 0 at least exp(eps_c sqrt t) A.

    Gradient w c A grad log pi, and 0 where a bound binds. Widths are in nats, those of the first token.
    """

    name: ClassVar[str] = "sqrt_clip"
    weight_ratio: ClassVar[WeightRatio] = "old/mu"
    is_tokenwise: ClassVar[bool] = False
    takes_router_shift: ClassVar[bool] = False

    eps_low: float = 0.025
    eps_high: float = 0.05
    eps_c: Annotated[float, About("width above 1 where A < 0, nats at the first token", gt=0)] = 0.05

    def bound(self, tokens: Tokens, width: float) -> Float[Tensor, "B T"]:
        """exp(width sqrt t), t = 1, 2, ... on the response's tokens; 1 before the first."""
        root_BT = tokens.is_response_BT.cumsum(1).to(tokens.logp_pi_BT.dtype).sqrt()
        # Before the first token an infinite width times 0 would be nan; no token meets that bound.
        return torch.where(root_BT > 0, width * root_BT, 0.0).exp()

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """PPO's two bounds at their position; the lower flag is also up where A < 0 and c > exp(eps_c sqrt t)."""
        low_BT, high_BT, c_BT = (self.bound(tokens, x) for x in (-self.eps_low, self.eps_high, self.eps_c))
        below_BT = (advantages_B1 < 0) & ((ratio_BT < low_BT) | (ratio_BT > c_BT))
        return (advantages_B1 > 0) & (ratio_BT > high_BT), below_BT

    def held(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """The ratio at its bound, for the tokens where one binds."""
        low_BT, high_BT, c_BT = (self.bound(tokens, x) for x in (-self.eps_low, self.eps_high, self.eps_c))
        # With A < 0 eps_high never binds: eps_c alone holds the product from above.
        most_BT = torch.where(advantages_B1 < 0, c_BT, high_BT)
        return torch.minimum(torch.maximum(ratio_BT, low_BT), most_BT)

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w min(c A, clip(c) A)."""
        return held_ratio(self, tokens, log_ratio_BT, weight, advantages_B1)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with its bounds."""
        clip = f"clip({ratio}, exp(-{self.eps_low:g} sqrt t), exp({self.eps_high:g} sqrt t))"
        bound = product(weight, f"exp({self.eps_c:g} sqrt t) A")
        return f"{product(weight, f'min({ratio} A, {clip} A)')} [where A < 0: at least {bound}]"


PRESETS = (
    Objective("ctpo", "group_norm", ratios.prefix_product_token, SqrtClip(), NoCorrection(), token_mean, title="CTPO"),
)  # fmt: skip
