"""The one shell of every page: style, script, palette and glossary around a template of its own.

A page is one HTML file that needs nothing else: plotly.js is inside it once, and no address is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lab.report.figures import HEIGHT, MARGIN, Figure
from lab.report.glossary import Glossary
from lab.report.style import PALETTE

TEMPLATES = Path(__file__).parent / "template"

Drawn = Figure | tuple[Figure, str]
"""A figure, or a figure with the slice of the page in which alone it is shown."""


def page(template: str, drawn: Iterable[Drawn], *, num_runs: int = 0, own: Path | None = None, **words: Any) -> str:
    """The page of a template that extends base.html.jinja, as text; `words` are what the template shows.

    `own` is the folder of the template where it is not the report's; `num_runs` counts the buttons of the legend. In a
    template the filter `explained` links words of the field to the glossary that ends the page.
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
        payload=_payload(list(drawn), num_runs),
        plotly=Markup(get_plotlyjs()),
    )


def _payload(drawn: Sequence[Drawn], num_runs: int) -> Markup:
    """JSON of what the page's script draws from; no `<` can end its element early."""
    payload = {
        "height": HEIGHT, "margin": MARGIN, "num_runs": num_runs, "palette": [asdict(ink) for ink in PALETTE],
        "figures": [_figure(*one) if isinstance(one, tuple) else _figure(one) for one in drawn],
    }  # fmt: skip
    return Markup(json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


def _figure(figure: Figure, shown_in: str | None = None) -> dict[str, Any]:
    found = {"id": figure.id, "data": figure.data, "layout": figure.layout}
    return found if shown_in is None else found | {"slice": shown_in}


__all__ = ["TEMPLATES", "Drawn", "page"]
