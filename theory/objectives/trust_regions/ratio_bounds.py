"""Regions on the ratio: MiniRL's gradient stop, the pessimistic clip of PPO, CISPO's bounded weight, none.

Papers: MiniRL (arXiv 2512.01374) Eq. 3, 7 and App. A, Pr2 (2606.00395) Eq. 10, 14, PPO (1707.06347), CISPO
(2506.13585).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from theory.names import listed
from theory.objectives.factors import Factor, scaled_exp, times
from theory.objectives.trust_regions.base import TRUST_REGIONS, Tokens, WeightRatio, Widths, product, score, stopped


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class NoRegion:
    """w A log pi: the score function, unbounded. Gradient w A grad log pi (MiniRL Eq. 3 with w = pi/mu)."""

    name: ClassVar[str] = "none"
    weight_ratio: ClassVar[WeightRatio] = "pi/mu"
    is_tokenwise: ClassVar[bool] = True
    takes_router_shift: ClassVar[bool] = True

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> None:
        """No bound."""
        return

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w A log pi."""
        return score(weight.value_BT, advantages_B1, tokens.logp_pi_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        return product(stopped(weight), "A", "log pi_t")


@dataclass(frozen=True)
class RatioBounds(Widths):
    """Bounds on the ratio itself, [1 - eps_low, 1 + eps_high]; eps_low is at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps_low <= 1:
            raise ValueError(f"eps_low: expected 0 <= eps_low <= 1, got {self.eps_low}")

    @property
    def low(self) -> float:
        """The lower bound on the ratio, 1 - eps_low; 0 is no bound."""
        return 1 - self.eps_low

    @property
    def high(self) -> float:
        """The upper bound on the ratio, 1 + eps_high; inf is no bound."""
        return 1 + self.eps_high

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Two masks: A > 0 and r > 1 + eps_high, and A < 0 and r < 1 - eps_low: the step has gone far enough."""
        return (advantages_B1 > 0) & (ratio_BT > self.high), (advantages_B1 < 0) & (ratio_BT < self.low)


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class MiniRLMask(RatioBounds):
    """M_t sg[w] A log pi: the gradient stops where pi/old has gone far enough (decoupled PPO).

    M_t is a stop, not a mask: a stopped token stays in every denominator. Gradient M_t w A grad log pi. MiniRL Eq. 7.
    """

    name: ClassVar[str] = "minirl_mask"
    weight_ratio: ClassVar[WeightRatio] = "pi/mu"
    is_tokenwise: ClassVar[bool] = True
    takes_router_shift: ClassVar[bool] = True

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """M_t sg[w] A log pi."""
        high_BT, low_BT = self.clipped(tokens, log_ratio_BT.detach().exp(), advantages_B1)
        # The stop is in the weight: where that is 0, `score` is 0 in value and gradient, also at log pi = -inf.
        return score(torch.where(high_BT | low_BT, 0.0, weight.value_BT), advantages_B1, tokens.logp_pi_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the rule for M_t."""
        stop = f"M_t = 0 where A > 0 and {ratio} > {self.high:g}, or A < 0 and {ratio} < {self.low:g}"
        return f"{product('M_t', stopped(weight), 'A', 'log pi_t')} [{stop}]"


@runtime_checkable
class Held(Protocol):
    """A region that adds w r A until a bound binds, and w A times the ratio at that bound from there on."""

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]: ...
    def held(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> Tensor: ...


def held_ratio(
    region: Held, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor
) -> Float[Tensor, "B T"]:
    """w r A with the gradient w r A grad log r, and w A times the held ratio, flat, where the region's bound binds."""
    ratio_BT = log_ratio_BT.detach().exp()
    high_BT, low_BT = region.clipped(tokens, ratio_BT, advantages_B1)
    bound_BT = times(weight.value_BT, times(region.held(tokens, ratio_BT, advantages_B1), advantages_B1))
    # With A = 0 nothing moves, but a nan stays in the term, so that it stops the run.
    idle_BT = (advantages_B1 == 0) & ~bound_BT.isnan()
    moves_BT = tokens.is_response_BT & ~(high_BT | low_BT | idle_BT)
    # Where the term is flat its ratio is masked before the exponential: 0 times an infinite slope would be nan.
    slope_BT = scaled_exp(weight, torch.where(moves_BT, log_ratio_BT, 0.0), advantages_B1)
    return torch.where(moves_BT, slope_BT, bound_BT)


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class MinClip(RatioBounds):
    """w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): the pessimistic bound of PPO and GRPO.

    Gradient w r A grad log pi, and 0 where the bound binds. Sources: Pr2 Eq. 10 and 14, MiniRL App. A.
    """

    name: ClassVar[str] = "min_clip"
    weight_ratio: ClassVar[WeightRatio] = "old/mu"
    is_tokenwise: ClassVar[bool] = True
    takes_router_shift: ClassVar[bool] = True

    def held(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """The ratio at its bound, for the tokens where one binds."""
        return ratio_BT.clamp(self.low, self.high)

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w min(r A, clip(r) A)."""
        return held_ratio(self, tokens, log_ratio_BT, weight, advantages_B1)

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        return product(weight, f"min({ratio} A, clip({ratio}, {self.low:g}, {self.high:g}) A)")


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class WeightClip(RatioBounds):
    """w sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi: the weight is bounded, no token's gradient is stopped.

    Gradient w clip(r) A grad log pi. The bounds bind whatever the sign of A. Source: CISPO, as in MiniRL App. A.
    """

    name: ClassVar[str] = "weight_clip"
    weight_ratio: ClassVar[WeightRatio] = "old/mu"
    is_tokenwise: ClassVar[bool] = True
    takes_router_shift: ClassVar[bool] = True

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Two masks: r > 1 + eps_high, and r < 1 - eps_low."""
        return ratio_BT > self.high, ratio_BT < self.low

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w sg[clip(r)] A log pi."""
        # Factor.exp detaches: the clipped ratio is a weight, and only log pi has a gradient.
        clipped = weight * Factor.exp(log_ratio_BT).clamp(self.low, self.high)
        return score(clipped.value_BT, advantages_B1, tokens.logp_pi_BT)

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        return product(stopped(product(weight, f"clip({ratio}, {self.low:g}, {self.high:g})")), "A", "log pi_t")
