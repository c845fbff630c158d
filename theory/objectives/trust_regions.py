"""What keeps pi near old: a rule that turns ratio, advantage and log pi into the term that a token adds.

Score regions weigh `A log pi` by a constant, the *whole* weight pi/mu (ratio times engine gap). Ratio regions take the
ratio as it is, and only the engine gap old/mu from a correction. Weights come in as constants.
Papers: MiniRL (arXiv 2512.01374) Eq. 7 and App. A, Pr2 (2606.00395) Eq. 10, 14, PPO (1707.06347), CISPO (2506.13585).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@runtime_checkable
class TrustRegion(Protocol):
    """A trust region. `takes` says which weight it wants: "whole" is pi/mu or a part of it, "gap" is old/mu alone."""

    name: ClassVar[str]
    takes: ClassVar[Literal["whole", "gap"]]

    def clipped(
        self, ratio_BT: Float[Tensor, "B T"], advantages_B1: Float[Tensor, "B 1"]
    ) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B T"]] | None:
        """Where the upper and where the lower bound bind; None where there is no bound."""
        ...

    def term(
        self,
        ratio_BT: Float[Tensor, "B T"],
        weight_BT: Float[Tensor, "B T"],
        logp_pi_BT: Float[Tensor, "B T"],
        advantages_B1: Float[Tensor, "B 1"],
    ) -> Float[Tensor, "B T"]:
        """What each token adds to the maximised sum. `weight_BT` carries no gradient."""
        ...

    def formula(self, ratio: str, weight: str) -> str:
        """The term in the paper's notation, given the symbols of the ratio and of the weight ("" for none)."""
        ...


@dataclass(frozen=True)
class NoRegion:
    """w A log pi: the score function, unbounded. Gradient w A grad log pi (MiniRL Eq. 3 with w = pi/mu)."""

    name: ClassVar[str] = "none"
    takes: ClassVar[Literal["whole", "gap"]] = "whole"

    def clipped(self, ratio_BT: Tensor, advantages_B1: Tensor) -> None:
        """No bound."""
        return

    def term(self, ratio_BT: Tensor, weight_BT: Tensor, logp_pi_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """w A log pi."""
        return weight_BT * advantages_B1 * logp_pi_BT

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        return _product(_stopped(weight), "A", "log pi_t")


@dataclass(frozen=True)
class _Bounds:
    eps_low: float
    eps_high: float

    def __post_init__(self) -> None:
        if not 0 <= self.eps_low <= 1:
            raise ValueError(f"eps_low: expected 0 <= eps_low <= 1, got {self.eps_low}")
        if not self.eps_high >= 0:
            raise ValueError(f"eps_high: expected eps_high >= 0, got {self.eps_high}")

    @property
    def low(self) -> float:
        """The lower bound on the ratio, 1 - eps_low; 0 binds nothing."""
        return 1 - self.eps_low

    @property
    def high(self) -> float:
        """The upper bound on the ratio, 1 + eps_high; may be inf, which binds nothing."""
        return 1 + self.eps_high

    def clipped(self, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Where A > 0 and r > 1 + eps_high, and where A < 0 and r < 1 - eps_low: the step has gone far enough."""
        return (advantages_B1 > 0) & (ratio_BT > self.high), (advantages_B1 < 0) & (ratio_BT < self.low)


@dataclass(frozen=True)
class MiniRLMask(_Bounds):
    """M_t sg[w] A log pi: the gradient stops where old says that pi has gone far enough (decoupled PPO).

    M_t is a stop, not a mask: a stopped token stays in every denominator. Gradient M_t w A grad log pi. MiniRL Eq. 7.
    """

    name: ClassVar[str] = "minirl_mask"
    takes: ClassVar[Literal["whole", "gap"]] = "whole"

    def term(self, ratio_BT: Tensor, weight_BT: Tensor, logp_pi_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """M_t sg[w] A log pi."""
        high_BT, low_BT = self.clipped(ratio_BT.detach(), advantages_B1)
        return torch.where(high_BT | low_BT, 0.0, weight_BT) * advantages_B1 * logp_pi_BT

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the rule for M_t."""
        stop = f"M_t = 0 where A > 0 and {ratio} > {self.high:g}, or A < 0 and {ratio} < {self.low:g}"
        return f"{_product('M_t', _stopped(weight), 'A', 'log pi_t')} [{stop}]"


@dataclass(frozen=True)
class MinClip(_Bounds):
    """w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): the pessimistic bound of PPO and GRPO.

    Gradient w r A grad log pi, and 0 where the bound binds. Sources: Pr2 Eq. 10 and 14, MiniRL App. A.
    """

    name: ClassVar[str] = "min_clip"
    takes: ClassVar[Literal["whole", "gap"]] = "gap"

    def term(self, ratio_BT: Tensor, weight_BT: Tensor, logp_pi_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """w min(r A, clip(r) A)."""
        bounded_BT = ratio_BT.clamp(self.low, self.high)
        return weight_BT * torch.minimum(ratio_BT * advantages_B1, bounded_BT * advantages_B1)

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        return _product(weight, f"min({ratio} A, clip({ratio}, {self.low:g}, {self.high:g}) A)")


@dataclass(frozen=True)
class WeightClip(_Bounds):
    """w sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi: the weight is bounded, no token's gradient is stopped.

    Gradient w clip(r) A grad log pi. The bounds bind whatever the sign of A. Source: CISPO, as in MiniRL App. A.
    """

    name: ClassVar[str] = "weight_clip"
    takes: ClassVar[Literal["whole", "gap"]] = "gap"

    def clipped(self, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Where r > 1 + eps_high, and where r < 1 - eps_low."""
        return ratio_BT > self.high, ratio_BT < self.low

    def term(self, ratio_BT: Tensor, weight_BT: Tensor, logp_pi_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """w sg[clip(r)] A log pi."""
        return weight_BT * ratio_BT.detach().clamp(self.low, self.high) * advantages_B1 * logp_pi_BT

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        return _product(_stopped(_product(weight, f"clip({ratio}, {self.low:g}, {self.high:g})")), "A", "log pi_t")


def _product(*factors: str) -> str:
    return " ".join(factor for factor in factors if factor)


def _stopped(weight: str) -> str:
    return f"sg[{weight}]" if weight else ""


__all__ = ["MinClip", "MiniRLMask", "NoRegion", "TrustRegion", "WeightClip"]
