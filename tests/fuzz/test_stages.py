"""The mark of a cluster run's stage, by which the tally of its kills counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.cluster_kills import AIMS, seconds_of
from tests.fuzz.stages import BETWEEN, PUSH, SAVE, Mark


def test_a_mark_names_the_innermost_stage_and_returns_after_errors(tmp_path: Path) -> None:
    """Within a stage the file has its name, within a stage of it that one's, and afterwards the one before."""
    mark, seen = Mark(tmp_path / "stage"), []

    def note() -> None:
        seen.append((tmp_path / "stage").read_text())

    def fail() -> None:
        note()
        mark.around(PUSH, note)()
        note()
        raise OSError

    note()
    with pytest.raises(OSError):
        mark.around(SAVE, fail)()
    note()
    assert seen == [BETWEEN, SAVE, PUSH, SAVE, BETWEEN]


def test_of_twenty_kills_at_least_four_are_aimed_at_saves_and_at_pushes() -> None:
    """Aims come in turns; a stage's seconds are the median of the rows that have it, the first left out."""
    aims = [AIMS[number % len(AIMS)] for number in range(20)]
    assert aims.count(SAVE) >= 4 and aims.count(PUSH) >= 4 and aims.count(None) >= 8
    rows = [
        {"timing_s/step": 9.0, "timing_s/push": 9.0},
        *({"timing_s/step": s, "timing_s/push": 0.1} for s in (1, 2, 3)),
    ]
    rows[2]["timing_s/save_checkpoint"] = 0.5
    assert seconds_of(rows) == {None: 2, SAVE: 0.5, PUSH: 0.1}
