"""Laws of the diagrams and the table of a regime in which runs collapse: all its runs are there, and counted right."""

from __future__ import annotations

from statistics import fmean

import pytest

from sandbox.claims import CLAIMS, REGIMES
from sandbox.claims.border_arms import at
from sandbox.ledger import outcomes
from sandbox.ledger.cells import finished, key
from sandbox.ledger.course import area, collapsed
from sandbox.ledger.figures import maps
from tests.pages.ledger import kept

(BORDER,) = outcomes.own_regimes(CLAIMS, REGIMES)
SEEDS = sorted({seed for claim in CLAIMS for seed in claim.seeds(BORDER.name)})


def test_every_run_that_a_claim_compares_is_shown() -> None:
    """Each arm of a prediction at home in `border` is a cell of a diagram, or a line of the table with its claim."""
    titles = {figure.title for figure in outcomes.diagrams(CLAIMS, BORDER, kept())}
    found = maps(CLAIMS, BORDER.name) | maps(CLAIMS)
    drawn = {key(BORDER, one, 0) for title in titles for one in found[title].values()}
    told = {line["name"]: line["claims"] for line in outcomes.others(CLAIMS, BORDER, kept())}
    own = [claim for claim in CLAIMS if claim.home == BORDER.name]
    arms = [(claim.number, one) for claim in own for prediction in claim.predictions for one in prediction.arms]
    left = [(number, one) for number, one in arms if key(BORDER, one, 0) not in drawn]
    names = {key(BORDER, one, 0): one.name for _, one in left}
    assert len(own) > 40 and len(drawn) > 150 and {*names.values()} <= {one.name for _, one in left}
    by_claim = {number for numbers in told.values() for number in numbers}
    assert {number for number, _ in left} <= by_claim and len(told) == len(names)
    # The same objective under the regime's own engine is the last row of GRPO's diagrams, and not drawn again.
    assert "GRPO" not in titles and "MiniRL" in titles


@pytest.mark.parametrize(("remedy", "n"), [("none", 8), ("R3", 16)])
def test_a_cell_has_its_runs(remedy: str, n: int) -> None:
    """Its text is the mean accuracy with the collapses below it, its colour the share without, over every seed."""
    runs = finished(BORDER, at("r0.5", remedy, n), SEEDS, kept())
    title = {"none": "GRPO, no remedy", "R3": "GRPO, R3"}[remedy]
    (figure,) = (one for one in outcomes.diagrams(CLAIMS, BORDER, kept()) if one.title == title)
    cells = figure.data[0]
    y, x = cells["y"].index("FP8, noise 0.5"), cells["x"].index(f"N = {n}")
    fell = sum(map(collapsed, runs))
    assert 0 < fell < len(runs)
    assert cells["text"][y][x] == f"{fmean(map(area, runs)):.2f}<br>{fell:.0f}/{len(runs)}"
    assert cells["z"][y][x] == pytest.approx(1 - fell / len(runs))
    assert cells["y"] == [row for row in ("exact", "FP8", *(f"FP8, noise {s}" for s in (0.1, 0.2, 0.3, 0.5)))
                          if row != "exact" or remedy == "none"]  # fmt: skip


def test_without_runs_nothing_is_drawn() -> None:
    """A ledger that has not run has neither diagram nor line."""
    assert outcomes.diagrams(CLAIMS, BORDER, {}) == [] == outcomes.others(CLAIMS, BORDER, {})
