"""The section on runs of ten times the updates, on rows made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.border.longer import SMOOTH, longer_picture, markdown, path
from sandbox.border.pictures import svg
from sandbox.border.study import BorderStudy
from sandbox.claims.border_arms import longer, slower
from sandbox.claims.c70_half_the_rate_only_postpones import UPDATES
from sandbox.ledger.claim import Arm
from tests.sandbox.border.made import BORDER, rows


def _slow_and_long(arm: Arm) -> Arm:
    return longer(slower(arm), UPDATES)


def _long(gap: str, remedy: str, num: int, num_collapsed: int = 0) -> dict[str, Any]:
    return rows(gap, remedy, 8, num, num_collapsed, updates=UPDATES, changed=_slow_and_long)


def test_longer_runs_stand_beside_those_of_the_map() -> None:
    """Collapses of both lengths at one rate, the median update of the collapses, and the answer in words."""
    made = _long("r0.5", "none", 12, 11) | _long("r0.5", "R3", 12, 1) | _long("exact", "none", 12)
    made |= rows("r0.5", "none", 8, 20, 2, changed=slower) | rows("exact", "none", 8, 5, changed=slower)
    said = markdown(BorderStudy(made, BORDER))
    # Three evaluations of 500 updates until their mean is below half of 0.3: at 0.3, 0, 0, which is 0.1.
    assert "| no remedy | 2 of 20 | 11 of 12 | 1,000 | 0.025 (" in said and "| R3 | – | 1 of 12 | 1,000 |" in said
    assert "| an exact engine | 0 of 5 | 0 of 12 | – | 0.300 (" in said and "token TIS |" not in said
    flat = " ".join(said.split())
    assert (
        "only postpones the collapse: without a remedy 11 of 12 runs of 4,000 updates collapse, and 2 of 20 of 400."
        in flat
    )


def test_the_answer_turns_with_the_runs() -> None:
    """Where most runs without a remedy hold, and where a remedy does not, the words say so."""
    made = _long("r0.5", "none", 12, 5) | _long("r0.5", "R3", 12, 7) | _long("r0.5", "tis", 12)
    flat = " ".join(markdown(BorderStudy(made, BORDER)).split())
    assert "Most runs hold at half the rate: without a remedy 5 of 12 runs of 4,000 updates collapse." in flat
    assert markdown(BorderStudy(_long("r0.5", "none", 12, 5), BORDER)) == ""


def test_runs_that_ended_early_are_counted_apart() -> None:
    made = _long("r0.5", "none", 4, 1) | _long("r0.5", "R3", 4)
    last = next(row for row in reversed(made.values()) if "R3" not in row["arm"])
    last |= {"rules": ["non_finite"], "last_step": 200}
    flat = " ".join(markdown(BorderStudy(made, BORDER)).split())
    assert "| no remedy | – | 2 of 4 |" in flat
    words = "1 ended early, as a number overflowed: a collapse by the study's rule. By accuracy alone 1 collapse."
    assert words in flat and flat.count("alone") == 1


def test_the_kl_warns_where_its_rule_came_before_the_collapse() -> None:
    """Medians over the collapsed runs whose first rule is the KL's; a rule at the collapse or of a run that stood is no
    warning, and other arms are counted whatever their rule's place."""
    made = _long("r0.5", "none", 4, 3) | _long("r0.5", "R3", 5)
    bare = [row for row in made.values() if "R3" not in row["arm"]]
    # Collapsed from step 125 on; the last one stands.
    for row, step in zip(bare, (45, 65, 125, 5), strict=True):
        row |= {"rules": ["kl_blowup", "reward_fall"], "first_step": step}
    other = next(row for row in made.values() if "R3" in row["arm"])
    other |= {"rules": ["entropy_collapse", "kl_blowup"], "first_step": 7}
    flat = " ".join(markdown(BorderStudy(made, BORDER)).split())
    assert "in 2 of these 3 it stays above 0.5 nats per token (the verdict's rule) from update 440 on," in flat
    assert " on, 560 before the collapse (medians); of the 5 other runs in 1 (exploratory)." in flat
    assert "warns" not in markdown(BorderStudy(_long("r0.5", "none", 4, 3) | _long("r0.5", "R3", 5), BORDER))


def test_the_picture_has_a_panel_per_arm_and_a_trailing_mean() -> None:
    made = _long("r0.5", "none", 3, 2) | _long("r0.5", "tis", 3)
    text = svg(longer_picture(made, BORDER))
    assert "2 of 3 collapsed" in text and "0 of 3 collapsed" in text and ">token TIS<" in text
    row = {"num_steps": 500, "evaluations": [[2 * i, float(i % 7)] for i in range(40)]}
    x, level = path(row)
    assert x[-1] == 39 * 2 * 8
    values = np.array([i % 7 for i in range(40)], dtype=float)
    assert np.allclose(level, [values[max(0, i + 1 - SMOOTH) : i + 1].mean() for i in range(40)])
