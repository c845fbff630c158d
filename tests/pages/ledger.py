"""The README's table of the claims ledger; `python -m tests.pages.ledger` writes it from the kept rows."""

from __future__ import annotations

import re
from pathlib import Path

from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger.cells import Cells
from sandbox.ledger.page import markdown, spent, verdict_table
from sandbox.ledger.verdicts import outcomes

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"(?<=<!-- ledger -->\n).*?(?=<!-- /ledger -->)", re.DOTALL)


def block() -> str:
    """What stands between the README's two marks."""
    rows = Cells(RESULTS / "cells.jsonl").rows()
    return f"{spent(rows)}\n\n{verdict_table(CLAIMS, REGIMES, outcomes(CLAIMS, REGIMES, rows))}"


def page() -> str:
    """results/claims/ledger.md."""
    rows = Cells(RESULTS / "cells.jsonl").rows()
    return markdown(CLAIMS, REGIMES, outcomes(CLAIMS, REGIMES, rows), rows)


if __name__ == "__main__":
    README.write_text(BLOCK.sub(lambda _: block(), README.read_text()))
    (RESULTS / "ledger.md").write_text(page())
