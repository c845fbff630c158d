"""Corrections that reject: a response whose engine gap is too large leaves the mask, and so every denominator.

A rejection of single tokens gives them the weight 0, and leaves them in every denominator, as IcePop does.
Rejections use rho = old/mu whatever the numerator of the weight: they are known before any gradient pass. A response
with a NaN is kept: it then stops the run, where a rejection would hide it.
Papers: MIS and Geo-RS (J. Liu et al., 2025), R3 (arXiv 2510.11370) Eq. 2 for k3, trust region masking (2512.23075); the
names after verl's rollout_corr (0.9.1), whose code is the source of seq_max_* and token_*.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from theory import divergences
from theory.fields import About
from theory.names import listed
from theory.objectives.corrections.base import CORRECTIONS, Correction, Interval, sequence_sum


@dataclass(frozen=True)
class _VerlInterval(Interval):
    """A rejection outside [lo, hi]; verl's k1 is log(mu/old), so its bounds are inverted, and in the other order."""

    note: ClassVar[str] = " (on old/mu; verl's k1 bounds are on mu/old: its [a, b] is [1/b, 1/a] here)"
    verl_mode: ClassVar[str]

    @property
    def verl(self) -> str:
        low, high = (math.inf if x == 0 else 1 / x for x in (self.hi, self.lo))
        return f'{self.verl_mode} with rollout_rs_threshold "{low:.6g}_{high:.6g}", bounds on mu/old'


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqMIS(_VerlInterval):
    """w_t = prod_s rho_s; a response whose product prod_s old/mu lies outside [lo, hi] is rejected, not cut."""

    name: ClassVar[str] = "seq_mis"
    title: ClassVar[str] = "Seq-MIS"
    verl_mode: ClassVar[str] = "seq_sum_k1"
    per_response: ClassVar[bool] = True

    lo: float = 0.0
    hi: float = 2.0

    @property
    def symbol(self) -> str:
        return f"prod_s {self._gap('s')}"

    @property
    def rejection(self) -> str:
        return f"{self.lo:g} <= prod_s old_s/mu_s <= {self.hi:g}"

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return sequence_sum(log_gap_BT)

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where the product lies in [lo, hi], or is NaN."""
        return ~self.outside(log_rho_BT.sum(1).exp())


@listed(CORRECTIONS)
@dataclass(frozen=True)
class GeoRS(_VerlInterval):
    """w_t = 1; a response whose geometric mean (prod_s rho_s)^(1/|y|) lies outside [lo, hi] is rejected."""

    name: ClassVar[str] = "geo_rs"
    title: ClassVar[str] = "Geo-RS"
    verl_mode: ClassVar[str] = "seq_mean_k1"
    weighted: ClassVar[bool] = False

    lo: float = 0.99
    hi: float = 1.01

    @property
    def rejection(self) -> str:
        return f"{self.lo:g} <= (prod_s old_s/mu_s)^(1/|y|) <= {self.hi:g}"

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where the geometric mean lies in [lo, hi], or is NaN."""
        return ~self.outside((log_rho_BT.sum(1) / _lengths(is_response_BT)).exp())


@listed(CORRECTIONS)
@dataclass(frozen=True)
class K3RS(Correction):
    """w_t = 1; a response whose mean k3 of KL(mu || old) exceeds max_k3 nats per token is rejected.

    k3 is non-negative on every token, so gaps of both signs cannot cancel as they do in a geometric mean.
    """

    name: ClassVar[str] = "k3_rs"
    title: ClassVar[str] = "K3-RS"
    weighted: ClassVar[bool] = False

    max_k3: Annotated[float, About("largest mean k3 of a kept response, nats per token", ge=0)] = 0.01

    @property
    def rejection(self) -> str:
        return f"(1/|y|) sum_s (rho_s - 1 - log rho_s) <= {self.max_k3:g}, rho_s = old_s/mu_s"

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where the mean k3 is at most max_k3, or is NaN."""
        # Not `<= max_k3`, which is False for a nan and would reject it.
        return ~(_estimates("k3", log_rho_BT).sum(1) / _lengths(is_response_BT) > self.max_k3)


@dataclass(frozen=True)
class _SeqMax(Correction):
    """w_t = 1; a response is rejected if one of its tokens has diverged by more than a bound."""

    weighted: ClassVar[bool] = False
    estimator: ClassVar[str]

    @property
    @abstractmethod
    def _most(self) -> float:
        """The bound, nats."""

    @property
    def rejection(self) -> str:
        return f"max_s {FORMULAS[self.estimator].format('s')} <= {self._most:g}, rho_s = old_s/mu_s"

    def keep(self, log_rho_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where every estimate of the response is at most the bound, or is NaN."""
        return ~(_estimates(self.estimator, log_rho_BT) > self._most).any(1)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqMaxK2(_SeqMax):
    """w_t = 1; a response with a token whose k2 = (log rho)^2 / 2 exceeds max_k2 nats is rejected.

    Trust region masking: bounds of the first-order gap depend on the largest divergence of a response, which no rule
    on single tokens controls. Source: 2512.23075 (abstract), verl's seq_max_k2.
    Differs from source: (1) the divergence of the paper's guarantee is that of whole distributions, of which k2 is an
    estimate from the sampled token; (2) it is of old against mu, known before any gradient pass, not of pi.
    """

    name: ClassVar[str] = "seq_max_k2"
    title: ClassVar[str] = "Seq-Max-K2"
    estimator: ClassVar[str] = "k2"

    max_k2: Annotated[float, About("largest k2 of a token of a kept response, nats", ge=0)] = 0.05

    @property
    def _most(self) -> float:
        return self.max_k2


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqMaxK3(_SeqMax):
    """w_t = 1; a response with a token whose k3 = rho - 1 - log rho exceeds max_k3 nats is rejected.

    Source and differences as of `SeqMaxK2`, with verl's seq_max_k3.
    """

    name: ClassVar[str] = "seq_max_k3"
    title: ClassVar[str] = "Seq-Max-K3"
    estimator: ClassVar[str] = "k3"

    max_k3: Annotated[float, About("largest k3 of a token of a kept response, nats", ge=0)] = 0.05

    @property
    def _most(self) -> float:
        return self.max_k3


@dataclass(frozen=True)
class _TokenRejection(Correction):
    """w_t = 1, and 0 where the token has diverged by more than its bounds; no denominator changes.

    Source: verl's token_k1, token_k2, token_k3. Differs from source: (1) verl takes a rejected token out of the mask,
    and so out of the denominator of a token mean and of a response's own mean.
    """

    weighted: ClassVar[bool] = False

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        out_BT = self.truncated(log_gap_BT, is_response_BT)
        return torch.where(out_BT, -math.inf, torch.zeros_like(log_gap_BT))


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenK1(_TokenRejection, _VerlInterval):
    """w_t = 1 where rho_t lies in [lo, hi], else 0: IcePop's rule without its weight."""

    name: ClassVar[str] = "token_k1"
    title: ClassVar[str] = "Token-K1"
    verl_mode: ClassVar[str] = "token_k1"

    @property
    def symbol(self) -> str:
        return f"1[{self.lo:g} <= old_t/mu_t <= {self.hi:g}]"

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where rho_t lies outside [lo, hi]."""
        return self.outside(log_gap_BT.exp())


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenK2(_TokenRejection):
    """w_t = 1 where k2 = (log rho_t)^2 / 2 is at most max_k2 nats, else 0."""

    name: ClassVar[str] = "token_k2"
    title: ClassVar[str] = "Token-K2"

    max_k2: Annotated[float, About("largest k2 of a token that counts, nats", ge=0)] = 0.05

    @property
    def symbol(self) -> str:
        return f"1[(log old_t/mu_t)^2 / 2 <= {self.max_k2:g}]"

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where k2 exceeds its bound."""
        return _estimates("k2", log_gap_BT) > self.max_k2


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenK3(_TokenRejection):
    """w_t = 1 where k3 = rho_t - 1 - log rho_t is at most max_k3 nats, else 0."""

    name: ClassVar[str] = "token_k3"
    title: ClassVar[str] = "Token-K3"

    max_k3: Annotated[float, About("largest k3 of a token that counts, nats", ge=0)] = 0.05

    @property
    def symbol(self) -> str:
        return f"1[old_t/mu_t - 1 - log(old_t/mu_t) <= {self.max_k3:g}]"

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where k3 exceeds its bound."""
        return _estimates("k3", log_gap_BT) > self.max_k3


FORMULAS = {"k2": "(log rho_{0})^2 / 2", "k3": "(rho_{0} - 1 - log rho_{0})"}


def _estimates(estimator: str, log_rho_BT: Tensor) -> Tensor:
    """k2 or k3 of KL(mu || old) of each token, nats; 0 off the response."""
    # Against zeros, as the estimators see the difference alone; off the response it is 0 - 0.
    return divergences.ESTIMATORS[estimator](log_rho_BT, torch.zeros_like(log_rho_BT))


def _lengths(is_response_BT: Tensor) -> Tensor:
    # Rows without a response token have sums of 0 and are counted nowhere; 1 keeps their mean at 0.
    return is_response_BT.sum(1).clamp(min=1)
