"""The figures of the ledger's page: a claim's metrics over its updates, one line per arm, and the phase diagrams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lab.report.figures import Caption, Figure, Scale, caption, end_labels
from lab.report.sections import metric_title
from lab.report.style import DASHES, PALETTE, number
from sandbox.ledger.cells import NUM_WINDOWS, Regime, finished
from sandbox.ledger.claim import Arm, Claim, Row
from sandbox.ledger.measures import SURVIVAL
from theory.routing.passes import MODES

LOGARITHMIC = ("rollout_corr/k3_kl", "rollout_corr/extreme_frac_tau2", "staleness/k3_kl", "routing/route_kl")
OTHER_TITLES = {
    "actor/pg_clipfrac": "Tokens held at a bound",
    "routing/route_tv": "Total variation between cached and present route",
    "routing/staleness_tv": "Tokens whose route has changed",
    "routing/zero_deviation": "Routers that agree in every expert",
}
"""Titles of metrics that the report does not draw."""
DEGREES = (1, 2, 4, 8)
EMPTY = (
    "Orange: broke immediately; blue: never. Empty: not asked for, or not run. With one mini-batch R2 and Pr2 replay "
    "pi's own routes, and Pr3 is R3."
)


@dataclass(frozen=True)
class ArmLine:
    """One arm in a claim's figures: its place in the palette and its name."""

    index: int
    label: str


def over_updates(claim: Claim, regime: Regime, rows: Mapping[str, Row], seeds: int | None = None) -> list[Figure]:
    """A figure per metric that the claim shows: mean over seeds, with a band from the least to the largest."""
    found = [
        (ArmLine(i, one.name), finished(regime, one, claim.seeds(regime.name, seeds), rows))
        for i, one in enumerate(claim.arms)
    ]
    figures = []
    for name in claim.shown:
        lines = [(line, points) for line, own in found if (points := over_windows(name, own))]
        if lines:
            figures.append(_figure(f"claim-{claim.number}-{name.replace('/', '-')}", name, lines))
    return figures


Point = tuple[float, float, float, float]
"""Share of the updates, mean, least and largest over seeds."""


def over_windows(name: str, rows: Sequence[Row]) -> list[Point]:
    """The metric's points at the middles of the windows in which some run has a value."""
    columns = zip(*(row["series"].get(name, [None] * NUM_WINDOWS) for row in rows), strict=True)
    found = []
    for window, column in enumerate(columns):
        values = [value for value in column if value is not None]
        if values:
            found.append(((window + 0.5) / NUM_WINDOWS, fmean(values), min(values), max(values)))
    return found


def _figure(id_: str, name: str, lines: Sequence[tuple[ArmLine, Sequence[Point]]]) -> Figure:
    scale = Scale.of(
        [value for _, points in lines for point in points for value in point[1:]],
        "log" if name in LOGARITHMIC else "linear",
    )
    data: list[dict[str, Any]] = []
    # All bands before the lines, so that lines are drawn on top.
    for line, points in lines:
        x = [point[0] for point in points]
        low, high = ([scale.place(point[side]) for point in points] for side in (2, 3))
        band = {"type": "scatter", "mode": "lines", "x": x + x[::-1], "y": high + low[::-1], "fill": "toself"}
        data.append(band | {"hoverinfo": "skip", "meta": {"run": line.index, "role": "band"}})
    for line, points in lines:
        data.append(
            {"type": "scatter", "mode": "lines", "x": [p[0] for p in points], "y": [scale.place(p[1]) for p in points]}
            | {"name": line.label, "line": {"dash": DASHES[line.index // len(PALETTE) % len(DASHES)]}}
            | {"customdata": [number(p[1]) for p in points], "hovertemplate": "%{customdata}"}
            | {"meta": {"run": line.index, "role": "line"}, "cliponaxis": False}
        )
    layout = {
        "xaxis": {"title": {"text": "share of the updates"}, "range": [0.0, 1.0]},
        "yaxis": scale.axis(),
        "hovermode": "x unified",
        "annotations": end_labels([(line, points[-1][0], points[-1][1]) for line, points in lines], scale),
    }
    return Figure(
        id_, title_of(name), caption(name), data, layout, "Means over seeds; bands from the least to the largest."
    )


def title_of(name: str) -> str:
    """The metric's title in the report, or one like it for a metric that the report does not draw."""
    return OTHER_TITLES.get(name) or metric_title(name)


Map = Mapping[tuple[str, int], Arm]
"""The arms of a phase diagram, by row and N."""


def maps(claims: Sequence[Claim], regime: str = "") -> dict[str, Map]:
    """The phase diagrams of the claims' arms, by title, over the regimes or of one; those with the most arms first."""
    found: dict[str, dict[tuple[str, int], Arm]] = {}
    for claim in claims:
        # `also` again: `arms` has only the first of equal arms, which may lack the place.
        for one in (*claim.arms, *claim.also):
            if one.on_map is not None and one.on_map.regime == regime:
                found.setdefault(one.on_map.title, {})[one.on_map.row, one.num_minibatches] = one
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def phase_diagram(
    title: str, arms: Map, regimes: Sequence[Regime], seeds: Sequence[int], rows: Mapping[str, Row]
) -> Figure | None:
    """Survival over regimes (the engine gap) and off-policiness N, for each replay mode; None with fewer than 2 cells.

    Means are over the seeds that have run.
    """
    places = [(mode, regime) for mode in MODES for regime in regimes]
    values = [[survival(arms.get((mode, n)), regime, seeds, rows) for n in DEGREES] for mode, regime in places]
    if sum(value is not None for line in values for value in line) < 2:
        return None
    texts = [["" if value is None else f"{value:.2f}" for value in line] for line in values]
    names = [[mode for mode, _ in places], [regime.name for _, regime in places]]
    cells = {
        "type": "heatmap", "x": [f"N = {n}" for n in DEGREES], "y": names, "z": values, "zmin": 0.0, "zmax": 1.0,
        "text": texts, "texttemplate": "%{text}", "hovertemplate": "%{y}, %{x}: %{text}<extra></extra>",
        "showscale": False, "meta": {"run": 0, "role": "share"}, "xgap": 2, "ygap": 1,
    }  # fmt: skip
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"type": "multicategory", "autorange": "reversed", "automargin": True},
    }
    formula = f"mean over seeds of the {SURVIVAL.words}"
    own = Caption(formula, "1", "here")
    return Figure(f"map-{title.replace(' ', '-')}", title, own, [cells], layout, EMPTY)


def unbroken(diagrams: Sequence[Figure]) -> str:
    """The number of the diagrams' cells in which no run breaks, in a sentence."""
    cells = [cell for figure in diagrams for line in figure.data[0]["z"] for cell in line if cell is not None]
    return f"In {cells.count(1.0)} of {len(cells)} cells no run breaks."


def survival(one: Arm | None, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row]) -> float | None:
    """The mean survival of an arm over the seeds that have run, in [0, 1]; None without any, or without an arm."""
    found = [] if one is None else finished(regime, one, seeds, rows)
    return fmean(SURVIVAL.of(row) for row in found) if found else None


__all__ = [
    "DEGREES", "Map", "maps", "over_updates", "over_windows", "phase_diagram", "survival", "title_of", "unbroken",
]  # fmt: skip
