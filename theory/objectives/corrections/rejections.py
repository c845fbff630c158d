"""Corrections that reject: a response whose engine gap is too large leaves the mask, and so every denominator.

Rejections look at rho = old/mu whatever the numerator of the weight: they are known before any gradient pass. A
response with a NaN is kept: it then stops the run, where a rejection would hide it.
Papers: MIS and Geo-RS (J. Liu et al., 2025), R3 (arXiv 2510.11370) Eq. 2 for k3; the names after verl's rollout_corr.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from theory import divergences
from theory.fields import About
from theory.names import listed
from theory.objectives.corrections.base import CORRECTIONS, Correction, require_interval, sequence_sum

_INVERSE = " (on old/mu; verl's k1 bounds are on mu/old: its [a, b] is [1/b, 1/a] here)"


def _verl(mode: str, lo: float, hi: float) -> str:
    """The same bounds in verl, whose k1 is log(mu/old): inverted, and in the other order."""
    low, high = (math.inf if x == 0 else 1 / x for x in (hi, lo))
    return f'{mode} with rollout_rs_threshold "{low:.6g}_{high:.6g}", bounds on mu/old'


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqMIS(Correction):
    """w_t = prod_s rho_s; a response whose product prod_s old/mu lies outside [lo, hi] is rejected, not cut."""

    name: ClassVar[str] = "seq_mis"
    title: ClassVar[str] = "Seq-MIS"

    lo: float = 0.0
    hi: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_interval(self.name, self.lo, self.hi, _INVERSE)

    @property
    def symbol(self) -> str:
        return f"prod_s {self._gap('s')}"

    @property
    def rejection(self) -> str:
        return f"{self.lo:g} <= prod_s old_s/mu_s <= {self.hi:g}"

    @property
    def verl(self) -> str:
        return _verl("seq_sum_k1", self.lo, self.hi)

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return sequence_sum(log_gap_BT)

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where the product lies in [lo, hi], or is NaN."""
        product_B = log_rho_BT.sum(1).exp()
        return ~((product_B < self.lo) | (product_B > self.hi))


@listed(CORRECTIONS)
@dataclass(frozen=True)
class GeoRS(Correction):
    """w_t = 1; a response whose geometric mean (prod_s rho_s)^(1/|y|) lies outside [lo, hi] is rejected."""

    name: ClassVar[str] = "geo_rs"
    title: ClassVar[str] = "Geo-RS"
    weighted: ClassVar[bool] = False

    lo: float = 0.99
    hi: float = 1.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_interval(self.name, self.lo, self.hi, _INVERSE)

    @property
    def rejection(self) -> str:
        return f"{self.lo:g} <= (prod_s old_s/mu_s)^(1/|y|) <= {self.hi:g}"

    @property
    def verl(self) -> str:
        return _verl("seq_mean_k1", self.lo, self.hi)

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where the geometric mean lies in [lo, hi], or is NaN."""
        mean_B = (log_rho_BT.sum(1) / _lengths(is_response_BT)).exp()
        return ~((mean_B < self.lo) | (mean_B > self.hi))


@listed(CORRECTIONS)
@dataclass(frozen=True)
class K3RS(Correction):
    """w_t = 1; a response whose mean k3 of KL(mu || old) exceeds max_k3 nats a token is rejected.

    k3 is non-negative a token, so gaps of both signs cannot cancel as they do in a geometric mean.
    """

    name: ClassVar[str] = "k3_rs"
    title: ClassVar[str] = "K3-RS"
    weighted: ClassVar[bool] = False

    max_k3: Annotated[float, About("largest mean k3 of a kept response, nats a token", ge=0)] = 0.01

    @property
    def rejection(self) -> str:
        return f"(1/|y|) sum_s (rho_s - 1 - log rho_s) <= {self.max_k3:g}, rho_s = old_s/mu_s"

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where the mean k3 is at most max_k3, or is NaN."""
        k3_BT = divergences.k3(log_rho_BT, torch.zeros_like(log_rho_BT))
        return ~(k3_BT.sum(1) / _lengths(is_response_BT) > self.max_k3)


def _lengths(is_response_BT: Tensor) -> Tensor:
    # Rows without a response token have sums of 0 and are counted nowhere; 1 keeps their mean at 0.
    return is_response_BT.sum(1).clamp(min=1)


__all__ = ["GeoRS", "K3RS", "SeqMIS"]
