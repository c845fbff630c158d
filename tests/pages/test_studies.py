"""The studies of exact training: their designs, their verdicts and their kept rows, which a run gives again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab.flow.config import load_config
from lab.flow.run import run_of
from tests.pages import drift, kinds, remedies_rows
from tests.pages.drift import FIXED, NONE, SEQUENCE
from tests.pages.kinds import BARE, ERRORS, FRESH, LOW_RANK, REMEDIES, Kinds
from tests.pages.remedies import PREDICTIONS
from tests.pages.remedies_rows import CLIP, EXACT, KEPT, Remedies, rank
from tests.pages.study import ROOT

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize(
    ("design", "letters", "predictions"),
    [
        ("0010-drift-study", "abk", (*drift.PREDICTIONS, *kinds.PREDICTIONS)),
        ("0012-remedies-study", "cdefg", PREDICTIONS),
    ],
)
def test_every_prediction_of_a_design_is_tried(design: str, letters: str, predictions: tuple) -> None:
    """The design's tables have the names of the predictions that are tried, in their order, and no others."""
    lines = (ROOT / f"docs/decisions/{design}.md").read_text(encoding="utf-8").splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith(tuple(f"| {x}" for x in letters))]
    assert names == [one.name for one in predictions]


@pytest.mark.parametrize(("gap", "word"), [(1.0, "holds"), (-1.0, "fails"), (0.0, "open")])
def test_a_verdict_is_of_the_problems_that_both_sides_have(gap: float, word: str) -> None:
    """k5 pairs the fixed error's 5 problems with the 3 that fresh noise has; the others' rewards do not enter."""
    rows = [
        {"error": error, "objective": objective, "problem": i, "reward": (i - 1) * 0.1 + add + 100.0 * (i > 2)}
        for error, objective, num, add in (
            (FIXED, NONE, 5, 0.0), (FIXED, SEQUENCE, 5, gap), (FRESH, NONE, 3, 0.0), (FRESH, SEQUENCE, 3, 0.0),
        )
        for i in range(num)
    ]  # fmt: skip
    (k5,) = (one for one in kinds.PREDICTIONS if one.name == "k5")
    study = Kinds(pd.DataFrame(rows))
    assert k5.verdict(study) == word and k5.intervals(study)[0].num == 3


def test_ranks_are_of_the_problems_that_both_sides_have() -> None:
    """Studies with different problems are compared, and ranks computed, on their common problems alone."""
    first = pd.Series([1.0, 2.0, 3.0, 4.0], index=[0, 1, 2, 3])
    second = pd.Series([9.0, 3.0, 2.0, 1.0, 8.0], index=[7, 3, 2, 1, 9])
    found = rank(first, second, "paired")
    assert (found.mean, found.num) == (1.0, 3)


def test_the_kinds_of_error_have_every_cell() -> None:
    """Of 100 problems each; without a baseline the sequence weight was not run."""
    study = Kinds(kinds.kept())
    for error in ERRORS:
        for remedy in REMEDIES:
            assert len(study(error, remedy)) == (0 if (error, remedy) == (BARE, SEQUENCE) else 100)


def test_the_rows_are_few_digits_of_whole_problems() -> None:
    """Each study has the same problems in all its cells, counted from 0 without a gap."""
    frame = remedies_rows.kept()
    assert KEPT.stat().st_size < 130 * len(frame)
    for _, part in frame.groupby("study"):
        each = part.groupby(["error", "objective", "N", "B"])["problem"]
        counts = {tuple(sorted(values)) for _, values in each}
        assert len(counts) == 1 and counts == {tuple(range(len(next(iter(counts)))))}


RUNS: dict[str, tuple[str, str, int, Callable[[str], Any]]] = {
    "drift": (FIXED, SEQUENCE, 1, lambda name: drift.Study(drift.kept())(FIXED, SEQUENCE, name)[0]),
    "kinds": (LOW_RANK, NONE, 1, lambda name: Kinds(kinds.kept())(LOW_RANK, NONE, name)[0]),
    "kinds_bare": (BARE, NONE, 1, lambda name: Kinds(kinds.kept())(BARE, NONE, name)[0]),
    "remedies_stale": (
        EXACT, CLIP, 16, lambda name: Remedies(remedies_rows.kept()).cell("remedies-stale", CLIP, name, EXACT, 16)[0],
    ),
}  # fmt: skip
"""By config: error, objective and N of a run of the first problem, and its kept numbers by column."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_kept_row_is_a_run(name: str) -> None:
    """A run of the shipped config, made again, ends where its row says."""
    error, objective, n, stored = RUNS[name]
    config = load_config(ROOT / f"configs/flow/{name}.yaml")
    (block,) = (one for one in config.errors if error.startswith(one.label))
    found = run_of(config, 0, block, objective, n, np.inf)
    # Up to 150 updates of Adam amplify rounding, and rows keep six digits.
    for column in ("reward", "entropy"):
        assert found[column][-1] == pytest.approx(stored(column), abs=1e-3)
