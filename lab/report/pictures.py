"""Pictures of single traces: what the two engines made of the tokens of one global step.

Papers: R3 (arXiv 2510.11370) Fig. 2 and 3, sec. 3.1 and 3.2, App. H.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lab.report.figures import Caption, Figure
from lab.report.runs import Run
from lab.report.style import number
from lab.traces import Trace
from theory.divergences import extreme_fraction
from theory.routing.measures import router_level_histogram

MAX_POINTS = 5000
"""Points of one scatter, all runs together: more make an SVG page slow."""
TAUS = torch.logspace(0, 1, 61, dtype=torch.float64).tolist()
"""Thresholds of F(tau): from 1 to 10, evenly on a log axis."""


def probability_scatter(runs: Sequence[Run]) -> Figure | None:
    """Each sampled token at (its probability under mu, its probability under old), as R3 Fig. 2 draws it."""
    found = _traces(runs)
    clouds = []
    for run, trace in found:
        mu, old = trace.logp_mu[trace.is_response].exp(), trace.logp_old[trace.is_response].exp()
        # Evenly spaced tokens: the same trace gives the same picture.
        chosen = torch.linspace(0, len(mu) - 1, min(len(mu), MAX_POINTS // len(found))).long()
        points = {"x": _rounded(mu[chosen].tolist()), "y": _rounded(old[chosen].tolist())}
        hover = {"hovertemplate": "mu %{x:.3f}, old %{y:.3f}"}
        cloud = {"type": "scatter", "mode": "markers", "name": run.label, "meta": {"run": run.index, "role": "cloud"}}
        clouds.append(((mu - old).abs().mean().item(), cloud | points | hover))
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


def extreme_curve(runs: Sequence[Run]) -> Figure | None:
    """F(tau) over tau, as R3 Fig. 2d draws it: how the shares of ever more extreme tokens fall off."""
    found = _traces(runs)
    if not found:
        return None
    data = []
    for run, trace in found:
        mask = trace.is_response
        shares = [extreme_fraction(trace.logp_old, trace.logp_mu, mask, tau=tau).item() for tau in TAUS]
        data.append(
            {"type": "scatter", "mode": "lines", "name": run.label, "meta": {"run": run.index, "role": "line"}}
            | {"x": [round(tau, 4) for tau in TAUS], "y": [share or None for share in shares]}
            | {"customdata": [number(share) for share in shares], "hovertemplate": "%{customdata}"}
        )
    last = max((tau for line in data for tau, share in zip(line["x"], line["y"], strict=True) if share), default=1.0)
    layout: dict[str, Any] = {
        "xaxis": {"type": "log", "title": {"text": "tau"}, "range": [0, math.log10(max(2.0, last))]}
        | {"tickvals": [1, 1.25, 1.5, 2, 3, 5, 10]},
        "yaxis": {"type": "log", "exponentformat": "power", "dtick": 1, "title": {"text": "F(tau)"}},
        "hovermode": "x unified",
    }
    formula = "F(tau): fraction of tokens with max(old/mu, mu/old) > tau; a line ends where no token is left"
    caption = Caption(formula, "fraction", "R3 Eq. 3, Fig. 2d")
    return Figure("extreme-curve", "Extreme tokens by threshold", caption, data, layout, _which(found))


def router_difference(runs: Sequence[Run]) -> Figure | None:
    """The share of (token, layer) routers by how many of their K choices differ between the engines, R3 Fig. 3a."""
    found, data = [], []
    for run, trace in _traces(runs):
        mu, old = trace.record_mu, trace.record_old
        if mu is None or old is None or not bool((mu.is_recorded & old.is_recorded).any()):
            continue
        found.append((run, trace))
        shares = router_level_histogram(mu, old).tolist()
        data.append(
            {"type": "bar", "name": run.label, "meta": {"run": run.index, "role": "bar"}}
            | {"x": list(range(len(shares))), "y": [share or None for share in shares]}
            | {"customdata": [number(share) for share in shares], "hovertemplate": "%{customdata}"}
        )
    if not data:
        return None
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "differing expert choices"}, "dtick": 1 if len(data[0]["x"]) <= 13 else 2},
        "yaxis": {"type": "log", "exponentformat": "power", "dtick": 1, "title": {"text": "share of routers"}},
        "hovermode": "x unified",
        "bargap": 0.25,
    }
    formula = "share of (token, layer) with K - |I_mu & I_old| = x; the training engine's choices by its live logits"
    caption = Caption(formula, "fraction", "R3 sec. 3.2, Fig. 3a and App. H")
    return Figure("router-difference", "Differing choices of a router", caption, data, layout, _which(found))


def _traces(runs: Sequence[Run]) -> list[tuple[Run, Trace]]:
    """The newest trace of each run that left one with a sampled token."""
    found = [(run, trace) for run in runs if (trace := run.newest_trace) is not None]
    return [(run, trace) for run, trace in found if bool(trace.is_response.any())]


def _which(found: Sequence[tuple[Run, Trace]]) -> str:
    steps = {trace.step for _, trace in found}
    if len(steps) == 1:
        return f"Newest trace: step {steps.pop()}."
    return f"Newest trace of each run: {', '.join(f'{run.label} step {trace.step}' for run, trace in found)}."


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
