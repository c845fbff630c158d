"""Pictures of single traces: what the two engines made of the tokens of one global step.

Papers: R3 (arXiv 2510.11370) Fig. 2 and 3, sec. 3.1 and 3.2, App. H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lab.report.figures import Caption, Figure
from lab.report.runs import Run
from lab.report.style import number
from theory.routing.measures import router_level_histogram

MAX_POINTS = 5000
"""Points of one scatter, all runs together: more make an SVG page slow."""


def probability_scatter(runs: Sequence[Run]) -> Figure | None:
    """Each sampled token at (its probability under mu, its probability under old), as R3 Fig. 2 draws it."""
    found = [(run, trace) for run in runs if (trace := run.newest_trace) is not None]
    clouds = []
    for run, trace in found:
        mu, old = trace.logp_mu[trace.is_response].exp(), trace.logp_old[trace.is_response].exp()
        if len(mu) == 0:
            continue
        # Evenly spaced tokens: the same trace gives the same picture.
        count = min(len(mu), MAX_POINTS // len(found))
        chosen = torch.linspace(0, len(mu) - 1, count).long()
        spread = (mu - old).abs().mean().item()
        points = {"x": [round(v, 4) for v in mu[chosen].tolist()], "y": [round(v, 4) for v in old[chosen].tolist()]}
        clouds.append((spread, run, points, f"{run.label}: step {trace.step}"))
    if not clouds:
        return None
    # The widest cloud first, so that the narrower ones stay visible on top of it.
    clouds.sort(key=lambda cloud: -cloud[0])
    data = [
        {"type": "scatter", "mode": "markers", "name": run.label, "meta": {"run": run.index, "role": "cloud"}}
        | points
        | {"hovertemplate": "mu %{x:.3f}, old %{y:.3f}"}
        for _, run, points, _ in clouds
    ]
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "layer": "below"}
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "probability under mu"}, "range": [-0.02, 1.02]},
        "yaxis": {"title": {"text": "under old"}, "range": [-0.02, 1.02]},
        "shapes": [diagonal],
        "hovermode": "closest",
    }
    formula = "(mu(y_t), old(y_t)) of sampled tokens, token ~ mu; equal engines lie on the diagonal"
    captions = (Caption(formula, "probability", "R3 sec. 3.1 and Fig. 2"),)
    note = f"Newest trace of each run ({'; '.join(text for *_, text in sorted(clouds, key=lambda c: c[1].index))})."
    return Figure("probability-scatter", "Probabilities of sampled tokens", captions, data, layout, note)


def router_difference(runs: Sequence[Run]) -> Figure | None:
    """The share of (token, layer) routers by how many of their K choices differ between the engines, R3 Fig. 3a."""
    data = []
    for run in runs:
        trace = run.newest_trace
        mu, old = (None, None) if trace is None else (trace.record_mu, trace.record_old)
        if mu is None or old is None or not bool((mu.is_recorded & old.is_recorded).any()):
            continue
        shares = router_level_histogram(mu, old).tolist()
        data.append(
            {"type": "bar", "name": run.label, "meta": {"run": run.index, "role": "bar"}}
            | {"x": list(range(len(shares))), "y": [share or None for share in shares]}
            | {"customdata": [number(share) for share in shares], "hovertemplate": "%{customdata}"}
        )
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": "differing expert choices"}, "dtick": 1},
        "yaxis": {"type": "log", "exponentformat": "power", "dtick": 1, "title": {"text": "share of routers"}},
        "hovermode": "x unified",
        "bargap": 0.25,
    }
    formula = "share of (token, layer) with K - |I_mu & I_old| = x; the training engine's choices by its live logits"
    captions = (Caption(formula, "fraction", "R3 sec. 3.2, Fig. 3a and App. H"),)
    return Figure("router-difference", "Differing choices of a router", captions, data, layout, "Newest trace of each run.")
