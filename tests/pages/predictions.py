"""A prediction of a study of exact runs: its sentence, its measure and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lab.flow.table import MeanInterval
from lab.markdown import markdown_table

Study = TypeVar("Study")
"""The kept rows of a study, by cell."""

COUNTED = {"holds": "hold", "fails": "fail", "open": "are open"}
"""Verdicts, and their plurals."""


@dataclass(frozen=True)
class Prediction(Generic[Study]):
    """A sentence, its measure, and the intervals, all of which are above 0 if it holds."""

    name: str
    words: str
    measured: str
    intervals: Callable[[Study], list[MeanInterval]]

    def verdict(self, study: Study) -> str:
        """holds, fails (an interval says the opposite) or open."""
        found = self.intervals(study)
        if any(one.high < 0 for one in found):
            return "fails"
        return "holds" if all(one.low > 0 for one in found) else "open"


def verdicts(predictions: Sequence[Prediction[Study]], study: Study) -> str:
    """A table of the predictions, the findings and the verdicts."""
    rows = []
    for one in predictions:
        found = "; ".join(map(str, one.intervals(study)))
        rows.append((one.name, one.words, one.measured, found, one.verdict(study)))
    return markdown_table(("", "prediction", "measure", "found", "verdict"), rows)


def counts(predictions: Sequence[Prediction[Study]], study: Study) -> str:
    """The number that hold, fail and are open, in words."""
    told = [one.verdict(study) for one in predictions]
    return (
        f"Of {len(told)} predictions {', '.join(f'{told.count(word)} {plural}' for word, plural in COUNTED.items())}."
    )
