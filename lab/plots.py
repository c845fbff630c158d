"""The notebooks' figures: lines, bars and maps of plain numbers in the report's colours, and dials that redraw them.

A figure is an ordinary cell output, so it shows without a live kernel; with one, dials redraw it in place. The numbers
are computed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from lab.report.figures import Figure
from lab.report.scale import Scale
from lab.report.style import DASHES, PALETTE, number

Number = int | float

Series = Mapping[str, Mapping[Number, Number]]
"""Name to a line's points, x to y."""

Log = Literal["", "x", "y", "xy"]
"""The logarithmic axes, which show a 0 at their lower end, on a separate tick."""

HEIGHT = 420


def series_of(frame: pd.DataFrame, by: str, x: str, y: str) -> dict[str, dict[Number, Number]]:
    """A series per value of the column `by`, in the frame's order: column `x` to column `y`."""
    groups = frame.groupby(by, sort=False)
    return {str(name): dict(zip(part[x], part[y], strict=True)) for name, part in groups}


def quartiles_of(frame: pd.DataFrame, by: str, x: str, y: str) -> dict[str, dict[Number, tuple[Number, Number]]]:
    """The bands around `series_of`: from column `y`_q1 to `y`_q3, as `lab.audit.medians` names them."""
    low, high = series_of(frame, by, x, f"{y}_q1"), series_of(frame, by, x, f"{y}_q3")
    return {name: {at: (value, high[name][at]) for at, value in points.items()} for name, points in low.items()}


def lines(
    series: Series,
    *,
    title: str,
    x: str,
    y: str,
    log: Log = "",
    bands: Mapping[str, Mapping[Number, tuple[Number, Number]]] | None = None,
    dashed: Sequence[str] = (),
    dots: Sequence[str] = (),
) -> go.Figure:
    """One line per series; `bands` shades from low to high under a line; `dashed` and `dots` name lines to draw so.

    Raises ValueError for no point at all, and for a name in `bands`, `dashed` or `dots` that is not in `series`.
    """
    bands = bands or {}
    for name in (*bands, *dashed, *dots):
        if name not in series:
            raise ValueError(f"expected one of the series {', '.join(series)}, got {name!r}")
    x_scale = _scale([at for points in series.values() for at in points], "x" in log)
    heights = [value for points in series.values() for value in points.values()]
    heights += [value for band in bands.values() for pair in band.values() for value in pair]
    y_scale = _scale(heights, "y" in log)
    figure = _figure(title, x, y)
    for index, (name, points) in enumerate(series.items()):
        ink = PALETTE[index % len(PALETTE)].line
        dash = DASHES[1] if name in dashed else DASHES[index // len(PALETTE) % len(DASHES)]
        if name in bands:
            figure.add_trace(_area(name, bands[name], ink, x_scale, y_scale))
        figure.add_scatter(
            x=_placed(x_scale, points),
            y=_placed(y_scale, points.values()),
            name=name,
            legendgroup=name,
            mode="markers" if name in dots else "lines+markers",
            marker={"size": 5},
            line={"color": ink, "dash": dash},
            customdata=[number(float(value)) for value in points.values()],
            hovertemplate="%{customdata}",
        )
    # The unified box has a line per series: a dozen would cover the figure.
    figure.update_layout(hovermode="x unified" if len(series) < 12 else "closest")
    figure.update_xaxes(**x_scale.axis())
    return figure.update_yaxes(**y_scale.axis())


def bars(series: Mapping[str, Mapping[str, Number]], *, title: str, x: str, y: str, log: Log = "") -> go.Figure:
    """Groups of bars: one colour per series, one group per category. Raises ValueError for no bar at all."""
    scale = _scale([value for values in series.values() for value in values.values()], "y" in log)
    figure = _figure(title, x, y)
    for index, (name, values) in enumerate(series.items()):
        figure.add_bar(
            x=list(values),
            y=_placed(scale, values.values()),
            name=name,
            marker={"color": PALETTE[index % len(PALETTE)].line},
            customdata=[number(float(value)) for value in values.values()],
            hovertemplate="%{customdata}",
        )
    figure.update_layout(barmode="group", bargap=0.25, showlegend=len(series) > 1)
    # A linear Scale may begin above 0, which would cut bars short; plotly's own range for them begins at 0.
    return figure.update_yaxes(**scale.axis()) if scale.is_log else figure


def stacks(
    series: Mapping[str, Mapping[str, Number]], *, limits: Mapping[str, Number], title: str, x: str
) -> go.Figure:
    """Horizontal bars, one per category, each made of the series' parts; a line marks the limit of each category.

    Raises ValueError for a limit whose category has no bar.
    """
    categories = list(dict.fromkeys(name for values in series.values() for name in values))
    for name in limits:
        if name not in categories:
            raise ValueError(f"limits: expected one of {', '.join(categories)}, got {name!r}")
    figure = _figure(title, x, "")
    for index, (part, values) in enumerate(series.items()):
        figure.add_bar(
            x=list(values.values()),
            y=list(values),
            name=part,
            orientation="h",
            marker={
                "color": PALETTE[index % len(PALETTE)].line,
                "pattern": {"shape": "/" if index >= len(PALETTE) else ""},
            },
            hovertemplate="%{x:.3g}",
        )
    for name, limit in limits.items():
        low, high = categories.index(name) - 0.45, categories.index(name) + 0.45
        dotted = {"color": "#333333", "dash": "dot"}
        figure.add_shape(type="line", x0=limit, x1=limit, y0=low, y1=high, line=dotted)
        text = f"limit {number(float(limit))}"
        figure.add_annotation(x=limit, y=high, text=text, showarrow=False, yanchor="bottom")
    return figure.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.25})


def heat(
    values: Sequence[Sequence[Number | None]],
    *,
    rows: Sequence[Any],
    columns: Sequence[Any],
    title: str,
    x: str,
    y: str,
    measure: str = "",
    more_is_better: bool = False,
    texts: Sequence[Sequence[str]] | None = None,
) -> go.Figure:
    """A heat map of numbers, written into their cells; None is an empty cell. The first row is on top.

    The colours diverge from 0, which is white; where no number is negative, there is one colour, from 0 on: red, or
    blue if `more_is_better`. `measure` is the title of the colour bar. `texts` replace the numbers in the cells,
    without a colour bar; hovering still shows the numbers. Raises ValueError where `rows`, `columns` or `texts` do not
    match the shape of `values`.
    """
    shape = (len(values), len(values[0]) if values else 0)
    written = [["" if value is None else number(float(value)) for value in row] for row in values]
    if texts is not None and [len(row) for row in texts] != [len(row) for row in values]:
        raise ValueError(f"texts: expected {shape[0]} rows of {shape[1]}, got {[len(row) for row in texts]}")
    if shape != (len(rows), len(columns)):
        wanted = f"{len(rows)} rows and {len(columns)} columns"
        raise ValueError(f"expected values of {wanted}, got {shape[0]} and {shape[1]}")
    given = [float(value) for row in values for value in row if value is not None]
    largest = max(map(abs, given), default=0.0) or 1.0
    is_one_sided = min(given, default=0.0) >= 0.0
    figure = _figure(title, x, y)
    figure.add_heatmap(
        z=[list(row) for row in values],
        x=[str(one) for one in columns],
        y=[str(one) for one in rows],
        zmin=0.0 if is_one_sided else -largest,  # one limit on both sides, so that 0 is white
        zmax=largest,
        colorscale=("Blues" if more_is_better else "Reds") if is_one_sided else "RdBu_r",
        text=written if texts is None else [list(row) for row in texts],
        texttemplate="%{text}",
        customdata=written,
        showscale=texts is None,
        colorbar={"title": {"text": measure, "side": "right"}} if measure else None,
        hovertemplate="%{y}, %{x}: %{customdata}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    figure.update_xaxes(type="category", showgrid=False)
    return figure.update_yaxes(type="category", autorange="reversed", showgrid=False)


def clouds(series: Mapping[str, tuple[Sequence[Number], Sequence[Number]]], *, title: str, x: str, y: str) -> go.Figure:
    """One cloud of points per series, over the diagonal on which both coordinates are equal.

    Raises ValueError for no point at all.
    """
    both = [value for pair in series.values() for values in pair for value in values]
    if not both:
        raise ValueError(f"expected at least 1 point, got 0 in {len(series)} series")
    low, high = min(both), max(both)
    figure = _figure(title, x, y)
    for index, (name, (at, values)) in enumerate(series.items()):
        marker = {"size": 4, "opacity": 0.5, "color": PALETTE[index % len(PALETTE)].line}
        figure.add_scatter(x=list(at), y=list(values), name=name, mode="markers", marker=marker)
    grey = {"color": "#999999", "width": 1}
    figure.add_shape(type="line", x0=low, y0=low, x1=high, y1=high, layer="below", line=grey)
    return figure.update_layout(height=600, hovermode="closest")


def of_report(figure: Figure) -> go.Figure:
    """A figure of the report over the global steps, in the colours of its light page, names at the lines' ends."""
    data = []
    for trace in figure.data:
        ink = PALETTE[trace["meta"]["run"] % len(PALETTE)].line
        look: dict[str, Any] = {"line": trace.get("line", {}) | {"color": ink}, "marker": {"color": ink}}
        if trace["meta"]["role"] == "collapse":
            look = {"marker": {"symbol": "x", "size": 13, "color": ink, "line": {"width": 2, "color": "white"}}}
        data.append(trace | look | {"showlegend": False})
    # The labels of narrow pages would stand on top of the others.
    labels = [label for label in figure.layout.get("annotations", ()) if not label["name"].endswith(" narrow")]
    # `end_labels` names each label `run-<index>`.
    inks = [PALETTE[int(label["name"].removeprefix("run-")) % len(PALETTE)].text for label in labels]
    coloured = [label | {"font": label["font"] | {"color": ink}} for label, ink in zip(labels, inks, strict=True)]
    drawn = go.Figure(data=data, layout=figure.layout | {"annotations": coloured})
    margin = {"l": 70, "r": 140 if labels else 20, "t": 60, "b": 60}
    return drawn.update_layout(title=figure.title, height=figure.height + 40, margin=margin, template="plotly_white")


def dials(draw: Callable[..., go.Figure], choices: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Shows `draw(first choice, first choice, ...)` under one selector per name; a changed selector redraws it.

    Numbers get a slider in ascending order, anything else a menu. Returns the selectors by name. The figure is a plain
    cell output: without a kernel it stays at the first choices. Where `draw` raises ValueError for later choices, its
    words take the figure's place. Raises ValueError for a name without choices.
    """
    from IPython.display import display
    from ipywidgets import Dropdown, HBox, Layout, SelectionSlider

    selectors: dict[str, Any] = {}
    for name, options in choices.items():
        if not len(options):
            raise ValueError(f"{name}: expected at least 1 choice, got 0")
        is_number = all(isinstance(one, int | float) and not isinstance(one, bool) for one in options)
        shown = [(number(one), one) for one in sorted(options)] if is_number else [(str(one), one) for one in options]
        kind = SelectionSlider if is_number else Dropdown
        style = {"description_width": "initial"}
        # The first choice as given, not as sorted: without a kernel the figure stays there.
        selectors[name] = kind(options=shown, value=options[0], description=name, style=style)
    display(HBox([*selectors.values()], layout=Layout(flex_flow="row wrap")))

    def drawn() -> dict[str, Any]:
        return draw(*(s.value for s in selectors.values()))._repr_mimebundle_()

    # As a MIME bundle: a figure that displays itself gives no handle to redraw it by.
    handle = display(drawn(), raw=True, display_id=True)
    if handle is None:
        raise ValueError("dials: expected a notebook's kernel to show a figure in, got plain Python")

    def redraw(_: object) -> None:
        try:
            bundle = drawn()
        except ValueError as error:  # raised here it would reach no cell, and the last figure would stay
            bundle = _figure(str(error), "", "")._repr_mimebundle_()
        # JupyterLab's plotly renderer ignores a second figure in its place; an empty text removes the first one.
        handle.update({"text/plain": ""}, raw=True)
        handle.update(bundle, raw=True)

    for selector in selectors.values():
        selector.observe(redraw, names="value")
    return selectors


# ---- parts -----------------------------------------------------------------------------------------------------------


def _figure(title: str, x: str, y: str) -> go.Figure:
    margin = {"l": 70, "r": 20, "t": 60, "b": 60}
    layout = {"title": title, "height": HEIGHT, "template": "plotly_white", "margin": margin}
    return go.Figure().update_layout(**layout, xaxis_title=x, yaxis_title=y)


def _scale(values: Sequence[Number], is_log: bool) -> Scale:
    finite = [float(value) for value in values if float("-inf") < value < float("inf")]  # False for nan, too
    if not finite:
        raise ValueError(f"expected at least 1 finite number to draw, got 0 of {len(values)}")
    return Scale.of(finite, "log" if is_log else "linear")


def _placed(scale: Scale, values: Iterable[Number]) -> list[float]:
    return [scale.place(float(value)) for value in values]


def _area(name: str, band: Mapping[Number, tuple[Number, Number]], ink: str, x: Scale, y: Scale) -> go.Scatter:
    at = _placed(x, band)
    low, high = (_placed(y, [pair[side] for pair in band.values()]) for side in (0, 1))
    red, green, blue = (int(ink[i : i + 2], 16) for i in (1, 3, 5))
    # A closed outline: along the upper edge, and back along the lower one.
    return go.Scatter(
        x=at + at[::-1],
        y=high + low[::-1],
        name=name,
        legendgroup=name,
        showlegend=False,
        mode="none",
        fill="toself",
        fillcolor=f"rgba({red}, {green}, {blue}, 0.15)",
        hoverinfo="skip",
    )
