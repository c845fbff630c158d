"""The interface of trust regions: what turns ratio, advantage and log-probabilities into the term that a token adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from theory.fields import About, require_ranges
from theory.objectives.factors import Factor, linear, times


@dataclass(frozen=True)
class Tokens:
    """The sampled tokens as a region sees them: three log-probabilities, 0 off the mask. Only pi carries a gradient.

    `is_response_BT` is True on the tokens that count; positions and lengths of a response are counted on it.
    """

    logp_pi_BT: Float[Tensor, "B T"]
    logp_old_BT: Float[Tensor, "B T"]
    logp_mu_BT: Float[Tensor, "B T"]
    is_response_BT: Bool[Tensor, "B T"]


WeightRatio = Literal["pi/mu", "old/mu", "none"]


@runtime_checkable
class TrustRegion(Protocol):
    """A trust region.

    `weight_ratio` is the ratio that the weight given to `term` stands for: pi/mu, staleness and engine gap together,
    where the region weighs a score; old/mu, the engine gap alone, where the region multiplies by pi/old itself; none,
    where the region's own factor holds pi/mu, and a weight beside it would count the engine gap twice.
    `is_tokenwise`: a token's term depends on no other token, as centering requires. `takes_router_shift`: the
    ratio in its term is pi/old, or its geometric mean, so that the router-shift ratio can scale it.
    """

    name: ClassVar[str]
    weight_ratio: ClassVar[WeightRatio]
    is_tokenwise: ClassVar[bool]
    takes_router_shift: ClassVar[bool]

    def clipped(
        self, tokens: Tokens, ratio_BT: Float[Tensor, "B T"], advantages_B1: Float[Tensor, "B _T"]
    ) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B T"]] | None:
        """Two masks, True where the upper and where the lower bound binds; None where there is no bound."""
        ...

    def term(
        self, tokens: Tokens, log_ratio_BT: Float[Tensor, "B T"], weight: Factor, advantages_B1: Float[Tensor, "B _T"]
    ) -> Float[Tensor, "B T"]:
        """The term that each token adds to the maximised sum. Only pi and the ratio carry a gradient."""
        ...

    def formula(self, ratio: str, weight: str) -> str:
        """The term in the paper's notation, given the symbols of the ratio and of the weight ("" for none)."""
        ...


TRUST_REGIONS: dict[str, type[TrustRegion]] = {}
"""The trust regions by name."""


@dataclass(frozen=True)
class Widths:
    """The bounds on pi: `eps_high` where A > 0 pushes it up, `eps_low` where A < 0 pushes it down; inf is no bound."""

    eps_low: Annotated[float, About("lower width of the trust region", ge=0)]
    eps_high: Annotated[float, About("upper width of the trust region", ge=0)]

    def __post_init__(self) -> None:
        require_ranges(self)


def score(
    weight_BT: Float[Tensor, "B T"], advantages_B1: Float[Tensor, "B _T"], logp_pi_BT: Float[Tensor, "B T"]
) -> Tensor:
    """w A log pi with the gradient w A; 0 where w or A is 0, also at log pi = -inf or an infinite w."""
    return linear(times(weight_BT, advantages_B1), logp_pi_BT)


def product(*factors: str) -> str:
    """The factors of a formula side by side; empty ones are left out."""
    return " ".join(factor for factor in factors if factor)


def stopped(weight: str) -> str:
    """The weight in a stop-gradient; empty stays empty."""
    return f"sg[{weight}]" if weight else ""
