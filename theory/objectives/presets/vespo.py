"""VESPO: the score, weighed by a smooth function of the whole response's importance weight that fades on both sides.

    term = sg[phi(W)] A log pi_t,  W = prod_s pi_s/mu_s,  phi(W) = W^k exp(lambda (1 - W)),
    with (k, lambda) by the sign of A; phi(1) = 1, phi(0) = 0, phi(inf) = 0.

W is not normalised by length: the kernel alone bounds a response's term. Source: VESPO (arXiv 2602.10693), by its
abstract and the code of TRL 1.16 (`get_gamma_weights`, which follows the authors'), whose k and lambda these are.
Differs from source: (1) nothing is clamped, where TRL holds log W in [log 1e-8, 20] and each log-ratio in [-20, 20];
(2) a weight on the engine gap is refused, as W includes the gap: TRL multiplies its token weights into pi/old instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor

from theory.fields import About, require_ranges
from theory.names import listed
from theory.objectives import ratios
from theory.objectives.aggregations import token_mean
from theory.objectives.corrections import NoCorrection
from theory.objectives.factors import Factor, log_ratio, or_zero, pick
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import TRUST_REGIONS, Tokens
from theory.objectives.trust_regions.base import WeightRatio, product, score, stopped

_SOURCE = "TRL 1.16, after arXiv 2602.10693"


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class GammaKernel:
    """w sg[W^k exp(lambda (1 - W))] A log pi, W the response's product of pi/mu. Gradient w phi(W) A grad log pi."""

    name: ClassVar[str] = "gamma_kernel"
    # W is pi/mu already, the engine gap included.
    weight_ratio: ClassVar[WeightRatio] = "none"
    is_tokenwise: ClassVar[bool] = False
    takes_router_shift: ClassVar[bool] = False

    k_pos: Annotated[float, About("power of W where A >= 0", gt=0, source=_SOURCE)] = 2.0
    lambda_pos: Annotated[float, About("decay in W where A >= 0", gt=0, source=_SOURCE)] = 3.0
    k_neg: Annotated[float, About("power of W where A < 0", gt=0, source=_SOURCE)] = 3.0
    lambda_neg: Annotated[float, About("decay in W where A < 0", gt=0, source=_SOURCE)] = 2.0

    def __post_init__(self) -> None:
        require_ranges(self)

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> None:
        """No bound."""
        return

    def kernel(self, tokens: Tokens, advantages_B1: Float[Tensor, "B _T"]) -> Factor:
        """phi(W) of each response, (B, 1); a constant."""
        # Log-probabilities are 0 off the mask, so that the sum is over the response's tokens.
        log_W_B1 = log_ratio(tokens.logp_pi_BT.detach(), tokens.logp_mu_BT).sum(1, keepdim=True)
        k_B1 = pick(advantages_B1 >= 0, self.k_pos, self.k_neg, like=log_W_B1)
        decay_B1 = pick(advantages_B1 >= 0, self.lambda_pos, self.lambda_neg, like=log_W_B1)
        # log phi; `or_zero` makes phi exactly 0 where W is 0 or far above 1.
        return Factor.exp(or_zero(k_B1 * log_W_B1 - decay_B1 * log_W_B1.expm1()))

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w phi(W) A log pi."""
        kernel = self.kernel(tokens, advantages_B1)
        whole = weight * Factor(kernel.value_BT.expand_as(log_ratio_BT), kernel.log_BT.expand_as(log_ratio_BT))
        return score(whole.value_BT, advantages_B1, tokens.logp_pi_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the kernel."""
        numbers = f"{self.k_pos:g} and {self.lambda_pos:g} where A >= 0, else {self.k_neg:g} and {self.lambda_neg:g}"
        kernel = f"phi(W) = W^k exp(lambda (1 - W)), W = prod_s pi_s/mu_s, k and lambda {numbers}"
        return f"{product(stopped(product(weight, 'phi(W)')), 'A', 'log pi_t')} [{kernel}]"


PRESETS = (
    Objective("vespo", "group_norm", ratios.token, GammaKernel(), NoCorrection(), token_mean, title="VESPO"),
)  # fmt: skip
