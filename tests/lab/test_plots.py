"""Laws of the notebooks' figures: they draw the numbers they are given, and a dial redraws its figure in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from lab.plots import bars, clouds, dials, heat, lines, of_report, quartiles_of, series_of, stacks
from lab.report.overview import reward_picture
from lab.report.runs import load_runs
from lab.report.style import DASHES, PALETTE
from tests.lab.synthetic_runs import DEMO, write_demo

WORDS: Any = {"title": "t", "x": "x", "y": "y"}
PLOTLY = "application/vnd.plotly.v1+json"


def test_lines_are_the_numbers() -> None:
    """Each series is one trace with its own points, in its own colour; a band runs along its high side and back."""
    figure = lines({"a": {1: 2.0, 3: 4.0}, "b": {1: 5.0}}, bands={"b": {1: (4.0, 6.0)}}, **WORDS)
    a, band, b = figure.data
    assert (a.name, list(a.x), list(a.y)) == ("a", [1, 3], [2.0, 4.0])
    assert (b.name, list(b.y)) == ("b", [5.0])
    assert (list(band.x), list(band.y), band.showlegend) == ([1, 1], [6.0, 4.0], False)
    assert [a.line.color, b.line.color] == [PALETTE[0].line, PALETTE[1].line]


def test_a_zero_on_a_log_axis_stands_on_its_own_tick() -> None:
    """Where a log axis cannot draw a 0 it is put below all positive values, at a tick that reads 0."""
    for figure, axis in (
        (lines({"a": {1.0: 0.0, 2.0: 1e-3}}, log="y", **WORDS), "yaxis"),
        (lines({"a": {0.0: 1.0, 1e-3: 1.0}}, log="x", **WORDS), "xaxis"),
        (bars({"a": {"p": 0.0, "q": 1e-3}}, log="y", **WORDS), "yaxis"),
    ):
        drawn = figure.data[0].x if axis == "xaxis" else figure.data[0].y
        ticks = dict(zip(figure.layout[axis].tickvals, figure.layout[axis].ticktext, strict=True))
        assert drawn[0] < drawn[1] == 1e-3
        assert ticks[drawn[0]] == "0"
    assert bars({"a": {"p": 0.0, "q": 1e-3}}, **WORDS).data[0].y == (0.0, 1e-3)


def test_more_lines_than_colours_are_told_apart() -> None:
    """No two of as many lines as there are colours and dashes look alike; dots and dashes are as asked for."""
    names = [f"{i}" for i in range(2 * len(PALETTE))]
    figure = lines({name: {0: 1.0} for name in names}, dots=names[:1], **WORDS)
    assert len({(trace.line.color, trace.line.dash) for trace in figure.data}) == len(names)
    assert [trace.mode for trace in figure.data[:2]] == ["markers", "lines+markers"]
    assert lines({"a": {0: 1.0}}, dashed=["a"], **WORDS).data[0].line.dash == DASHES[1]


def test_stacks_are_the_numbers() -> None:
    """A part is a trace over the categories; a limit stands at its own category; parts beyond the colours differ."""
    parts = {f"part {i}": {"a": float(i), "b": 1.0} for i in range(len(PALETTE) + 1)}
    figure = stacks(parts, limits={"b": 5.0}, title="t", x="GiB")
    assert figure.layout.barmode == "stack"
    assert {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data} == parts
    (limit,) = figure.layout.shapes
    assert (limit.x0, limit.x1) == (5.0, 5.0) and limit.y0 < 1 < limit.y1
    looks = {(trace.marker.color, trace.marker.pattern.shape) for trace in figure.data}
    assert len(looks) == len(parts)
    with pytest.raises(ValueError, match="limits: expected one of a, b, got 'c'"):
        stacks(parts, limits={"c": 1.0}, title="t", x="GiB")


def test_heat_and_clouds_are_the_numbers() -> None:
    """A map holds its values with 0 in the middle of its colours, or at their start if none is negative; a cloud's
    diagonal spans all of its points."""
    figure = heat([[1.0, -3.0]], rows=["r"], columns=["p", "q"], **WORDS)
    assert (figure.data[0].z[0], figure.data[0].zmin, figure.data[0].zmax) == ([1.0, -3.0], -3.0, 3.0)
    assert list(figure.data[0].text[0]) == list(figure.data[0].customdata[0]) == ["1", "-3"]
    assert figure.data[0].colorscale[0][1] != figure.data[0].colorscale[-1][1]
    assert figure.data[0].colorbar.title.text is None
    bar = heat([[1.0]], rows=["r"], columns=["p"], measure="nats", **WORDS).data[0].colorbar
    assert bar.title.text == "nats"
    high = [
        heat([[1.0]], rows=["r"], columns=["p"], more_is_better=better, **WORDS).data[0] for better in (False, True)
    ]
    assert [one.colorscale[-1][1] for one in high] == ["rgb(103,0,13)", "rgb(8,48,107)"]  # the darkest red and blue
    figure = heat([[1.0, None]], rows=["r"], columns=["p", "q"], texts=[["+", ""]], **WORDS)
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0.0, 1.0)
    assert list(figure.data[0].text[0]) == ["+", ""] and list(figure.data[0].customdata[0]) == ["1", ""]
    with pytest.raises(ValueError, match=r"texts: expected 1 rows of 2, got \[1\]"):
        heat([[1.0, None]], rows=["r"], columns=["p", "q"], texts=[["+"]], **WORDS)
    figure = clouds({"a": ([1.0, 2.0], [0.5, 4.0])}, **WORDS)
    line = figure.layout.shapes[0]
    assert (list(figure.data[0].x), list(figure.data[0].y)) == ([1.0, 2.0], [0.5, 4.0])
    assert (line.x0, line.y0, line.x1, line.y1) == (0.5, 0.5, 4.0, 4.0)


def test_the_reports_picture_is_drawn_as_it_is(tmp_path: Path) -> None:
    """The report's points, each run in its colour; crosses and the names of a wide page, and no other names."""
    picture = reward_picture(load_runs(write_demo(tmp_path, DEMO[:2])))
    assert picture is not None
    figure = of_report(picture)
    assert [list(trace.y) for trace in figure.data] == [trace["y"] for trace in picture.data]
    looks = [(trace.mode, trace.line.color or trace.marker.color) for trace in figure.data]
    first, second = PALETTE[0].line, PALETTE[1].line
    assert looks == [("lines", first)] * 2 + [("lines", second)] * 2 + [("markers", second)]
    names = [(label.text, label.font.color) for label in figure.layout.annotations]
    assert names == [("exact", PALETTE[0].text), (f"none ✕ step {figure.data[4].x[0]}", PALETTE[1].text)]


def test_series_and_quartiles_come_from_a_frame() -> None:
    """Series keep the order of the frame; each band belongs to the series of its name."""
    frame = pd.DataFrame({"k": ["b", "a", "b"], "x": [1, 1, 2], "y": [5.0, 6.0, 7.0]})
    frame["y_q1"], frame["y_q3"] = frame["y"] - 1, frame["y"] + 2
    series = series_of(frame, "k", "x", "y")
    assert series == {"b": {1: 5.0, 2: 7.0}, "a": {1: 6.0}} and list(series) == ["b", "a"]
    assert quartiles_of(frame, "k", "x", "y") == {"b": {1: (4.0, 7.0), 2: (6.0, 9.0)}, "a": {1: (5.0, 8.0)}}


def test_mistakes_are_named() -> None:
    """A name that no series has, a map of another shape and nothing to draw are errors that say so."""
    with pytest.raises(ValueError, match="expected one of the series a, got 'b'"):
        lines({"a": {0: 1.0}}, dashed=["b"], **WORDS)
    with pytest.raises(ValueError, match="expected values of 1 rows and 1 columns, got 1 and 2"):
        heat([[1.0, 2.0]], rows=["r"], columns=["p"], **WORDS)
    with pytest.raises(ValueError, match="expected at least 1 finite number to draw, got 0 of 1"):
        lines({"a": {0: float("nan")}}, **WORDS)
    with pytest.raises(ValueError, match="expected at least 1 point, got 0 in 1 series"):
        clouds({"a": ([], [])}, **WORDS)
    with pytest.raises(ValueError, match="T: expected at least 1 choice, got 0"):
        dials(lambda T: lines({"a": {T: 1.0}}, **WORDS), {"T": []})


@pytest.mark.slow
def test_dials_redraw_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choices are drawn as a plain output; turning a selector changes that output and adds no other.

    So does a choice that cannot be drawn: the words of its ValueError take the place of the last figure.
    """
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    draw = """
from lab.plots import dials, lines
def draw(kind, T):
    if (kind, T) == ("a", 2):
        raise ValueError("expected a T above 2")
    return lines({kind: {T: 1.0}}, title="drawn", x="", y="")
selectors = dials(draw, {"kind": ["b", "a"], "T": [4, 2, 8]})
print([label for label, _ in selectors["T"].options], selectors["T"].value)
"""
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (draw, "selectors['T'].value = 8; selectors['kind'].value = 'a'", "selectors['T'].value = 2")
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(Path(__file__).parents[2])}})
    with client.setup_kernel():
        for place, (title, expected) in enumerate(
            (("drawn", [("b", [4])]), ("drawn", [("a", [8])]), ("expected a T above 2", []))
        ):
            client.execute_cell(notebook.cells[place], place)
            outputs = [out for cell in notebook.cells for out in cell.outputs]
            (drawn,) = (out["data"][PLOTLY] for out in outputs if PLOTLY in out.get("data", {}))
            assert drawn["layout"]["title"]["text"] == title
            assert [(trace["name"], trace["x"]) for trace in drawn["data"]] == expected
            assert "['2', '4', '8'] 4" in notebook.cells[0].outputs[-1]["text"]
