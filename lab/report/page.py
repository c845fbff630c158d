"""The one shell of every page: style, script, palette and glossary around the page's own template.

A page is one HTML file that needs nothing else: it holds plotly.js once, and loads no address.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lab.report.figures import Figure
from lab.report.glossary import Glossary
from lab.report.scale import HEIGHT, MARGIN
from lab.report.style import PALETTE

TEMPLATES = Path(__file__).parent / "template"

Drawn = Figure | tuple[Figure, str]
"""A figure, or a figure with the one slice of the page in which it is shown."""


@dataclass(frozen=True)
class Section:
    """A heading, one sentence on the feature to look for, and the figures under it."""

    id: str
    title: str
    question: str
    figures: Sequence[Figure]


def page(template: str, drawn: Iterable[Drawn], *, num_runs: int = 0, own: Path | None = None, **words: Any) -> str:
    """The page of a template that extends base.html.jinja, as text; `words` fill the template.

    `own` is the template's folder, by default the report's; `num_runs` counts the buttons of the legend. In a
    template the filter `explained` links terms to the glossary that ends the page.
    """
    folders = [TEMPLATES] if own is None else [own, TEMPLATES]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    glossary = Glossary()
    environment.filters["explained"] = glossary.explained
    return environment.get_template(template).render(
        **words,
        glossary=glossary,
        palette=PALETTE,
        height=HEIGHT,
        payload=embedded(_payload(list(drawn), num_runs)),
        plotly=Markup(get_plotlyjs()),
    )


def embedded(data: Any) -> Markup:
    """Data for a page's script as JSON; it has no `<`, so nothing in it can end the script element."""
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _payload(drawn: Sequence[Drawn], num_runs: int) -> dict[str, Any]:
    return {
        "height": HEIGHT, "margin": MARGIN, "num_runs": num_runs, "palette": [asdict(ink) for ink in PALETTE],
        "figures": [_figure(*one) if isinstance(one, tuple) else _figure(one) for one in drawn],
    }  # fmt: skip


def _figure(figure: Figure, shown_in: str | None = None) -> dict[str, Any]:
    found = {"id": figure.id, "data": figure.data, "layout": figure.layout}
    return found if shown_in is None else found | {"slice": shown_in}
