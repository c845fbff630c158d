"""The ledger's page, its lines in the README, its picture; `python -m tests.pages.ledger` writes them from the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from sandbox.border.pictures import svg
from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger.cells import Cells
from sandbox.ledger.page import markdown
from sandbox.ledger.power import needs
from sandbox.ledger.summary import ClaimLine, counts_text, lines
from sandbox.ledger.verdicts import Finding, findings
from tests.pages.study import ROOT, Part
from tests.pages.tiles import tiles

PART = Part(ROOT / "README.md", "ledger")
COUNTS = Part(ROOT / "docs/ledger.md", "counts")
PICTURE = ROOT / "docs/images/ledger.svg"


@cache
def kept() -> Mapping[str, Any]:
    """The rows that the project keeps, by key."""
    return Cells(RESULTS / "cells.jsonl").rows()


@cache
def found() -> tuple[Finding, ...]:
    """Every finding that they allow; a second to compute, and asked for by two pages and two blocks."""
    return tuple(findings(CLAIMS, REGIMES, kept()))


@cache
def made() -> tuple[ClaimLine, ...]:
    """A line for every claim, by its verdict."""
    return tuple(lines(CLAIMS, found(), needs(CLAIMS, REGIMES, kept())))


def counts() -> str:
    """The beginning of docs/ledger.md: claims by verdict, as a picture and in words."""
    said = counts_text(made())
    return (
        f"![{len(CLAIMS)} claims, a tile each: {said}](images/{PICTURE.name})\n\n"
        f"**{len(CLAIMS)} claims: {said}** ([all of them](#verdicts)).\n"
    )


def picture() -> str:
    """docs/images/ledger.svg."""
    return svg(tiles(made()))


def block() -> str:
    """The text between the README's two marks: two lines."""
    hours = math.fsum(row.get("seconds") or 0.0 for row in kept().values()) / 3600
    return (
        f"- {len(CLAIMS)} claims, each within reach tested in one regime on fresh seeds: {counts_text(made())}.\n"
        f"- {len(kept())} runs, {hours:.1f} hours of one thread: [all](results/claims/ledger.md).\n"
    )


def page() -> str:
    """results/claims/ledger.md."""
    return markdown(CLAIMS, REGIMES, found(), kept())


if __name__ == "__main__":
    PART.write(block())
    COUNTS.write(counts())
    (RESULTS / "ledger.md").write_text(page())
    PICTURE.write_text(picture(), encoding="utf-8")
