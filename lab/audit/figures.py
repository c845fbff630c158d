"""The figures of an audit's page: each is a function from a slice of the medians to a figure, or None without data.

A slice is one kind of policy with one engine, one reward and one kind of group; its lines are objectives, each with its
colour. Figures, scales and colours are the report's. Letters: theory/contracts.py.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from lab.audit.series import AuditLine, Series
from lab.audit.table import (
    COLUMNS,
    at_level,
    at_longest,
    at_middle,
    cell,
    distinct,
    middle,
    numbers,
    parts,
    records,
    tidy,
)
from lab.report.figures import Caption, Figure, hover
from lab.report.scale import Scale
from lab.report.style import number

SIZES = [2**k for k in range(4, 17)]
"""Sample sizes of the error curves."""
KL_AXIS = "KL(mu || pi), nats per token"
AT = "At the longest responses of each policy kind"
MIDDLE = f"{AT} and the middle distances."


@dataclass(frozen=True)
class Slice:
    """The rows and medians of one set of figures; `series` has a line for each pair of objective and replay mode."""

    rows: pd.DataFrame
    medians: pd.DataFrame
    series: Series

    def lines(self, frame: pd.DataFrame) -> list[tuple[AuditLine, pd.DataFrame]]:
        """The rows of each line, in the order of their numbers."""
        found = [(self.series[k["objective"], k["mode"]], part) for k, part in parts(frame, ["objective", "mode"])]
        return sorted(found, key=lambda pair: pair[0].index)


SliceFigure = Callable[[Slice], Figure | None]


def overview(medians: pd.DataFrame, series: Series) -> Figure:
    """The bias of every objective over all cases, the least on top.

    Markers are medians, lines the middle half of the cases; open ones are the bias that no rescaling removes.
    """
    found = at_middle(at_longest(medians))
    quartiles = {
        (line, name): [tidy(float(q)) for q in np.nanquantile(numbers(part, name), (0.25, 0.5, 0.75))]
        for key, part in parts(found, ["objective", "mode"])
        for line in [series[key["objective"], key["mode"]]]
        for name in ("bias", "direction_bias")
        if not np.isnan(numbers(part, name)).all()
    }
    scale = _scale([value for some in quartiles.values() for value in some], "log")
    data: list[dict[str, Any]] = []
    for (line, name), (low, centre, high) in quartiles.items():
        role = "line" if name == "bias" else "open"
        if name == "bias":
            ends = line.trace("line", [scale.place(low), scale.place(high)], [line.label] * 2)
            data.append(
                ends | {"mode": "lines", "line": {**ends["line"], "width": 4}, "opacity": 0.45, "hoverinfo": "skip"}
            )
        words = f"{COLUMNS[name]}: median {number(centre)}, middle half of the cases {number(low)} to {number(high)}"
        dot = line.trace(role, [scale.place(centre)], [line.label], "markers")
        data.append(dot | hover(["<br>".join(textwrap.wrap(words, 40))]))
    # The largest first: plotly draws a category axis from the bottom up, so the least stands on top.
    lines = sorted({line for line, _ in quartiles}, key=lambda line: line.index)
    order = sorted(lines, key=lambda line: -quartiles.get((line, "bias"), [0.0] * 3)[1])
    layout = {
        "xaxis": scale.axis() | {"title": {"text": "relative distance from the true gradient"}},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": [line.label for line in order]}
        | {"automargin": True},
        "hovermode": "closest",
        "margin": {"l": 12},
    }
    note = f"{MIDDLE} Full: median; line: middle half of the cases; open: the bias that no rescaling removes."
    caption = Caption(COLUMNS["bias"], "1", "here")
    return Figure("bias-overview", "Bias of each objective", caption, data, layout, note, 90 + 34 * len(order))


@dataclass(frozen=True)
class QuartileLines:
    """Medians of a measure along one axis, with bands between the quartiles."""

    id: str
    title: str
    name: Literal["bias", "direction_bias"]
    along: Literal["distance", "length"]

    def __call__(self, of: Slice) -> Figure | None:
        if self.along == "length":
            found, x_name = at_middle(of.medians), "length"
        else:
            found, x_name = along_distance(at_longest(of.medians)), "kl_mu_pi"
        found = found.dropna(subset=[self.name])  # a gradient of 0 has no direction
        if len(distinct(found, x_name)) < 2:
            return None
        names = (self.name, f"{self.name}_q1", f"{self.name}_q3")
        y_scale = _scale([v for name in names for v in numbers(found, name)], "log")
        x_scale = _scale(numbers(found, x_name), "log" if x_name == "kl_mu_pi" else "linear")
        data: list[dict[str, Any]] = []
        for line, part in of.lines(found):
            part = part.sort_values(x_name)
            x = numbers(part, x_name).tolist()
            centre, low, high = ([y_scale.place(tidy(v)) for v in numbers(part, name)] for name in names)
            data.append(
                line.trace("band", x + x[::-1], high + low[::-1])
                | {"mode": "none", "fill": "toself", "hoverinfo": "skip"}
            )
            texts = [number(tidy(v)) for v in numbers(part, self.name)]
            data.append(line.trace("line", x, centre, "lines+markers") | hover(texts))
        title = KL_AXIS if x_name == "kl_mu_pi" else "longest response T, tokens"
        ticks = {} if x_name == "kl_mu_pi" else {"tickvals": distinct(found, x_name)}
        layout = {
            "xaxis": x_scale.axis() | ticks | {"title": {"text": title}},
            "yaxis": y_scale.axis(),
            "hovermode": "closest",
        }
        note = f"{AT}." if x_name == "kl_mu_pi" else "At the middle distances."
        caption = Caption(COLUMNS[self.name], "1", "here", self.name)
        return Figure(self.id, self.title, caption, data, layout, f"{note} Bands: quartiles over policies.")


def error_curve(of: Slice) -> Figure | None:
    """Root mean squared error over the number of sampled responses: first variance dominates, in the end bias."""
    found = at_middle(at_longest(of.rows))
    curves: list[tuple[AuditLine, list[float]]] = []
    for line, part in of.lines(found):
        # Per policy first: the bias and the variance of one policy belong together.
        errors = [np.median(np.sqrt(numbers(part, "bias") ** 2 + numbers(part, "variance") / n)) for n in SIZES]
        curves.append((line, [float(e) for e in errors]))
    y_scale = _scale([e for _, errors in curves for e in errors], "log")
    data = [line.trace("line", SIZES, errors, "lines+markers") | hover(map(number, errors)) for line, errors in curves]
    layout = {
        "xaxis": _scale(SIZES, "log").axis() | {"title": {"text": "sampled responses n"}},
        "yaxis": y_scale.axis(),
        "hovermode": "closest",
    }
    caption = Caption("sqrt(bias^2 + variance / n), over ||grad J||", "1", "here")
    return Figure("error-n", "Error against the number of responses", caption, data, layout, MIDDLE)


def split_bars(of: Slice) -> Figure | None:
    """The bias of each gap alone, stacked, and of both together."""
    found = at_middle(at_longest(of.medians))
    if not (numbers(found, "kl_old_pi") > 0).any() or not (numbers(found, "kl_mu_old") > 0).any():
        return None
    data: list[dict[str, Any]] = []
    for line, part in of.lines(found):
        row, label = records(part)[0], line.label
        for name, role, words in (
            ("bias_discrepancy", "bar", "discrepancy"),
            ("bias_staleness", "light-bar", "staleness"),
        ):
            value = tidy(float(row[name]))
            bar = {"type": "bar", "x": [label], "y": [value], "name": label}
            data.append(bar | {"meta": {**line.meta, "role": role}} | hover([f"{words} alone: {number(value)}"]))
        both = tidy(float(row["bias"]))
        data.append(line.trace("mark", [label], [both], "markers") | hover([f"both: {number(both)}"]))
    stacked = numbers(found, "bias_discrepancy") + numbers(found, "bias_staleness")
    top = max(float(numbers(found, "bias").max()), float(stacked.max()))
    layout = {
        "barmode": "stack", "hovermode": "closest", "margin": {"b": 78},
        "xaxis": {"tickangle": -35}, "yaxis": {"range": [0, 1.06 * top]},
    }  # fmt: skip
    caption = Caption("||E[g] - grad J|| / ||grad J|| with one gap alone", "1", "MiniRL (arXiv 2512.01374) Eq. 5")
    note = (
        "Full colour: discrepancy alone; light: staleness alone; line: both. The parts need not add up to it: biases "
        f"are lengths of vectors, and each part includes the bias with neither gap. {MIDDLE}"
    )
    return Figure("split", "Where the bias comes from", caption, data, layout, note)


def trade_off(of: Slice) -> Figure | None:
    """Variance and bias of each objective, one point per distance."""
    found = along_distance(at_longest(of.medians))
    x_scale, y_scale = _scale(numbers(found, "variance"), "log"), _scale(numbers(found, "bias"), "log")
    data = []
    for line, part in of.lines(found):
        part = part.sort_values("kl_mu_pi")
        y = [y_scale.place(tidy(v)) for v in numbers(part, "bias")]
        texts = [
            f"KL {cell(row, 'kl_mu_pi')}: bias {cell(row, 'bias')}, variance {number(row['variance'])}"
            for row in records(part)
        ]
        data.append(line.trace("line", numbers(part, "variance").tolist(), y, "lines+markers") | hover(texts))
    layout = {
        "xaxis": x_scale.axis() | {"title": {"text": "variance of one response's share"}},
        "yaxis": y_scale.axis(), "hovermode": "closest",
    }  # fmt: skip
    caption = Caption("bias, vertical, against variance, horizontal, both relative to grad J", "1", "here")
    return Figure("trade-off", "Bias against variance", caption, data, layout, f"{AT}; lines join the distances.")


SLICE_FIGURES: tuple[SliceFigure, ...] = (
    QuartileLines("bias-kl", "Bias against distance", "bias", "distance"),
    QuartileLines("direction-kl", "Bias that no rescaling removes", "direction_bias", "distance"),
    QuartileLines("bias-length", "Bias against length", "bias", "length"),
    error_curve,
    split_bars,
    trade_off,
)


def ratio_map(part: pd.DataFrame, first: str, second: str, id_: str, title: str) -> Figure:
    """The ratio of the first objective's bias to the second's, for each length and distance."""
    along = "asked_discrepancy" if len(distinct(part, "asked_discrepancy")) > 1 else "asked_staleness"
    ratio = {(row["length"], row[along]): row["ratio"] for row in records(part)}
    lengths, levels = sorted({length for length, _ in ratio}), sorted({level for _, level in ratio})
    table = [[float(ratio[length, level]) for level in levels] for length in lengths]
    # Colours saturate at a factor of 4; the text has the number.
    heat = {
        "type": "heatmap", "x": [number(v) for v in levels], "y": [str(v) for v in lengths],
        "z": np.log2(np.clip(table, 1 / 4, 4)).tolist(), "zmin": -2, "zmax": 2, "showscale": False,
        "text": [[number(v) for v in row] for row in table], "texttemplate": "%{text}",
        "hovertemplate": "T = %{y}, KL %{x}: ratio %{text}<extra></extra>", "xgap": 2, "ygap": 2,
        "name": title, "meta": {"role": "map"},
    }  # fmt: skip
    layout = {
        "xaxis": {"type": "category", "title": {"text": "KL per token, nats"}, "showgrid": False},
        "yaxis": {"type": "category", "title": {"text": "T"}, "showgrid": False},
    }
    caption = Caption(f"bias of {first} / bias of {second}, median over policies", "1", "here")
    return Figure(id_, title, caption, [heat], layout, "")


# ---- parts -----------------------------------------------------------------------------------------------------------


def along_distance(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of all discrepancies at the middle staleness, or of all stalenesses if there is one discrepancy."""
    name = "asked_staleness" if len(distinct(frame, "asked_discrepancy")) > 1 else "asked_discrepancy"
    return at_level(frame, name, middle(numbers(frame, name)))


def _scale(values: Any, axis: str) -> Scale:
    return Scale.of([tidy(float(v)) for v in values if not math.isnan(v)], axis)
