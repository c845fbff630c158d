"""The interface of corrections: a weight on each token, or a condition under which a response stays in the mask.

The base class does nothing; each correction overrides what it changes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.fields import About, require_ranges
from theory.names import listed


@dataclass(frozen=True)
class Correction:
    """The base: weight 1, nothing truncated, nothing rejected. `log_gap_BT` is log(numerator/mu), 0 off the response.

    All log-gaps that the methods take are constants, already 0 where `is_response_BT` is False; values returned off the
    response are meaningless. `title` is the name as papers spell it.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    weighted: ClassVar[bool] = True
    """Whether it reweighs by a ratio; a rejection of tokens has weights too, but only 1 and 0."""
    per_response: ClassVar[bool] = False
    """Whether the weight is one number per response, which a mean counts once and not on every token."""
    is_tokenwise: ClassVar[bool] = False
    """Whether the weight depends on the token's own ratio alone, as centering requires."""

    numerator: Literal["old", "pi"] = "old"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Objectives multiply weights as logarithms, and read `weight` for metrics only.
        if "weight" in vars(cls) and cls.log_weight is Correction.log_weight:
            raise TypeError(f"{cls.__name__}: expected log_weight beside weight, got the base's, which is log 1")

    def __post_init__(self) -> None:
        allowed = ("old", "pi") if self.weighted else ("old",)
        if self.numerator not in allowed:
            raise ValueError(f"{self.name}: expected numerator to be one of {allowed}, got {self.numerator!r}")
        require_ranges(self, self.name)

    @property
    def symbol(self) -> str:
        """The weight in formulas; empty where it is 1."""
        return ""

    @property
    def rejection(self) -> str:
        """The condition under which a response is kept; empty where all are."""
        return ""

    @property
    def verl(self) -> str:
        """verl's name and numbers for the rejection where its bounds are on another ratio; empty where they are not."""
        return ""

    @property
    def formula(self) -> str:
        """Weight and rejection as text, with the numbers in them."""
        keep = f"; keep response i only if {self.rejection}" if self.rejection else ""
        return f"w_t = {self.symbol or '1'}{keep}"

    def log_weight(self, log_gap_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The logarithm of each token's weight, nats; -inf where it is 0."""
        return torch.zeros_like(log_gap_BT)

    def weight(self, log_gap_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The weight of each token, >= 0."""
        return self.log_weight(log_gap_BT, is_response_BT).exp()

    def truncated(self, log_gap_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """True where the weight was cut at its cap, or zeroed."""
        return torch.zeros_like(log_gap_BT, dtype=torch.bool)

    def keep(self, log_rho_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, " B"]:
        """True for the responses that stay, decided on log rho = log(old/mu)."""
        return is_response_BT.new_ones(is_response_BT.shape[0])

    def _gap(self, index: str = "t") -> str:
        return f"{self.numerator}_{index}/mu_{index}"


CORRECTIONS: dict[str, type[Correction]] = {}
"""The corrections by name."""


@listed(CORRECTIONS)
@dataclass(frozen=True)
class NoCorrection(Correction):
    """w_t = 1: the engines are taken to be equal (MiniRL sec. 4.3, "wo. train-infer-is")."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "no weight"
    weighted: ClassVar[bool] = False


@dataclass(frozen=True)
class Truncated(Correction):
    """min(W, cap) for a weight W whose logarithm `_log_weight` gives."""

    cap: Annotated[float, About("upper bound C of the preset's truncated correction", gt=0)] = 2.0

    @abstractmethod
    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """log W of each token."""

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return self._log_weight(log_gap_BT, is_response_BT).clamp(max=math.log(self.cap))

    def weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        # Cut after the exponential: the cap is then met to the bit.
        return self._log_weight(log_gap_BT, is_response_BT).exp().clamp(max=self.cap)

    def _cut(self, weight: str) -> str:
        """The weight in words, under its cap if that is finite."""
        return weight if math.isinf(self.cap) else f"min({weight}, {self.cap:g})"

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where W > cap."""
        # Compared as `weight` cuts it, after the exponential: a W of exactly the cap is not cut.
        return self._log_weight(log_gap_BT, is_response_BT).exp() > self.cap


@dataclass(frozen=True)
class Interval(Correction):
    """A correction with the bounds lo and hi on a ratio."""

    note: ClassVar[str] = ""
    """The end of the error for bounds that are no interval."""

    lo: float = 0.5
    hi: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lo < self.hi:
            raise ValueError(f"{self.name}: expected 0 <= lo < hi, got lo = {self.lo}, hi = {self.hi}{self.note}")

    def outside(self, ratio: Tensor) -> Tensor:
        """True where the ratio lies outside [lo, hi]."""
        # Not for a NaN, which `~(lo <= ratio <= hi)` would reject, and so hide.
        return (ratio < self.lo) | (ratio > self.hi)


def sequence_sum(log_gap_BT: Tensor) -> Tensor:
    """The response's sum on each of its tokens, (B, T)."""
    return log_gap_BT.sum(1, keepdim=True).expand_as(log_gap_BT)


def log_of(x: float) -> float:
    """log x, and -inf for 0."""
    return math.log(x) if x > 0 else -math.inf
