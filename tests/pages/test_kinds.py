"""docs/exact-training-tables.md says of other kinds of error what its kept rows say; a run made again gives a row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lab.flow.config import load_config
from lab.flow.run import run_of
from tests.pages.drift import FIXED
from tests.pages.kinds import BARE, ERRORS, FRESH, NONE, PART, PREDICTIONS, REMEDIES, SEQUENCE, Kinds, block, kept
from tests.pages.study import ROOT

pytestmark = pytest.mark.unchecked


def test_the_part_is_computed_from_the_rows() -> None:
    """Between its marks the page is rebuilt to the letter from the kept rows, which have every cell."""
    assert PART.read() == block()
    study = Kinds(kept())
    for error in ERRORS:
        for remedy in REMEDIES:
            expected = 0 if error == BARE and remedy == SEQUENCE else 100
            assert len(study(error, remedy)) == expected


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
    (k5,) = (one for one in PREDICTIONS if one.name == "k5")
    study = Kinds(pd.DataFrame(rows))
    assert k5.verdict(study) == word and k5.intervals(study)[0].num == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), [("kinds", "low_rank, KL 0.18"), ("kinds_bare", BARE)])
def test_a_kept_row_is_a_run(name: str, error: str) -> None:
    """A run of the shipped config, made again, ends where its row says."""
    config = load_config(ROOT / f"configs/flow/{name}.yaml")
    (block,) = (one for one in config.errors if error.startswith(one.label))
    found = run_of(config, 0, block, NONE, 1, np.inf)
    # 150 updates of Adam amplify rounding, and rows keep six digits.
    assert found["reward"][-1] == pytest.approx(Kinds(kept())(error, NONE)[0], abs=1e-3)
