"""The table of replay trials says what the stored trials say."""

from __future__ import annotations

from tests.pages.replay_trials import TABLE, table


def test_the_table_is_computed_from_the_trials() -> None:
    """docs/how-to/diagnose-a-dump.md is rebuilt from results/replay_trials.csv."""
    assert TABLE.read() == table()
