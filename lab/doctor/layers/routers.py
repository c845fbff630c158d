"""A trace without hidden states: the layers with routes that rounding cannot explain.

The reference passes over the trace's tokens with the engine's own experts at every layer, so that a different choice in
one layer does not carry over. With the reference's scores s (the values that its top-k compares: logits, or sigmoids
with their bias) and a row's chosen set C, the choice exceeds its margin by max_{e not in C} s_e - min_{e in C} s_e. An
error z of the scores can only cause that choice if max z - min z is as large; so a row is beyond its margin where the
excess is above FACTOR times the 95 % quantile over rows of max z - min z, z the rounding error of these scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.doctor.layers.modules import FACTOR, SHARE
from lab.doctor.layers.reference import Precision, ReferenceModules, Routed
from lab.doctor.view import View
from lab.traces import Trace
from theory.routing.record import RoutingRecord

ROUTES_OUT = 0.01
"""Share of rows beyond their margin above which a layer is out, in [0, 1]."""
TIMES = 2.0
"""Multiple of the rows that rounding changes, plus four standard errors, above which a layer is out as well."""
FLOOR = 1e-4
"""Smallest band, in units of the scores or in nats."""


@dataclass(frozen=True)
class RouterCheck:
    """A layer's routes as shares of its rows: those that differ, and those that rounding cannot explain."""

    layer: int
    share_differs: float
    share_expected: float
    """Rows whose choice rounding changes in the reference itself."""
    share_out: float
    band: float
    """The 95 % quantile of max z - min z, in units of the scores."""
    num_rows: int

    @property
    def is_out(self) -> bool:
        """Whether more than ROUTES_OUT of the rows are beyond their margin, or far more differ than by rounding."""
        # The count is about Poisson: its standard error is its root.
        usual = TIMES * self.share_expected * self.num_rows
        is_more = self.share_differs * self.num_rows > usual + 4 * (usual + 1) ** 0.5
        return self.share_out > ROUTES_OUT or is_more


@dataclass(frozen=True)
class TokensCheck:
    """The log-probabilities of one side's sampled tokens against the reference's."""

    error: float
    """Median of |log p - log p of the reference|, in nats."""
    band: float
    share_out: float

    @property
    def is_out(self) -> bool:
        """Whether they are outside the band."""
        return self.share_out > SHARE


@dataclass(frozen=True)
class RoutesFound:
    """One side of a trace: its routers, layer by layer, and its log-probabilities."""

    routers: Sequence[RouterCheck]
    tokens: TokensCheck
    unseen: Sequence[int] = ()
    """Layers without a recorded row, which have no check."""

    @property
    def first(self) -> RouterCheck | None:
        """The first layer whose routers are out."""
        return next((one for one in self.routers if one.is_out), None)

    @property
    def is_out(self) -> bool:
        """Whether a router or the log-probabilities are out."""
        return self.first is not None or self.tokens.is_out


def trace_routes(trace: Trace, side: str, reference: ReferenceModules, precision: Precision) -> RoutesFound:
    """The routers and log-probabilities of `side` (mu or old) of a trace against the reference.

    A trainer that replays (R3) computes old on mu's experts, and its recorded ones are the choices of its live logits
    there. A trace does not say so: of old, the pass is taken whose log-probabilities are nearer.
    """
    record = trace.record_mu if side == "mu" else trace.record_old
    view, stops = View.of(trace), trace.offsets.tolist()
    sequences = [trace.tokens[a:b].long() for a, b in itertools.pairwise(stops)]
    logp_n = view.mu_n if side == "mu" else view.old_n
    # Without a temperature in the trace, log-probabilities count as those at 1.
    temperature = trace.temperature or 1.0

    def passed(one: ReferenceModules, replayed: RoutingRecord | None) -> Routed:
        return one.routed(sequences, replayed, temperature)

    replayed, exact = record, passed(reference, record)
    if side == "old" and trace.record_mu is not None and reference.replays:
        on_mus = passed(reference, trace.record_mu)
        far, near_mu = ((logp_n - one.logp_R[view.row_n].double()).abs().median() for one in (exact, on_mus))
        if near_mu < far:
            replayed, exact = trace.record_mu, on_mus
    near = passed(reference.rounded(precision), replayed)
    found = {} if record is None else {layer: _router(record, layer, exact, near) for layer in sorted(exact.scores)}
    tokens = _tokens(logp_n, *(one.logp_R[view.row_n].double() for one in (exact, near)))
    unseen = [layer for layer, one in found.items() if one is None]
    return RoutesFound([one for one in found.values() if one is not None], tokens, unseen)


def _router(record: RoutingRecord, layer: int, exact: Routed, near: Routed) -> RouterCheck | None:
    """The check of a layer's routes; None without a recorded row."""
    if layer not in record.layer_numbers:
        raise ValueError(f"layer_numbers: expected the model's {layer} among them, got {record.layer_numbers}")
    experts_RK, s_RE = record.layer(layer).long(), exact.scores[layer].double()
    # The band is over all rows; the comparison only over rows with recorded experts. One slot tells: a record has -1 in
    # every slot of a row or in none.
    is_there_R = experts_RK[:, 0] >= 0
    if not bool(is_there_R.any()):
        return None
    z_RE = near.scores[layer].double() - s_RE
    band = max(torch.quantile(z_RE.amax(1) - z_RE.amin(1), 0.95).item(), FLOOR)
    natural_RK, rounded_RK = (side.natural[layer].long()[is_there_R] for side in (exact, near))
    s_RE, experts_RK = s_RE[is_there_R], experts_RK[is_there_R]
    # Ids ascend within a row, so unequal rows are unequal sets.
    differs_R, expected_R = ((found != natural_RK).any(1) for found in (experts_RK, rounded_RK))
    is_over_R = (over_margin(s_RE, experts_RK) > FACTOR * band) & exact.has_margins
    differs, expected, over = (is_so.double().mean().item() for is_so in (differs_R, expected_R, is_over_R))
    return RouterCheck(layer, differs, expected, over, band, len(s_RE))


def over_margin(scores_RE: Float[Tensor, "R E"], experts_RK: Int[Tensor, "R K"]) -> Float[Tensor, " R"]:
    """Largest score of an unchosen expert - smallest of a chosen one; at most 0 for the scores' own top-k."""
    is_chosen = torch.zeros_like(scores_RE, dtype=torch.bool).scatter(1, experts_RK, True)
    best_other = scores_RE.masked_fill(is_chosen, -torch.inf).amax(1)
    return best_other - scores_RE.masked_fill(~is_chosen, torch.inf).amin(1)


def _tokens(own_n: Float[Tensor, " n"], exact_n: Float[Tensor, " n"], near_n: Float[Tensor, " n"]) -> TokensCheck:
    """The check of the sampled tokens' log-probabilities against the exact and the rounded reference's."""
    band = max(torch.quantile((near_n - exact_n).abs(), 0.95).item(), FLOOR)
    error_n = (own_n - exact_n).abs().nan_to_num(torch.inf)  # nan is as far off as can be, and compares as less
    return TokensCheck(error_n.median().item(), band, (error_n > FACTOR * band).double().mean().item())
