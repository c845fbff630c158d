"""The ledger's page and the README's table are what the rows that the project keeps say."""

from __future__ import annotations

from sandbox.claims import RESULTS
from tests.pages.ledger import BLOCK, README, block, page


def test_the_readme_has_the_ledgers_words() -> None:
    """Between its marks stand the verdicts that the kept rows give, to the character."""
    found = BLOCK.search(README.read_text())
    assert found is not None and found.group() == block()


def test_the_page_is_computed_from_the_rows() -> None:
    """results/claims/ledger.md is rebuilt from cells.jsonl without a run."""
    assert (RESULTS / "ledger.md").read_text() == page()
