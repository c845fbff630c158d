"""docs/exact-training-tables.md has what the kept rows of the study of remedies say, and these are the runs'."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lab.flow.config import load_config
from lab.flow.run import run_of
from tests.pages.remedies import PART, PREDICTIONS, block
from tests.pages.remedies_rows import CLIP, EXACT, KEPT, NONE, SEQUENCE, Remedies, kept, rank
from tests.pages.study import ROOT

pytestmark = pytest.mark.unchecked

DESIGN = ROOT / "docs/decisions/0012-remedies-study.md"


def test_the_part_is_computed_from_the_rows() -> None:
    """Between its marks the page is rebuilt to the letter from the kept rows, without a run."""
    assert PART.read() == block()


def test_every_prediction_of_the_design_is_tried() -> None:
    """The design's tables have the names of the predictions that are tried, in their order, and no others."""
    lines = DESIGN.read_text(encoding="utf-8").splitlines()
    names = [
        line.split("|")[1].strip() for line in lines if line.startswith(tuple(f"| {letter}" for letter in "cdefg"))
    ]
    assert names == [one.name for one in PREDICTIONS]


@pytest.mark.parametrize(("gap", "verdict"), [(1.0, "holds"), (-1.0, "fails"), (0.0, "open")])
def test_a_verdict_is_the_intervals(gap: float, verdict: str) -> None:
    """No weight does harm where it earns less than the sequence weight in each problem, the opposite where more."""
    jitter = [0.1, -0.1, 0.05, -0.05, 0.0]
    cells = (("remedies", SEQUENCE, 1, gap), ("remedies-stale", NONE, 16, 0.0))
    rows = [
        {
            "study": study, "objective": objective, "N": n, "error": EXACT if n > 1 else "fixed, KL 0.18", "B": np.inf,
            "problem": i, "reward": value + (each if n == 1 else 0.0),
        }
        for study, objective, n, value in cells
        for i, each in enumerate(jitter)
    ]  # fmt: skip
    (c1,) = (one for one in PREDICTIONS if one.name == "c1")
    assert c1.verdict(Remedies(pd.DataFrame(rows))) == verdict


def test_problems_are_paired() -> None:
    """Studies with different problems are compared, and ranks computed, on their common problems alone."""
    first = pd.Series([1.0, 2.0, 3.0, 4.0], index=[0, 1, 2, 3])
    second = pd.Series([9.0, 3.0, 2.0, 1.0, 8.0], index=[7, 3, 2, 1, 9])
    found = rank(first, second, "paired")
    assert (found.mean, found.num) == (1.0, 3)


def test_the_rows_are_few_digits_of_whole_problems() -> None:
    """Each study has the same problems in all its cells, counted from 0 without a gap."""
    frame = kept()
    assert KEPT.stat().st_size < 130 * len(frame)
    for _, part in frame.groupby("study"):
        each = part.groupby(["error", "objective", "N", "B"])["problem"]
        counts = {tuple(sorted(values)) for _, values in each}
        assert len(counts) == 1 and counts == {tuple(range(len(next(iter(counts)))))}


@pytest.mark.slow
def test_a_kept_row_is_a_run() -> None:
    """A run of a shipped config, made again, ends where its row says."""
    config = load_config(ROOT / "configs/flow/remedies_stale.yaml")
    found = run_of(config, 0, config.errors[0], CLIP, 16, np.inf)
    values = Remedies(kept()).cell("remedies-stale", CLIP, "reward", EXACT, 16)
    # 64 updates of Adam amplify rounding, and rows keep six digits.
    assert found["reward"][-1] == pytest.approx(values[0], abs=1e-3)
