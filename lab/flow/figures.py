"""The figures of a flow's page: means over problems with their 95% intervals, one line per objective.

Scales and colours are the report's. A cell of a page is one engine error, N and B; lines are its objectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from lab.audit.table import distinct, numbers, parts, tidy
from lab.flow.table import COLUMNS, MeanInterval, ends, interval
from lab.report.figures import Caption, Figure, hover, line_trace
from lab.report.scale import Scale
from lab.report.style import number

Points = list[tuple[float, MeanInterval]]
"""Updates made, with the interval over problems there."""
PANEL_HEIGHT = 165
PANEL_MARGIN = {"l": 44, "r": 10, "t": 8, "b": 34}
BANDS = "Bands: 95% intervals of the mean over problems."


def curves(part: pd.DataFrame, name: str) -> dict[str, Points]:
    """The interval over problems at every observed update, by objective; updates with a nan are omitted."""
    found: dict[str, Points] = {}
    for place, own in parts(part, ["objective", "error", "N", "B"]):
        points = found.setdefault(place["objective"], [])
        for at, rows in parts(own, ["update"]):
            values = numbers(rows, name)
            # All problems or none: a mean over the others would be of other problems at each update.
            if np.isfinite(values).all():
                points.append((float(at["update"]), interval(values, name, *map(str, [*place.values(), at["update"]]))))
    return {objective: points for objective, points in found.items() if points}


@dataclass(frozen=True)
class CurveColumn:
    """A column over updates, with one line and one band per objective."""

    id: str
    title: str
    name: str
    axis: Literal["linear", "log"] = "linear"

    def __call__(self, part: pd.DataFrame, labels: Sequence[str], scale: Scale | None = None) -> Figure | None:
        """The figure, on its own scale by default; None where the column has no data."""
        found = curves(part, self.name)
        if not found:
            return None
        scale = scale or scale_of([found], self.axis)
        data = [trace for label, points in found.items() for trace in _line(labels, label, points, scale)]
        layout = {
            "xaxis": {"title": {"text": "updates"}},
            "yaxis": scale.axis(),
            "hovermode": "x unified",
        }
        return Figure(self.id, self.title, Caption(COLUMNS[self.name], "1", "here", self.name), data, layout, BANDS)


COURSES = (
    CurveColumn("entropy", "Entropy", "entropy", "log"),
    CurveColumn("reward", "Expected reward", "reward"),
    CurveColumn("kl", "Distance of the engine from the policy", "kl_mu_pi", "log"),
    CurveColumn("staleness", "Staleness", "kl_old_pi", "log"),
    CurveColumn("cosine", "Direction of the update", "cosine"),
    CurveColumn("drift", "Drift in the update", "drift_norm", "log"),
)


def scale_of(found: Sequence[Mapping[str, Points]], axis: str) -> Scale:
    """A scale that holds all of these lines and bands."""
    values = [v for each in found for points in each.values() for _, one in points for v in (one.low, one.high)]
    return Scale.of([tidy(v) for v in values], axis)


def panels(blocks: Sequence[pd.DataFrame], labels: Sequence[str], name: str) -> list[Figure]:
    """One small figure per block, on one scale for all."""
    found = [curves(part, name) for part in blocks]
    # Entropy collapses by factors, so it needs a log axis; rewards compare by difference.
    scale = scale_of(found, "log" if name == "entropy" else "linear")
    drawn = []
    for i, each in enumerate(found):
        data = [trace for label, points in each.items() for trace in _line(labels, label, points, scale)]
        layout = {
            "xaxis": {"title": {"text": "updates"} if name == "reward" else {}, "nticks": 5},
            "yaxis": scale.axis() | {"nticks": 5}, "hovermode": "x unified", "margin": PANEL_MARGIN,
        }  # fmt: skip
        words = {"entropy": "entropy of pi, nats per token", "reward": "expected reward J(pi)"}[name]
        drawn.append(Figure(f"first-{name}-{i}", words, Caption(words, "1", "here"), data, layout, "", PANEL_HEIGHT))
    return drawn


def portraits(blocks: Mapping[str, pd.DataFrame], labels: Sequence[str]) -> list[Figure]:
    """Reward against entropy, one figure per engine error, on one scale: means over problems, from the circle on."""
    found = {error: (curves(part, "entropy"), curves(part, "reward")) for error, part in blocks.items()}
    across, up = (scale_of([pair[i] for pair in found.values()], axis) for i, axis in enumerate(("log", "linear")))
    drawn = []
    for number_, (error, (entropies, rewards)) in enumerate(found.items()):
        data: list[dict[str, Any]] = []
        for label in entropies:
            run = labels.index(label)
            x = [tidy(one.mean) for _, one in entropies[label]]
            y = [tidy(one.mean) for _, one in rewards[label]]
            texts = [f"{label}, update {at:g}" for at, _ in entropies[label]]
            data.append(line_trace(run, label, "line", x, y, "lines+markers") | hover(texts))
            data[-1]["meta"] |= {"small": True}
            data.append(line_trace(run, label, "open", x[:1], y[:1], "markers") | {"hoverinfo": "skip"})
            data.append(line_trace(run, label, "end", x[-1:], y[-1:], "markers") | {"hoverinfo": "skip"})
        layout = {
            "xaxis": across.axis() | {"title": {"text": "entropy of pi, nats per token"}},
            "yaxis": up.axis() | {"title": {"text": "expected reward J(pi)"}}, "hovermode": "closest",
        }  # fmt: skip
        caption = Caption("J(pi) against the entropy of its next token, means over problems", "1", "here")
        note = "From the open circle, the first policies, to the large dot; a small dot is an observed update."
        drawn.append(Figure(f"portrait-{number_}", error, caption, data, layout, note))
    return drawn


def reward_maps(found: pd.DataFrame, optimum: float) -> list[Figure]:
    """The reward at the end over engine errors and N, one map per objective; none where there is only one N.

    Colours run from the lowest to the highest cell of all maps.
    """
    degrees = distinct(found, "N")
    if len(degrees) < 2:
        return []
    errors = {row["error"]: (row["kind"], row["level"]) for row, _ in parts(found, ["error", "kind", "level"])}
    kinds = list(dict.fromkeys(kind for kind, _ in errors.values()))
    order = sorted(errors, key=lambda error: (kinds.index(errors[error][0]), errors[error][1]))
    means = {
        (key["objective"], key["error"], key["N"]): tidy(float(numbers(part, "reward").mean()))
        for key, part in parts(ends(found), ["objective", "error", "N"])
    }
    low, high = min(means.values()), max(means.values())
    drawn = []
    for i, objective in enumerate(dict.fromkeys(found["objective"])):
        cells = [[means[objective, error, n] for n in degrees] for error in order]
        heat = {
            "type": "heatmap", "x": [f"{n:g}" for n in degrees], "y": order, "zmin": 0, "zmax": 1, "showscale": False,
            # Colours take shares of the range over all maps; `or 1.0` is for cells that are all equal.
            "z": [[(value - low) / ((high - low) or 1.0) for value in row] for row in cells],
            "text": [[f"{value:.3f}" for value in row] for row in cells], "texttemplate": "%{text}", "name": objective,
            "hovertemplate": "%{y}, N = %{x}: %{text}<extra></extra>", "xgap": 2, "ygap": 2, "meta": {"role": "share"},
        }  # fmt: skip
        layout = {
            "xaxis": {"type": "category", "title": {"text": "N, updates per rollout"}, "showgrid": False},
            "yaxis": {"type": "category", "showgrid": False, "automargin": True, "autorange": "reversed"},
            "hovermode": "closest", "margin": {"l": 12},
        }  # fmt: skip
        caption = Caption(f"mean J(pi) after the last update; the best policy has {number(optimum)}", "1", "here")
        note = f"Colours run from {number(low)} to {number(high)}, the same in every map."
        drawn.append(Figure(f"map-{i}", objective, caption, [heat], layout, note, 90 + 34 * len(order)))
    return drawn


# ---- parts -----------------------------------------------------------------------------------------------------------


def _line(labels: Sequence[str], label: str, points: Points, scale: Scale) -> list[dict[str, Any]]:
    run, x = labels.index(label), [at for at, _ in points]
    mean, low, high = ([scale.place(tidy(getattr(one, side))) for _, one in points] for side in ("mean", "low", "high"))
    # A closed outline: along the upper edge, and back along the lower one.
    band = line_trace(run, label, "band", x + x[::-1], high + low[::-1])
    line = line_trace(run, label, "line", x, mean) | hover([str(one) for _, one in points])
    return [band | {"mode": "none", "fill": "toself", "hoverinfo": "skip"}, line]
