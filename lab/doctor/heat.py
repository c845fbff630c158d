"""The tokens that carry the KL: the responses with the most of it, every token coloured by its k3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lab.doctor.view import View
from lab.report.style import number
from lab.report.tokens import token_name
from lab.traces import Trace

MOST_RESPONSES = 8
MOST_TOKENS = 160
"""Tokens shown per response, around the one with the largest k3."""


@dataclass(frozen=True)
class HeatToken:
    """A token: its text, its strength in [0, 1] (square root of its k3 over the trace's largest), and a hover text."""

    text: str
    strength: float
    is_extreme: bool
    """Whether max(rho, 1/rho) > 2."""
    hover: str


@dataclass(frozen=True)
class HeatRow:
    """A response, or the shown part of it."""

    response: int
    share: float
    """Its share of the trace's sum of k3."""
    first: int
    num_tokens: int
    cells: Sequence[HeatToken]

    @property
    def where(self) -> str:
        """The shown part in words; "" for the whole response."""
        if len(self.cells) == self.num_tokens:
            return ""
        return f", tokens {self.first} to {self.first + len(self.cells) - 1} of {self.num_tokens}"


@dataclass(frozen=True)
class HeatMap:
    """The responses of a step with the most k3, the largest first; `covered` is their share of its sum."""

    step: int
    num_responses: int
    covered: float
    top: float
    rows: Sequence[HeatRow]


def heat_map(trace: Trace) -> HeatMap | None:
    """The heat map of a trace; None if no sampled token has a k3 above 0, or some log-probability is not finite."""
    view = View.of(trace)
    k3_n = view.k3_n
    if not bool(k3_n.isfinite().all()) or float(k3_n.max()) <= 0:
        return None
    of_B = torch.bincount(view.response_n, k3_n, len(trace))
    # Stable: of equal responses the first one is shown, on every machine.
    worst = [b for b in of_B.argsort(descending=True, stable=True)[:MOST_RESPONSES].tolist() if of_B[b] > 0]
    total, top = float(k3_n.sum()), float(k3_n.max())
    rows = [_row(view, b, top, float(of_B[b]) / total) for b in worst]
    return HeatMap(trace.step, len(trace), sum(row.share for row in rows), top, rows)


def _row(view: View, b: int, top: float, share: float) -> HeatRow:
    own = (view.response_n == b).nonzero()[:, 0]
    worst = int(view.k3_n[own].argmax())
    # Centred on the worst token, but shifted to stay within the response.
    first = max(0, min(worst - MOST_TOKENS // 2, len(own) - MOST_TOKENS))
    shown = own[first : first + MOST_TOKENS].tolist()
    return HeatRow(b, share, first, len(own), [_cell(view, n, top) for n in shown])


def _cell(view: View, n: int, top: float) -> HeatToken:
    mu, old, k3 = float(view.mu_n[n]), float(view.old_n[n]), float(view.k3_n[n])
    text = token_name(int(view.token_n[n]), view.trace.texts)
    hover = (
        f"{text} at {int(view.position_n[n])}: mu {number(math.exp(mu))}, old {number(math.exp(old))}, k3 {number(k3)}"
    )
    # The root, as k3 is about half a squared gap: strengths are then as |log rho|.
    return HeatToken(text, round(math.sqrt(max(k3, 0.0) / top), 3), abs(old - mu) > math.log(2), hover)
