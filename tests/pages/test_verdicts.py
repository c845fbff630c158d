"""The answers that the ledger refers to are what the studies' kept rows give."""

from __future__ import annotations

from sandbox.ledger.exact import KEPT, answers
from tests.pages import drift, remedies
from tests.pages.verdicts import table


def test_the_answers_are_computed_from_the_rows() -> None:
    """results/flow/verdicts.csv is rebuilt to the letter, with every prediction of both studies in it."""
    assert KEPT.read_text(encoding="utf-8") == table()
    assert {one.name for one in (*drift.PREDICTIONS, *remedies.PREDICTIONS)} <= set(answers())
