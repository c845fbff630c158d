"""Figures other than lines over the steps: both engines on one step's tokens and routes, and bars of shares and means.

Papers: R3 (arXiv 2510.11370) Fig. 2 and 3, sec. 3.1 and 3.2, App. H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lab.report.figures import Caption, Figure, bar_layout, bar_trace, hover, line_trace
from lab.report.runs import ReportRun
from lab.report.scale import Scale
from lab.report.style import number
from lab.traces import Trace
from theory.divergences import extreme_fraction
from theory.routing.measures import (
    router_level_histogram,
    sequence_level_histogram,
    token_level_histogram,
    whole_rows,
)
from theory.routing.record import RoutingRecord

MAX_POINTS = 5000
"""Most points of one scatter, all runs together; with more an SVG page is slow."""
TAUS = torch.logspace(0, 1, 61, dtype=torch.float64).tolist()
"""Thresholds of F(tau): from 1 to 10, evenly on a log axis."""


Traced = Any
"""A source of pictures, with an index (its colour), a replicate (its dash), a label and a newest_trace: a run, or a
trace alone (doctor)."""


def probability_scatter(runs: Sequence[Traced]) -> Figure | None:
    """Scatter of sampled tokens by their probabilities under mu and under old (R3 Fig. 2); None without a trace."""
    found = _traces(runs)
    clouds = []
    for run, trace in found:
        is_drawn = _is_drawn(trace)
        mu, old = trace.logp_mu[is_drawn].exp(), trace.logp_old[is_drawn].exp()
        # Evenly spaced, not random, so that the same trace gives the same picture.
        chosen = torch.linspace(0, len(mu) - 1, min(len(mu), MAX_POINTS // len(found))).long()
        points = {"x": _rounded(mu[chosen].tolist()), "y": _rounded(old[chosen].tolist())}
        template = {"hovertemplate": "mu %{x:.3f}, old %{y:.3f}"}
        cloud = {"type": "scatter", "mode": "markers", "name": run.label, "meta": {"run": run.index, "role": "cloud"}}
        clouds.append(((mu - old).abs().mean().item(), cloud | points | template))
    if not clouds:
        return None
    # The widest cloud first, so that the narrower ones stay visible on top of it.
    data = [cloud for _, cloud in sorted(clouds, key=lambda pair: -pair[0])]
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "probability under mu"}, "range": [-0.02, 1.02]},
        "yaxis": {"title": {"text": "probability under old"}, "range": [-0.02, 1.02]},
        "shapes": [{"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "layer": "below"}],
        "hovermode": "closest",
    }
    formula = "(mu(y_t), old(y_t)) of sampled tokens, token ~ mu; equal engines lie on the diagonal"
    caption = Caption(formula, "probability", "R3 sec. 3.1, Fig. 2a to 2c")
    return Figure("probability-scatter", "Probabilities of sampled tokens", caption, data, layout, _which(found))


def extreme_curve(runs: Sequence[Traced]) -> Figure | None:
    """F(tau) over tau, the share of tokens beyond each threshold (R3 Fig. 2d)."""
    found = _traces(runs)
    if not found:
        return None
    data = []
    for run, trace in found:
        mask = _is_drawn(trace)
        shares = [extreme_fraction(trace.logp_old, trace.logp_mu, mask, tau=tau).item() for tau in TAUS]
        x, y = [round(tau, 4) for tau in TAUS], [share or None for share in shares]  # a log axis has no 0
        line = line_trace(run.index, run.label, "line", x, y, replicate=run.replicate)
        data.append(line | hover(map(number, shares)))
    last = max((tau for line in data for tau, share in zip(line["x"], line["y"], strict=True) if share), default=1.0)
    layout: dict[str, Any] = {
        "xaxis": {"type": "log", "title": {"text": "tau"}, "range": [0, math.log10(max(2.0, last))]}
        | {"tickvals": [1, 1.5, 2, 3, 5, 10], "tickangle": 0},
        "yaxis": _log_axis(data, "F(tau)"),
        "hovermode": "x unified",
    }
    formula = "F(tau): fraction of tokens with max(old/mu, mu/old) > tau; a line ends where no token is left"
    caption = Caption(formula, "fraction", "R3 Eq. 3, Fig. 2d")
    return Figure("extreme-curve", "Extreme tokens by threshold", caption, data, layout, _which(found))


@dataclass(frozen=True)
class LevelHistogram:
    """A histogram of routing differences at one of R3's three levels."""

    id: str
    title: str
    histogram: Callable[[RoutingRecord, RoutingRecord], Tensor]
    of: str
    x: str
    formula: str
    panel: str

    def __call__(self, runs: Sequence[Traced]) -> Figure | None:
        found, data = [], []
        for run, trace in _traces(runs):
            mu, old = trace.record_mu, trace.record_old
            # A row has a difference only if both records know it at every layer.
            if mu is None or old is None or not len(whole_rows(mu, old)[1]):
                continue
            found.append((run, trace))
            shares = self.histogram(mu, old).tolist()
            heights = [share or None for share in shares]
            data.append(bar_trace(run, list(range(len(shares))), heights, map(number, shares)))
        if not data:
            return None
        # The axis ends at the largest difference of all runs: empty bins would only make the bars thin.
        last = max(x for bars in data for x, y in zip(bars["x"], bars["y"], strict=True) if y)
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": self.x}, "dtick": max(1, -(-last // 12)), "range": [-0.6, last + 0.6]},
            "yaxis": _log_axis(data, f"share of {self.of}"),
        } | bar_layout(data)
        caption = Caption(self.formula, "fraction", f"R3 sec. 3.2, Fig. {self.panel} and App. H")
        return Figure(self.id, self.title, caption, data, layout, _which(found))


ROUTING_LEVELS = (
    LevelHistogram(
        "router-difference",
        "Differing choices of a router",
        router_level_histogram,
        "routers",
        "differing expert choices",
        "share of (token, layer) with d = K - |I_mu & I_old| = x; the training engine's choices by its live logits",
        "3a",
    ),
    LevelHistogram(
        "token-level-difference",
        "Differing choices of a token",
        token_level_histogram,
        "tokens",
        "differing expert choices over all layers",
        "share of tokens with sum_l d = x",
        "3b",
    ),
    LevelHistogram(
        "sequence-level-difference",
        "Differing choices per token, by response",
        sequence_level_histogram,
        "responses",
        "mean differing choices per token, rounded down",
        "share of responses with x <= mean over tokens of sum_l d < x + 1",
        "3c",
    ),
)


def deviation_tails(runs: Sequence[ReportRun]) -> Figure | None:
    """Shares of (token, layer) by how many of the K cached experts are not pi's own (Pr2 Fig. 4b).

    Of each run the last step that recorded them; None if no run did.
    """
    data, steps = [], set()
    for run in runs:
        rows = [row for row in run.metrics if row.get("routing/one_deviation") is not None]
        if not rows:
            continue
        zero, one = (rows[-1][f"routing/{name}_deviation"] for name in ("zero", "one"))
        shares = [zero, one, max(0.0, 1.0 - zero - one)]
        # Below 1e-12 the remainder is only the rounding of the two shares.
        shares[2] = 0.0 if shares[2] < 1e-12 else shares[2]
        steps.add(rows[-1]["step"])
        heights = [share or None for share in shares]
        data.append(bar_trace(run, ["0", "1", "2 or more"], heights, map(number, shares)))
    if not data:
        return None
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": "experts of K that differ"}},
        "yaxis": _log_axis(data, "share of (token, layer)"),
    } | bar_layout(data)
    caption = Caption("share of (token, layer) with K - |I_cached & I_pi| = x", "fraction", "Pr2 sec. 5.4, Fig. 4b")
    note = f"Last step of each run: {', '.join(str(step) for step in sorted(steps))}."
    return Figure("deviation-tails", "Deviation of the cached route", caption, data, layout, note)


RATIO_PARTS = {
    "discrepancy<br>mu, old": "rollout_corr/k3_kl",
    "staleness<br>old, pi": "staleness/k3_kl",
    "whole<br>mu, pi": "actor/k3_kl_mu_pi",
}


def ratio_parts(runs: Sequence[ReportRun]) -> Figure | None:
    """Means over the recorded steps of k3 for both factors of the importance ratio and for the whole, nats per token.

    Without the runs that lack one of them; None if all do.
    """
    data = []
    for run in runs:
        means = [run.mean(name) for name in RATIO_PARTS.values()]
        if any(mean is None for mean in means):
            continue
        heights = [mean or None for mean in means]
        data.append(bar_trace(run, list(RATIO_PARTS), heights, map(number, means)))
    if not data:
        return None
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "tickangle": 0},
        "yaxis": _log_axis(data, "k3, nats per token"),
    } | bar_layout(data)
    formula = "mean over steps of k3[KL] of each factor of pi/mu = (old/mu) (pi/old)"
    caption = Caption(formula, "nats/token", "MiniRL Eq. 5, Pr2 Eq. 21")
    note = "The logarithms of the factors add up token by token; their k3 need not."
    return Figure("ratio-parts", "Parts of the importance ratio", caption, data, layout, note)


def _log_axis(data: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
    """A log axis over the positive values of these traces, with room below the smallest, so that its bar shows."""
    values = [y for trace in data for y in trace["y"] if y]
    return Scale.of([*values, min(values, default=1.0) / 2], "log").axis() | {"title": {"text": title}}


def _traces(runs: Sequence[Traced]) -> list[tuple[Traced, Trace]]:
    """The newest trace of each run that left one with a sampled token that can be drawn."""
    found = [(run, trace) for run in runs if (trace := run.newest_trace) is not None]
    return [(run, trace) for run, trace in found if bool(_is_drawn(trace).any())]


def _is_drawn(trace: Trace) -> Bool[Tensor, " n"]:
    """Sampled tokens whose log-probabilities are finite on both sides: no figure has a place for NaN."""
    return trace.is_response & trace.logp_mu.isfinite() & trace.logp_old.isfinite()


def _which(found: Sequence[tuple[Traced, Trace]]) -> str:
    steps = {trace.step for _, trace in found}
    if len(steps) == 1:
        return f"Newest trace: step {steps.pop()}."
    return f"Newest trace of each run: {', '.join(f'{run.label} step {trace.step}' for run, trace in found)}."


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
