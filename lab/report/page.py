"""The report as one HTML page that needs nothing else: plotly.js is inside it once, and no address is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lab.files import atomic_write
from lab.records import RunFolder
from lab.report.figures import HEIGHT, MARGIN, Figure
from lab.report.overview import reward_picture
from lab.report.runs import Run, load_runs, shared_prefix
from lab.report.sections import SECTIONS
from lab.report.story import story
from lab.report.style import PALETTE

TEMPLATES = Path(__file__).parent / "template"


def write_report(run_folders: Sequence[RunFolder], out: Path) -> None:
    """Writes the page for one run, or for several side by side in this order, to the file `out`."""
    atomic_write(out, render(run_folders))


def render(run_folders: Sequence[RunFolder]) -> str:
    """The page as text; ValueError for no run folder."""
    runs = load_runs(run_folders)
    drawn = [(section, [f for f in (draw(runs) for draw in section.figures) if f is not None]) for section in SECTIONS]
    sections = [(section, figures) for section, figures in drawn if figures]
    picture = reward_picture(runs)
    figures = [*([] if picture is None else [picture]), *(figure for _, some in sections for figure in some)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.jinja").render(
        title=_title(runs),
        runs=runs,
        rows=[run.row() for run in runs],
        story=story(runs),
        picture=picture,
        sections=sections,
        palette=PALETTE,
        height=HEIGHT,
        rules=_rules(runs),
        payload=_script_json(_payload(runs, figures)),
        plotly=Markup(get_plotlyjs()),
    )


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    shared = shared_prefix([run.name for run in runs]).rstrip("-_ ")
    return f"{shared}: {len(runs)} runs" if shared else f"{len(runs)} runs"


def _rules(runs: Sequence[Run]) -> dict[str, str]:
    """The rules of the verdict where all finished runs were judged by the same ones; nothing otherwise."""
    found = [run.verdict.get("rules", {}) for run in runs if run.verdict is not None]
    return found[0] if found and all(rules == found[0] for rules in found) else {}


def _payload(runs: Sequence[Run], figures: Sequence[Figure]) -> dict[str, object]:
    """What the page's script draws from."""
    return {
        "height": HEIGHT,
        "margin": MARGIN,
        "num_runs": len(runs),
        "palette": [asdict(ink) for ink in PALETTE],
        "figures": [{"id": f.id, "data": f.data, "layout": f.layout} for f in figures],
    }


def _script_json(value: object) -> Markup:
    """JSON that stands safely inside a script element: no `<` can end the element early."""
    return Markup(json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))
