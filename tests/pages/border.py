"""docs/border.md and its tables, its pictures and its map to click.

`python -m tests.pages.border` writes all of it from the rows.
"""

from __future__ import annotations

from functools import cache

from sandbox.border import dual_clip
from sandbox.border.curves import entropy_picture, fit_picture
from sandbox.border.explorer import explorer
from sandbox.border.longer import longer_picture
from sandbox.border.page import markdown
from sandbox.border.peaks import picture, shown_seed
from sandbox.border.pictures import gains, phase_diagram, svg
from sandbox.border.study import BorderStudy
from sandbox.border.table import places
from sandbox.border.tables_page import markdown as tables_markdown
from sandbox.claims import REGIMES
from sandbox.ledger.summary import waiting_text
from sandbox.ledger.verdicts import Finding
from tests.pages import peaks
from tests.pages.ledger import found, kept
from tests.pages.study import ROOT

DOCS = ROOT / "docs"
(BORDER,) = (one for one in REGIMES if one.name == "border")
STUDY = (*range(36, 51), 58, 59, 60, *range(62, 65), 66, 67, 70)
"""Numbers of the claims that the study tests; those that repeat one of them belong to it, too."""


@cache
def study() -> BorderStudy:
    """The study of the kept rows."""
    return BorderStudy(kept(), BORDER)


def page() -> str:
    """docs/border.md."""
    return markdown(study(), _own(), peaks.kept())


def tables() -> str:
    """docs/border-tables.md."""
    return tables_markdown(study(), _own(), waiting_text(found()))


def _own() -> list[Finding]:
    return [one for one in found() if {one.claim.number, one.claim.repeats} & set(STUDY)]


def map_to_click() -> str:
    """docs/border-map.html."""
    return explorer(kept(), BORDER)


def pictures() -> dict[str, str]:
    """File name to SVG text: the phase diagram, the gain of each remedy by N, the fit, longer runs, and the entropy."""
    of, looked_at = study(), peaks.kept()
    return {
        "border.svg": svg(phase_diagram(places(of.grpo), border=of.borders["KL x N"].border)),
        "border-gains.svg": svg(gains(of.grpo)),
        "border-fit.svg": svg(fit_picture(of.unaided, of.slowed, dual_clip.unaided(of))),
        "border-peaks.svg": svg(picture(looked_at, shown_seed(looked_at))),
        "border-longer.svg": svg(longer_picture(of.rows, of.regime)),
        "border-entropy.svg": svg(entropy_picture(of.table, of.rows)),
    }


if __name__ == "__main__":
    text, tables_text = page(), tables()
    (DOCS / "border.md").write_text(text, encoding="utf-8")
    (DOCS / "border-tables.md").write_text(tables_text, encoding="utf-8")
    (DOCS / "border-map.html").write_text(map_to_click(), encoding="utf-8")
    for name, text in pictures().items():
        (DOCS / "images" / name).write_text(text, encoding="utf-8")
