"""The answers of exact training that claims of the ledger refer to; `python -m tests.pages.verdicts` keeps them.

They are the predictions of both studies as written, and W: questions of claims that no prediction covers, answered
from rows that already existed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from lab.flow.table import MeanInterval, interval
from sandbox.ledger.exact import KEPT
from tests.pages import drift, remedies
from tests.pages.predictions import Prediction, Study
from tests.pages.remedies_rows import FIXED, NONE, R2, R3, TOKEN, Remedies, mean


def _drift(name: str, column: str) -> Callable[[drift.Study], list[MeanInterval]]:
    return lambda of: [interval(of(FIXED, TOKEN, column) - of(FIXED, NONE, column), "drift", name)]


def _stale(name: str, n: int) -> Callable[[Remedies], list[MeanInterval]]:
    return lambda of: [mean(of.stale(NONE, FIXED, n) - of.stale(TOKEN, FIXED, n), name)]


W_DRIFT: tuple[Prediction[drift.Study], ...] = (
    Prediction(
        "w1", "Fixed, N = 1: the token weight ends with more reward than no weight.", "token weight less no weight",
        _drift("w1", "reward"),
    ),
    Prediction(
        "w4", "Fixed, N = 1: entropy ends lower without a weight than under the token weight.",
        "token weight less no weight", _drift("w4", "entropy"),
    ),
)  # fmt: skip
W_REMEDIES: tuple[Prediction[Remedies], ...] = (
    *(
        Prediction(
            f"w{i}", f"Fixed, N = {n}: the token weight ends with more reward than no weight.",
            "token weight less no weight", _stale(f"w{i}", n),
        )
        for i, n in ((2, 4), (3, 16))
    ),
    Prediction(
        "w5", "Noise 2, N = 8: R3 ends with more reward than R2.", "R3 less R2",
        lambda of: [mean(of.replayed(R3) - of.replayed(R2), "w5")],
    ),
)  # fmt: skip


def rows() -> list[tuple[str, str, str, str, int]]:
    """Name, sentence, interval, verdict and number of problems of every question."""
    one, two = drift.Study(drift.kept()), Remedies(remedies.kept())
    return [*_asked((*drift.PREDICTIONS, *W_DRIFT), one), *_asked((*remedies.PREDICTIONS, *W_REMEDIES), two)]


def _asked(predictions: Sequence[Prediction[Study]], study: Study) -> list[tuple[str, str, str, str, int]]:
    found = []
    for each in predictions:
        intervals = each.intervals(study)
        shown = f"{each.measured}: {'; '.join(map(str, intervals))}"
        found.append((each.name, each.words, shown, each.verdict(study), min(x.num for x in intervals)))
    return found


def table() -> str:
    """results/flow/verdicts.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "words", "found", "verdict", "problems"))
    writer.writerows(rows())
    return text.getvalue()


if __name__ == "__main__":
    KEPT.write_text(table(), encoding="utf-8")
