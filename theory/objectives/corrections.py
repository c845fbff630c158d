"""Corrections of the engine gap: weights that reweight what mu sampled, and rejections that leave responses out.

A weight changes what a token adds and no denominator; a rejection takes a response out of the mask and so out of every
denominator. Neither carries a gradient. With `numerator="old"` a weight is built on rho = old/mu, the engine gap
alone (decoupled from the ratio pi/old); with "pi" on pi/mu, the whole weight, which then holds the ratio.
Rejections always look at rho = old/mu: they are known before any gradient pass.
Papers: MiniRL (arXiv 2512.01374) Eq. 3, 5, 7 and sec. 4.2, R3 (2510.11370) Eq. 2; the corrections' names after verl's
rollout_corr, TIS (F. Yao et al., 2025), MIS and Geo-RS (J. Liu et al., 2025), IcePop (X. Zhao et al., 2025).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory import divergences
from theory.names import number, unknown_name


@dataclass(frozen=True)
class Correction:
    """The base: weight 1, nothing truncated, nothing rejected. `log_gap_BT` is log(numerator/mu), 0 off the response.

    All log-gaps that the methods take are constants, already 0 where `is_response_BT` is False.
    """

    name: ClassVar[str]
    weighted: ClassVar[bool] = True

    numerator: Literal["old", "pi"] = "old"

    def __post_init__(self) -> None:
        allowed = ("old", "pi") if self.weighted else ("old",)
        if self.numerator not in allowed:
            raise ValueError(f"{self.name}: expected numerator to be one of {allowed}, got {self.numerator!r}")

    @property
    def symbol(self) -> str:
        """The weight in formulas; empty where it is 1."""
        return ""

    @property
    def rejection(self) -> str:
        """The condition under which a response is kept; empty where all are."""
        return ""

    @property
    def formula(self) -> str:
        """Weight and rejection as text, with the numbers in them."""
        keep = f"; keep response i only if {self.rejection}" if self.rejection else ""
        return f"w_t = {self.symbol or '1'}{keep}"

    def weight(self, log_gap_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The weight of each token, >= 0."""
        return torch.ones_like(log_gap_BT)

    def truncated(self, log_gap_BT: Float[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Where the weight was cut at its cap, or zeroed."""
        return torch.zeros_like(log_gap_BT, dtype=torch.bool)

    def keep(self, log_rho_BT: Float[Tensor, "B T"], is_response_BT: Bool[Tensor, "B T"]) -> Bool[Tensor, " B"]:
        """Which responses stay, decided on log rho = log(old/mu)."""
        return is_response_BT.new_ones(is_response_BT.shape[0])

    def _gap(self) -> str:
        return f"{self.numerator}_t/mu_t"


@dataclass(frozen=True)
class NoCorrection(Correction):
    """w_t = 1: the engines are taken to be equal (MiniRL sec. 4.3, "wo. train-infer-is")."""

    name: ClassVar[str] = "none"
    weighted: ClassVar[bool] = False


@dataclass(frozen=True)
class TokenIS(Correction):
    """w_t = rho_t: the token's own importance weight, untruncated (MiniRL Eq. 3 with numerator "pi")."""

    name: ClassVar[str] = "token_is"

    @property
    def symbol(self) -> str:
        return self._gap()

    def weight(self, log_gap_BT: Tensor) -> Tensor:
        return log_gap_BT.exp()


@dataclass(frozen=True)
class _Truncated(Correction):
    """min(W, cap) for a weight W whose logarithm `_log_weight` gives."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cap > 0:
            raise ValueError(f"{self.name}: expected cap > 0, got {self.cap}")

    @abstractmethod
    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        """log W of each token."""

    def weight(self, log_gap_BT: Tensor) -> Tensor:
        return self._log_weight(log_gap_BT).exp().clamp(max=self.cap)

    def truncated(self, log_gap_BT: Tensor) -> Tensor:
        """Where W > cap."""
        return self._log_weight(log_gap_BT).exp() > self.cap


@dataclass(frozen=True)
class TokenTIS(_Truncated):
    """w_t = min(rho_t, cap): truncated token weight (MiniRL sec. 4.2: cap 5 on pi/mu)."""

    name: ClassVar[str] = "token_tis"

    @property
    def symbol(self) -> str:
        return f"min({self._gap()}, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        return log_gap_BT


@dataclass(frozen=True)
class PrefixTIS(_Truncated):
    """w_t = min(prod_{s <= t} rho_s, cap): per-decision weight, that of everything which led to the token."""

    name: ClassVar[str] = "prefix_tis"

    @property
    def symbol(self) -> str:
        return f"min(prod_(s<=t) {self.numerator}_s/mu_s, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        return log_gap_BT.cumsum(1)


@dataclass(frozen=True)
class SeqTIS(_Truncated):
    """w_t = min(prod_s rho_s, cap): the response's weight on each of its tokens (MiniRL Eq. 2 with "pi", cap inf)."""

    name: ClassVar[str] = "seq_tis"

    @property
    def symbol(self) -> str:
        return f"min(prod_s {self.numerator}_s/mu_s, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        return _sequence_sum(log_gap_BT)


@dataclass(frozen=True)
class IcePop(Correction):
    """w_t = rho_t inside [lo, hi], else 0. A zeroed token stays in the mask and in every denominator."""

    name: ClassVar[str] = "icepop"

    lo: float = 0.5
    hi: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_interval(self.name, self.lo, self.hi)

    @property
    def symbol(self) -> str:
        return f"{self._gap()} 1[{self.lo:g} <= {self._gap()} <= {self.hi:g}]"

    def weight(self, log_gap_BT: Tensor) -> Tensor:
        return torch.where(self.truncated(log_gap_BT), 0.0, log_gap_BT.exp())

    def truncated(self, log_gap_BT: Tensor) -> Tensor:
        """Where rho_t lies outside [lo, hi]."""
        gap_BT = log_gap_BT.exp()
        return (gap_BT < self.lo) | (gap_BT > self.hi)


@dataclass(frozen=True)
class SeqMIS(Correction):
    """w_t = prod_s rho_s; a response whose product prod_s old/mu lies outside [lo, hi] is rejected, not cut."""

    name: ClassVar[str] = "seq_mis"

    lo: float = 0.0
    hi: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_interval(self.name, self.lo, self.hi)

    @property
    def symbol(self) -> str:
        return f"prod_s {self.numerator}_s/mu_s"

    @property
    def rejection(self) -> str:
        return f"{self.lo:g} <= prod_s old_s/mu_s <= {self.hi:g}"

    def weight(self, log_gap_BT: Tensor) -> Tensor:
        return _sequence_sum(log_gap_BT).exp()

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where the product lies in [lo, hi]."""
        product_B = log_rho_BT.sum(1).exp()
        return (product_B >= self.lo) & (product_B <= self.hi)


@dataclass(frozen=True)
class GeoRS(Correction):
    """w_t = 1; a response whose geometric mean (prod_s rho_s)^(1/|y|) lies outside [lo, hi] is rejected."""

    name: ClassVar[str] = "geo_rs"
    weighted: ClassVar[bool] = False

    lo: float = 0.99
    hi: float = 1.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_interval(self.name, self.lo, self.hi)

    @property
    def rejection(self) -> str:
        return f"{self.lo:g} <= (prod_s old_s/mu_s)^(1/|y|) <= {self.hi:g}"

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where the geometric mean lies in [lo, hi]."""
        mean_B = (log_rho_BT.sum(1) / _lengths(is_response_BT)).exp()
        return (mean_B >= self.lo) & (mean_B <= self.hi)


@dataclass(frozen=True)
class K3RS(Correction):
    """w_t = 1; a response whose mean k3 of KL(mu || old) exceeds max_k3 nats a token is rejected.

    k3 is non-negative a token, so gaps of both signs cannot cancel as they do in a geometric mean.
    """

    name: ClassVar[str] = "k3_rs"
    weighted: ClassVar[bool] = False

    max_k3: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.max_k3 >= 0:
            raise ValueError(f"{self.name}: expected max_k3 >= 0, got {self.max_k3}")

    @property
    def rejection(self) -> str:
        return f"(1/|y|) sum_s (rho_s - 1 - log rho_s) <= {self.max_k3:g}, rho_s = old_s/mu_s"

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where the mean k3 is at most max_k3."""
        k3_BT = divergences.k3(log_rho_BT, torch.zeros_like(log_rho_BT))
        return k3_BT.sum(1) / _lengths(is_response_BT) <= self.max_k3


def _sequence_sum(log_gap_BT: Tensor) -> Tensor:
    return log_gap_BT.sum(1, keepdim=True).expand_as(log_gap_BT)


def _lengths(is_response_BT: Tensor) -> Tensor:
    # Rows without a response token have sums of 0 and are counted nowhere; 1 keeps their mean at 0.
    return is_response_BT.sum(1).clamp(min=1)


def _require_interval(name: str, lo: float, hi: float) -> None:
    if not 0 <= lo < hi:
        raise ValueError(f"{name}: expected 0 <= lo < hi, got lo = {lo}, hi = {hi}")


CORRECTIONS: dict[str, type[Correction]] = {
    c.name: c for c in (NoCorrection, TokenIS, TokenTIS, PrefixTIS, SeqTIS, IcePop, SeqMIS, GeoRS, K3RS)
}
"""The nine corrections by name."""


def correction(name: str, **params: Any) -> Correction:
    """The named correction with these parameters; the rest keep their defaults.

    Raises ValueError for an unknown name or parameter, with the nearest valid one, and for a value out of range.
    """
    if name not in CORRECTIONS:
        raise unknown_name("correction", name, CORRECTIONS)
    cls = CORRECTIONS[name]
    valid = [field.name for field in fields(cls)]
    for param in params:
        if param not in valid:
            raise unknown_name(f"parameter of {name}", param, valid)
    return cls(**{param: _value(name, param, value) for param, value in params.items()})


def _value(name: str, param: str, value: Any) -> Any:
    return value if param == "numerator" else number(f"{name}: {param}", value)


__all__ = [
    "CORRECTIONS", "Correction", "GeoRS", "IcePop", "K3RS", "NoCorrection", "PrefixTIS", "SeqMIS", "SeqTIS", "TokenIS",
    "TokenTIS", "correction",
]  # fmt: skip
