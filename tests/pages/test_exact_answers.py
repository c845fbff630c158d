"""docs/exact-training.md answers its questions with the numbers that the kept rows give."""

from __future__ import annotations

from tests.pages import drift, kinds, remedies
from tests.pages.exact_answers import ANSWERS, SUMMARY, block, summary


def test_the_answers_are_computed_from_the_rows() -> None:
    """Between its marks the page is rebuilt to the letter, and every prediction is told under its question."""
    assert ANSWERS.read() == block()
    assert SUMMARY.read() == summary()
    bullets = {line[3]: line for line in block().splitlines() if line.startswith("- (")}
    for one in (*drift.PREDICTIONS, *remedies.PREDICTIONS, *kinds.PREDICTIONS):
        verdicts = bullets[one.name[0]].rpartition(" *")[2]
        assert one.name in verdicts.strip("*.").replace(";", ",").replace(": ", ", ").split(", ")
