"""The ratio of pi to old that an objective is built on: of a token, or of a whole response, repeated on its tokens.

Every ratio is a tensor (B, T) that carries the gradient of pi; old is a constant. Sums run over response tokens only.
Papers: MiniRL (arXiv 2512.01374) Eq. 7, Pr2 (2606.00395) Eq. 9, GSPO (2507.18071) Eq. 7 and its sec. 4.3,
CTPO (2605.07331).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.objectives.factors import log_ratio


@dataclass(frozen=True)
class Ratio:
    """A named ratio. `symbol` stands for it in formulas; an empty one means that the objective has no ratio.

    `compute` gives its logarithm from the log-ratios of the tokens, which are 0 off the response. `is_tokenwise`: it
    depends on no other token, as centering requires. `takes_router_shift`: it is pi/old or its geometric mean, in which
    a factor per token has its place.
    """

    name: str
    symbol: str
    formula: str
    compute: Callable[[Tensor, Tensor], Tensor]
    is_tokenwise: bool = False
    takes_router_shift: bool = False

    def __call__(
        self, logp_pi_BT: Float[Tensor, "B T"], logp_old_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """The ratio on every token; 1 in value, with zero gradient, under a False mask where it is a token's own."""
        return self.log(logp_pi_BT, logp_old_BT, is_response_BT).exp()

    def log(
        self, logp_pi_BT: Float[Tensor, "B T"], logp_old_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """The ratio's logarithm on every token, nats; never inf, and -inf where the ratio is 0."""
        # Masked before any arithmetic, so that nan or inf in the padding reaches neither value nor gradient.
        pi_BT, old_BT = (torch.where(is_response_BT, x_BT, 0.0) for x_BT in (logp_pi_BT, logp_old_BT))
        return self.compute(log_ratio(pi_BT, old_BT), is_response_BT)


def _mean_log(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    """Mean log-ratio of each response, (B, 1); a row without a response token has the sum 0 and so the mean 0."""
    return log_ratio_BT.sum(1, keepdim=True) / is_response_BT.sum(1, keepdim=True).clamp(min=1)


def _own(log_ratio_BT: Tensor) -> Tensor:
    """x - sg[x]: 0 in value, with the gradient of the token's own log pi."""
    # Where pi is 0 both are -inf; the whole ratio, to which this is added, is 0 there.
    return torch.where(log_ratio_BT.isneginf(), 0.0, log_ratio_BT - log_ratio_BT.detach())


def _none(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    return torch.zeros_like(log_ratio_BT)


def _token(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    return log_ratio_BT


def _sequence_geometric(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    # Not detached: each token's term has a gradient through every token of the response.
    return _mean_log(log_ratio_BT, is_response_BT).expand_as(log_ratio_BT)


def _sequence_geometric_token(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    return _sequence_geometric(log_ratio_BT, is_response_BT).detach() + _own(log_ratio_BT)


def _sequence_product(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    return log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)


def _prefix_product_token(log_ratio_BT: Tensor, is_response_BT: Tensor) -> Tensor:
    own_BT = _own(log_ratio_BT)
    return log_ratio_BT.detach().cumsum(1) + own_BT


none = Ratio("none", "", "no ratio", _none, is_tokenwise=True)
"""No ratio, 1 everywhere (REINFORCE)."""

token = Ratio("token", "r_t", "r_t = pi_t/old_t", _token, is_tokenwise=True, takes_router_shift=True)
"""The token's own ratio pi/old (MiniRL Eq. 7, Pr2 Eq. 9)."""

sequence_geometric = Ratio(
    "sequence_geometric", "s", "s = (prod_t pi_t/old_t)^(1/|y|)", _sequence_geometric, takes_router_shift=True
)
"""The response's ratio by geometric mean (GSPO Eq. 7)."""

sequence_geometric_token = Ratio(
    "sequence_geometric_token", "s_t", "s_t = sg[(prod_t pi_t/old_t)^(1/|y|)] pi_t/sg[pi_t]", _sequence_geometric_token,
    takes_router_shift=True,
)  # fmt: skip
"""The geometric mean in value with a gradient through the token's own pi (GSPO-token, GSPO sec. 4.3)."""

sequence_product = Ratio("sequence_product", "S", "S = prod_t pi_t/old_t", _sequence_product)
"""The response's likelihood ratio, unbiased and of exploding variance (MiniRL Eq. 1)."""

prefix_product_token = Ratio(
    "prefix_product_token", "c_t", "c_t = sg[prod_(s<=t) pi_s/old_s] pi_t/sg[pi_t]", _prefix_product_token
)
"""The product of the ratios up to the token, with a gradient through the token's own pi (CTPO)."""

RATIOS: dict[str, Ratio] = {
    r.name: r
    for r in (none, token, sequence_geometric, sequence_geometric_token, sequence_product, prefix_product_token)
}
