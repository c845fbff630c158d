"""docs/exact-training-tables.md says of the study of drift what its kept rows say, and these are what the runs give."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lab.flow.config import load_config
from lab.flow.run import run_of
from tests.pages import kinds
from tests.pages.drift import (
    FIXED,
    LONG,
    NONE,
    PART,
    PREDICTIONS,
    SEQUENCE,
    Study,
    block,
    kept,
)
from tests.pages.study import ROOT

pytestmark = pytest.mark.unchecked

DESIGN = ROOT / "docs/decisions/0010-drift-study.md"


def test_the_part_is_computed_from_the_rows() -> None:
    """Between its marks the page is rebuilt to the letter from the kept rows, without a run."""
    assert PART.read() == block()


def test_every_prediction_of_the_design_is_tried() -> None:
    """The design's table has the names of the predictions that are tried, in their order, and no others."""
    lines = DESIGN.read_text(encoding="utf-8").splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith(("| a", "| b", "| k"))]
    assert names == [one.name for one in (*PREDICTIONS, *kinds.PREDICTIONS)]


@pytest.mark.parametrize(("first", "second"), [(1.0, "holds"), (-1.0, "fails"), (0.0, "open")])
def test_a_verdict_is_the_intervals(first: float, second: str) -> None:
    """No weight does harm where it earns less than the sequence weight in each problem, and the opposite where more."""
    rows = [
        {"length": LONG, "error": FIXED, "objective": name, "problem": i, "reward": value}
        for name in (NONE, SEQUENCE)
        for i, value in enumerate([0.1 * i + (first if name == SEQUENCE else 0.0) for i in range(5)])
    ]
    (a3,) = (one for one in PREDICTIONS if one.name == "a3")
    assert a3.verdict(Study(pd.DataFrame(rows))) == second


@pytest.mark.slow
def test_a_kept_row_is_a_run() -> None:
    """A run of the shipped config, made again, ends where its row says."""
    config = load_config(ROOT / "configs/flow/drift.yaml")
    found = run_of(config, 0, config.errors[0], SEQUENCE, 1, np.inf)
    values = Study(kept())
    # 150 updates of Adam amplify rounding, and rows keep six digits.
    assert found["reward"][-1] == pytest.approx(values(FIXED, SEQUENCE, "reward")[0], abs=1e-3)
    assert found["entropy"][-1] == pytest.approx(values(FIXED, SEQUENCE, "entropy")[0], abs=1e-3)
