"""The ledger's page and its lines in the README are computed from the kept rows."""

from __future__ import annotations

from sandbox.claims import RESULTS
from tests.pages.ledger import PART, block, page


def test_the_readme_has_the_ledgers_words() -> None:
    """Between its marks the README has the verdicts of the kept rows, to the character."""
    assert PART.read() == block()


def test_the_page_is_computed_from_the_rows() -> None:
    """results/claims/ledger.md is rebuilt from cells.jsonl without a run."""
    assert (RESULTS / "ledger.md").read_text() == page()
