"""Corrections that reweight: importance weights of a token, of its prefix, of its response, each cut in its own way.

A weight changes what a token adds and no denominator, and carries no gradient.
Papers: MiniRL (arXiv 2512.01374) Eq. 2, 3, 7 and sec. 4.2, MinPRO (2601.22718), TIS (F. Yao et al., 2025), IcePop
(X. Zhao et al., 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from theory.names import listed
from theory.objectives.corrections.base import CORRECTIONS, Correction, Truncated, require_interval, sequence_sum


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenIS(Correction):
    """w_t = rho_t: the token's own importance weight, untruncated (MiniRL Eq. 3 with numerator "pi")."""

    name: ClassVar[str] = "token_is"
    title: ClassVar[str] = "Token-IS"

    @property
    def symbol(self) -> str:
        return self._gap()

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return log_gap_BT


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenTIS(Truncated):
    """w_t = min(rho_t, cap): truncated token weight (MiniRL sec. 4.2: cap 5 on pi/mu)."""

    name: ClassVar[str] = "token_tis"
    title: ClassVar[str] = "Token-TIS"

    @property
    def symbol(self) -> str:
        return f"min({self._gap()}, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return log_gap_BT


@listed(CORRECTIONS)
@dataclass(frozen=True)
class PrefixTIS(Truncated):
    """w_t = min(prod_{s <= t} rho_s, cap): per-decision weight, that of everything which led to the token."""

    name: ClassVar[str] = "prefix_tis"
    title: ClassVar[str] = "Prefix-TIS"

    @property
    def symbol(self) -> str:
        return f"min(prod_(s<=t) {self._gap('s')}, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return log_gap_BT.cumsum(1)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class MinPRO(Truncated):
    """w_t = min(rho_t min_{s < t} rho_s, cap): the token's ratio times the smallest ratio before it; w_1 = rho_1.

    The minimum stands for the prefix product prod_{s < t} rho_s, whose variance grows with t. It runs over the
    response tokens strictly before t and is not itself held at 1: where every earlier ratio exceeds 1, so does it.
    Source: MinPRO, its objective sg[clip(rho_t min_{s<t} rho_s, 1 - eps_low, 1 + eps_high)] A log pi.
    Differs from source: (1) there rho is pi over the policy that sampled, so numerator "pi" (the preset's) is the
    paper's weight and "old" that of the engine gap alone; (2) there is no lower bound, as in our CISPO.
    """

    name: ClassVar[str] = "minpro"
    title: ClassVar[str] = "MinPRO's weight"

    @property
    def symbol(self) -> str:
        return f"min({self._gap()} min_(s<t) {self._gap('s')}, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        # A token that mu did not sample has no ratio: it must not enter the minimum as a ratio of 1.
        candidates_BT = torch.where(is_response_BT, log_gap_BT, math.inf)
        smallest_BT = torch.cummin(candidates_BT, 1).values.roll(1, 1)
        before_BT = (is_response_BT.cumsum(1) - is_response_BT.long()) > 0
        return log_gap_BT + torch.where(before_BT, smallest_BT, 0.0)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqTIS(Truncated):
    """w_t = min(prod_s rho_s, cap): the response's weight on each of its tokens (MiniRL Eq. 2 with "pi", cap inf)."""

    name: ClassVar[str] = "seq_tis"
    title: ClassVar[str] = "Seq-TIS"

    @property
    def symbol(self) -> str:
        return f"min(prod_s {self._gap('s')}, {self.cap:g})"

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return sequence_sum(log_gap_BT)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class IcePop(Correction):
    """w_t = rho_t inside [lo, hi], else 0. A zeroed token stays in the mask and in every denominator."""

    name: ClassVar[str] = "icepop"
    title: ClassVar[str] = "IcePop"

    lo: float = 0.5
    hi: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_interval(self.name, self.lo, self.hi)

    @property
    def symbol(self) -> str:
        return f"{self._gap()} 1[{self.lo:g} <= {self._gap()} <= {self.hi:g}]"

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return torch.where(self.truncated(log_gap_BT, is_response_BT), -math.inf, log_gap_BT)

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """Where rho_t lies outside [lo, hi]."""
        gap_BT = log_gap_BT.exp()
        return (gap_BT < self.lo) | (gap_BT > self.hi)


__all__ = ["IcePop", "MinPRO", "PrefixTIS", "SeqTIS", "TokenIS", "TokenTIS"]
