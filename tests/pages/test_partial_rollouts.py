"""The page on partial rollouts says what the stored runs say."""

from __future__ import annotations

from tests.pages.partial_rollouts import TABLE, table


def test_the_table_is_computed_from_the_runs() -> None:
    """docs/how-to/study-partial-rollouts.md is rebuilt from results/partial_rollouts.csv."""
    assert TABLE.read() == table()
