"""The ledger's page and its lines in the README; `python -m tests.pages.ledger` writes both from the kept rows."""

from __future__ import annotations

from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger.cells import Cells
from sandbox.ledger.claim import FRESH
from sandbox.ledger.page import markdown
from sandbox.ledger.power import needs
from sandbox.ledger.summary import counts_text, lines, spent
from sandbox.ledger.verdicts import findings
from tests.pages.study import ROOT, Part

PART = Part(ROOT / "README.md", "ledger")


def block() -> str:
    """The text between the README's two marks: four lines."""
    rows = Cells(RESULTS / "cells.jsonl").rows()
    found = findings(CLAIMS, REGIMES, rows)
    made = lines(CLAIMS, found, needs(CLAIMS, REGIMES, rows))
    explored = [one for one in found if not one.decides and one.stand is not None]
    regimes = {one.regime for one in explored}
    return (
        f"- {len(CLAIMS)} claims, each decided in one regime on seeds from {FRESH} on: {counts_text(made)}.\n"
        f"- Exploratory, on seeds below {FRESH}: {len(explored)} findings in {len(regimes)} regimes.\n"
        f"- {spent(rows)}\n"
        "- Verdicts, effects, power and costs: [results/claims/ledger.md](results/claims/ledger.md).\n"
    )


def page() -> str:
    """results/claims/ledger.md."""
    rows = Cells(RESULTS / "cells.jsonl").rows()
    return markdown(CLAIMS, REGIMES, findings(CLAIMS, REGIMES, rows), rows)


if __name__ == "__main__":
    PART.write(block())
    (RESULTS / "ledger.md").write_text(page())
