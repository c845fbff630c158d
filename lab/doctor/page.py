"""The doctor's page: each trace's diagnosis in words, its evidence, and figures in the report's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from lab.doctor.diagnosis import Diagnosis
from lab.doctor.evidence import CLUES
from lab.doctor.heat import HeatMap, heat_map
from lab.doctor.shares import by_kind, by_layer
from lab.doctor.view import View
from lab.report.figures import Caption, Figure, hover, line_trace
from lab.report.page import page
from lab.report.pictures import MAX_POINTS, ROUTING_LEVELS, extreme_curve, probability_scatter
from lab.report.style import number
from lab.traces import Trace

NUM_SHOWN = 3
"""Causes per trace in the table."""


@dataclass(frozen=True)
class Patient:
    """A trace, its name and number on the page, and its diagnosis."""

    label: str
    index: int
    newest_trace: Trace
    diagnosis: Diagnosis
    caveat: str = ""
    replicate: ClassVar[int] = 0

    @cached_property
    def heat(self) -> HeatMap | None:
        """The tokens that carry its KL."""
        return heat_map(self.newest_trace)

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The strongest causes and their strengths."""
        items = list(self.diagnosis.strengths.items())[:NUM_SHOWN]
        return [(cause.title, f"{strength:.2f}") for cause, strength in items if strength >= 0.005]


def render(patients: Sequence[Patient]) -> str:
    """The page as HTML."""
    draws = (by_kind, by_layer, probability_scatter, extreme_curve, along_response, logits, *ROUTING_LEVELS[:2])
    figures = [figure for figure in (draw(patients) for draw in draws) if figure is not None]
    title = patients[0].label if len(patients) == 1 else f"{len(patients)} traces"
    return page(
        "doctor.html.jinja", figures, num_runs=len(patients), own=Path(__file__).parent / "template",
        title=title, patients=patients, figures=figures, clues=CLUES, number=number,
    )  # fmt: skip


def along_response(patients: Sequence[Patient]) -> Figure | None:
    """The typical deviation of a logit by position in the response; a step in it shows a change of weights."""
    data = []
    for patient in patients:
        view = View.of(patient.newest_trace)
        # A single nan would make the median of its position nan.
        is_open_n = view.is_open_n & view.d_n.isfinite()
        at_n, size_n = view.position_n[is_open_n], view.size_n[is_open_n]
        points = [(t, size_n[at_n == t].median().item()) for t in at_n.unique().tolist() if int((at_n == t).sum()) >= 5]
        # A log axis has no 0: None leaves a gap in the line.
        x, y = [t for t, _ in points], [round(y, 8) or None for _, y in points]
        data.append(line_trace(patient.index, patient.label, "line", x, y) | hover(number(y) for _, y in points))
    if not any(y for line in data for y in line["y"]):
        return None
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "position in the response"}},
        "yaxis": {"type": "log", "exponentformat": "power", "dtick": 1, "title": {"text": "logit units"}},
        "hovermode": "x unified",
    }
    formula = "median over tokens with p < 0.99 of |log old - log mu| / (1 - p); no point where all agree"
    return Figure("along-response", "Deviation along the response", Caption(formula, "1", "here"), data, layout)


def logits(patients: Sequence[Patient]) -> Figure | None:
    """Each token at (logit old, logit mu): a temperature rotates the line, truncation lifts it."""
    data = []
    for patient in patients:
        view = View.of(patient.newest_trace)
        mu, old = view.mu_n, view.old_n
        is_seen = (mu < -1e-4) & (old < -1e-4) & mu.isfinite() & old.isfinite()
        mu, old = mu[is_seen], old[is_seen]
        # Evenly spaced tokens, not the first ones: the page stays small, and every response has its share.
        chosen = torch.linspace(0, len(mu) - 1, min(len(mu), MAX_POINTS // len(patients))).long()
        x, y = ((p - torch.log(-torch.expm1(p)))[chosen] for p in (old, mu))
        data.append(
            {"type": "scatter", "mode": "markers", "name": patient.label}
            | {"meta": {"run": patient.index, "role": "cloud"}}
            | {"x": [round(v, 3) for v in x.tolist()], "y": [round(v, 3) for v in y.tolist()]}
            | {"hovertemplate": "old %{x:.2f}, mu %{y:.2f}"}
        )
    values = [v for cloud in data for v in (*cloud["x"], *cloud["y"])]
    if not values:
        return None
    low, high = math.floor(min(values)), math.ceil(max(values))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "logit of the token's probability under old"}, "range": [low, high]},
        "yaxis": {"title": {"text": "under mu"}, "range": [low, high]},
        "shapes": [{"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "layer": "below"}],
        "hovermode": "closest",
    }
    formula = "(logit old, logit mu) of sampled tokens, logit p = log p - log(1 - p); a temperature rotates the line"
    return Figure("logits", "Logits of sampled tokens", Caption(formula, "nats", "here"), data, layout)
