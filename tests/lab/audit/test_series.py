"""Laws of an audit's colours and markers: one colour an objective, one marker a replay mode, all over the page."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from lab.audit import AuditConfig
from lab.audit.page import render
from lab.audit.series import modes_shown, series
from lab.config.load import to_yaml
from lab.report.style import PALETTE
from tests.lab.browser import payload, probed, whole

pytestmark = pytest.mark.unchecked
MODES = ("none", "R2", "R3", "Pr2", "Pr3")
OBJECTIVES = ("none", "token", "sequence", "grpo")
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down")


@pytest.fixture(scope="module")
def html(config: AuditConfig, frame: pd.DataFrame) -> str:
    """The page of the rows with five replay modes: more pairs than the palette has colours."""
    many = pd.concat([frame.assign(mode=mode) for mode in MODES], ignore_index=True)
    many.attrs = frame.attrs
    assert len(OBJECTIVES) * len(MODES) > 2 * len(PALETTE)
    return render(config, many, {"seed": 0}, to_yaml(config))


def pair(label: str) -> tuple[str, str]:
    """Objective and replay mode of a line's name."""
    objective, _, mode = label.partition(", ")
    return objective, mode or "none"


PROBE = """
setTimeout(() => {
  parent.postMessage({
    chips: [...document.querySelectorAll('.run')].map((b) => {
      const style = getComputedStyle(b.querySelector('svg.marker'));
      return [b.textContent.trim(), style.stroke, style.fill, b.querySelector('path').getAttribute('d')];
    }),
    legend: [...document.querySelectorAll('#first .arms span')]
      .map((s) => [s.textContent.trim(), s.querySelector('path').getAttribute('d')]),
    drawn: [...document.querySelectorAll('.plot')].flatMap((p) => p.data ?? [])
      .filter((t) => t.meta.role !== 'mark' && t.mode?.includes('markers'))
      .map((t) => [t.name, t.marker.color, t.marker.symbol]),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  }, '*');
}, 2000);
"""


@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (1280, False)])
def test_a_browser_draws_a_colour_an_objective_and_a_marker_a_mode(
    html: str, tmp_path: Path, width: int, is_dark: bool
) -> None:
    """Figures, chips and the legend of modes agree, and no two objectives share a colour."""
    found = probed(html, PROBE, tmp_path, width, is_dark)
    inks = [ink.line_dark if is_dark else ink.line for ink in PALETTE]
    colours: dict[str, str] = dict(zip(OBJECTIVES, inks, strict=False))
    symbols: dict[str, str] = dict(zip(MODES, MARKERS, strict=True))
    assert len(found["drawn"]) > 5 * len(OBJECTIVES) * len(MODES)
    for name, colour, symbol in found["drawn"]:
        objective, mode = pair(name)
        assert colour == colours[objective] and symbol.removesuffix("-open") == symbols[mode]
    paths = dict(found["legend"])
    assert list(paths) == list(MODES) and len(set(paths.values())) == len(MODES)
    assert len(found["chips"]) == len(OBJECTIVES) * len(MODES) and found["overflow"] == 0
    for name, stroke, fill, path in found["chips"]:
        objective, mode = pair(name)
        assert stroke == fill == _rgb(colours[objective]) and path == paths[mode]


def test_every_trace_of_a_line_has_its_ink(html: str) -> None:
    """Bands and bars, too; and a row of the table has the ink and the number of its chip."""
    whole(html)
    traces = [t for f in payload(html)["figures"] for t in f["data"] if "run" in t["meta"]]
    assert {t["meta"]["role"] for t in traces} >= {"line", "open", "band", "bar", "light-bar", "mark"}
    for trace in traces:
        assert trace["meta"]["ink"] == OBJECTIVES.index(pair(trace["name"])[0])
    chips = re.findall(r'class="run ink-(\d)" data-run="(\d+)".*?</svg>([^<]*?)\s*</button>', html, re.DOTALL)
    rows = re.findall(
        r'<tr class="ink-(\d)[^"]*" data-slice="[^"]*" data-run="(\d+)".*?</svg>([^<]*)</th>', html, re.DOTALL
    )
    assert "Colour: objective. Marker: replay mode." in html and len(chips) == 20 and set(rows) == set(chips)


def test_the_legend_names_dashes_where_colours_run_out() -> None:
    """The eighth objective has the first one's colour, dashed, on its lines in every figure."""
    lines = series([(f"objective {k}", mode) for k in range(len(PALETTE) + 1) for mode in MODES])
    dashes = {line.ink: line.trace("line", [], [])["line"]["dash"] for line in lines.values()}
    assert dashes == dict.fromkeys(range(len(PALETTE)), "solid") | {len(PALETTE): "dash"}
    assert [line.mode for line in modes_shown(lines)] == list(MODES)


def test_one_mode_needs_no_legend(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Where all policies are without routes, the page says nothing of replay modes."""
    assert "Marker: replay mode" not in render(config, frame, {"seed": 0}, "")


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"
