"""docs/border.md and its pictures; `python -m tests.pages.border` writes them from the kept rows."""

from __future__ import annotations

from pathlib import Path

from sandbox.border.page import markdown
from sandbox.border.pictures import gains, phase_diagram, svg
from sandbox.border.table import places, runs, where
from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger.cells import Cells
from sandbox.ledger.verdicts import findings

DOCS = Path(__file__).parents[2] / "docs"
STUDY = range(36, 47)
"""Numbers of the claims that the study tries."""


def page() -> str:
    """docs/border.md."""
    rows = Cells(RESULTS / "cells.jsonl").rows()
    (regime,) = (one for one in REGIMES if one.name == "border")
    return markdown(rows, regime, [one for one in findings(CLAIMS, REGIMES, rows) if one.claim.number in STUDY])


def pictures() -> dict[str, str]:
    """File name to SVG text: the phase diagram, and what each remedy gains by N."""
    (regime,) = (one for one in REGIMES if one.name == "border")
    table = runs(Cells(RESULTS / "cells.jsonl").rows(), regime)
    grpo = where(table, preset="grpo")
    return {"border.svg": svg(phase_diagram(places(grpo))), "border-gains.svg": svg(gains(grpo))}


if __name__ == "__main__":
    (DOCS / "border.md").write_text(page(), encoding="utf-8")
    for name, text in pictures().items():
        (DOCS / "images" / name).write_text(text, encoding="utf-8")
