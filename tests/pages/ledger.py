"""The ledger's page and its lines in the README; `python -m tests.pages.ledger` writes both from the kept rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger.cells import Cells
from sandbox.ledger.page import markdown
from sandbox.ledger.power import needs
from sandbox.ledger.summary import counts_text, lines
from sandbox.ledger.verdicts import Finding, findings
from tests.pages.study import ROOT, Part

PART = Part(ROOT / "README.md", "ledger")


@cache
def kept() -> Mapping[str, Any]:
    """The rows that the project keeps, by key."""
    return Cells(RESULTS / "cells.jsonl").rows()


@cache
def found() -> tuple[Finding, ...]:
    """Every finding that they allow; a second to compute, and asked for by two pages and two blocks."""
    return tuple(findings(CLAIMS, REGIMES, kept()))


def block() -> str:
    """The text between the README's two marks: four lines."""
    made = lines(CLAIMS, found(), needs(CLAIMS, REGIMES, kept()))
    explored = [one for one in found() if not one.decides and one.stand is not None]
    regimes = {one.regime for one in explored}
    hours = math.fsum(row.get("seconds") or 0.0 for row in kept().values()) / 3600
    return (
        f"- {len(CLAIMS)} claims, each decided in one regime on fresh seeds: {counts_text(made)}.\n"
        f"- Exploratory, on seeds seen before: {len(explored)} findings in {len(regimes)} regimes.\n"
        f"- {len(kept())} runs, {hours:.1f} hours of one thread.\n"
        "- All of it: [results/claims/ledger.md](results/claims/ledger.md).\n"
    )


def page() -> str:
    """results/claims/ledger.md."""
    return markdown(CLAIMS, REGIMES, found(), kept())


if __name__ == "__main__":
    PART.write(block())
    (RESULTS / "ledger.md").write_text(page())
