"""Corrections that reweight: importance weights of a token, of its prefix, of its response, each cut in its own way.

A weight changes a token's term and no denominator, and carries no gradient.
Papers: MiniRL (arXiv 2512.01374) Eq. 2, 3, 7 and sec. 4.2, MinPRO (2601.22718), TIS (F. Yao et al., 2025), IcePop
(X. Zhao et al., 2025). The weights with a lower bound are TRL's, by its code (1.16, GRPOTrainer).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from theory.names import listed
from theory.objectives.corrections.base import CORRECTIONS, Correction, Interval, Truncated, log_of, sequence_sum


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenIS(Correction):
    """w_t = rho_t: the token's own importance weight, untruncated (MiniRL Eq. 3 with numerator "pi")."""

    name: ClassVar[str] = "token_is"
    title: ClassVar[str] = "Token-IS"
    is_tokenwise: ClassVar[bool] = True

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
    is_tokenwise: ClassVar[bool] = True

    @property
    def symbol(self) -> str:
        return self._cut(self._gap())

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return log_gap_BT


@listed(CORRECTIONS)
@dataclass(frozen=True)
class PrefixTIS(Truncated):
    """w_t = min(prod_{s <= t} rho_s, cap): per-decision weight, that of the token and its whole prefix."""

    name: ClassVar[str] = "prefix_tis"
    title: ClassVar[str] = "Prefix-TIS"

    @property
    def symbol(self) -> str:
        return self._cut(f"prod_(s<=t) {self._gap('s')}")

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        # Observations have a log-gap of 0, and so no part in the product.
        return log_gap_BT.cumsum(1)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class MinPRO(Truncated):
    """w_t = min(rho_t min_{s < t} rho_s, cap): the token's ratio times the smallest ratio before it; w_1 = rho_1.

    The minimum replaces the prefix product prod_{s < t} rho_s, whose variance grows with t. It runs over the
    response tokens strictly before t and is not itself held at 1: where every earlier ratio exceeds 1, so does it.
    Source: MinPRO, its objective sg[clip(rho_t min_{s<t} rho_s, 1 - eps_low, 1 + eps_high)] A log pi.
    Differs from source: (1) there rho is pi over the policy that sampled, so numerator "pi" (the preset's) is the
    paper's weight and "old" that of the engine gap alone; (2) there is no lower bound, as in our CISPO.
    """

    name: ClassVar[str] = "minpro"
    title: ClassVar[str] = "MinPRO's weight"

    @property
    def symbol(self) -> str:
        return self._cut(f"{self._gap()} min_(s<t) {self._gap('s')}")

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        # A token that mu did not sample has no ratio: it must not enter the minimum as a ratio of 1.
        candidates_BT = torch.where(is_response_BT, log_gap_BT, math.inf)
        # Shifted by one, so that only earlier tokens count; `before_BT` drops the value that wraps round to t = 0.
        smallest_BT = torch.cummin(candidates_BT, 1).values.roll(1, 1)
        before_BT = (is_response_BT.cumsum(1) - is_response_BT.long()) > 0
        return log_gap_BT + torch.where(before_BT, smallest_BT, 0.0)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqTIS(Truncated):
    """w_t = min(prod_s rho_s, cap): the response's weight on each of its tokens (MiniRL Eq. 2 with "pi", cap inf)."""

    name: ClassVar[str] = "seq_tis"
    title: ClassVar[str] = "Seq-TIS"
    per_response: ClassVar[bool] = True

    @property
    def symbol(self) -> str:
        return self._cut(f"prod_s {self._gap('s')}")

    def _log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return sequence_sum(log_gap_BT)


@dataclass(frozen=True)
class Clipped(Interval):
    """min(max(W, lo), hi) for a weight W whose logarithm `_log_weight` gives: truncated at both ends."""

    @abstractmethod
    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        """log W of each token."""

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        return self._log_weight(log_gap_BT).clamp(log_of(self.lo), log_of(self.hi))

    def weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        # Cut after the exponential, as in Truncated: both bounds are then met to the bit.
        return self._log_weight(log_gap_BT).exp().clamp(self.lo, self.hi)

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where W lies outside [lo, hi]."""
        return self.outside(self._log_weight(log_gap_BT).exp())


@listed(CORRECTIONS)
@dataclass(frozen=True)
class TokenClip(Clipped):
    """w_t = min(max(rho_t, lo), hi): Token-TIS with a lower bound, so that no token's weight vanishes.

    Source: TRL's code, vllm_importance_sampling_mode "token_truncate" with clip_min and clip_max.
    """

    name: ClassVar[str] = "token_clip"
    title: ClassVar[str] = "Token-Clip"
    is_tokenwise: ClassVar[bool] = True

    @property
    def symbol(self) -> str:
        return f"clip({self._gap()}, {self.lo:g}, {self.hi:g})"

    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        return log_gap_BT


@listed(CORRECTIONS)
@dataclass(frozen=True)
class SeqClip(Clipped):
    """w_t = min(max(prod_s rho_s, lo), hi): Seq-TIS with a lower bound. Source: TRL's code, "sequence_truncate"."""

    name: ClassVar[str] = "seq_clip"
    title: ClassVar[str] = "Seq-Clip"
    per_response: ClassVar[bool] = True

    @property
    def symbol(self) -> str:
        return f"clip(prod_s {self._gap('s')}, {self.lo:g}, {self.hi:g})"

    def _log_weight(self, log_gap_BT: Tensor) -> Tensor:
        return sequence_sum(log_gap_BT)


@listed(CORRECTIONS)
@dataclass(frozen=True)
class IcePop(Interval):
    """w_t = rho_t inside [lo, hi], else 0. A zeroed token stays in the mask and in every denominator."""

    name: ClassVar[str] = "icepop"
    title: ClassVar[str] = "IcePop"
    is_tokenwise: ClassVar[bool] = True

    hi: float = 5.0

    @property
    def symbol(self) -> str:
        return f"{self._gap()} 1[{self.lo:g} <= {self._gap()} <= {self.hi:g}]"

    def log_weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        # By `truncated`, so that the weight and its metric agree on a token at the bound.
        return torch.where(self.truncated(log_gap_BT, is_response_BT), -math.inf, log_gap_BT)

    def truncated(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
        """True where rho_t lies outside [lo, hi]."""
        return self.outside(log_gap_BT.exp())
