"""Laws of the tokens behind the gradient's peaks, on updates made by hand."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from sandbox.border import peaks

NONE = pd.DataFrame(columns=["arm", "seed", "update", "norm"])


def _update(arm: str, seed: int, norm: float, without: float, gain: float = -1.0, ratio: float = 1.0) -> dict[str, Any]:
    logps = {"logp_mu": -1.0, "logp_old": -3.0, "logp_pi": -3.0 + math.log(ratio)}
    return {"arm": arm, "seed": seed, "update": 0, "norm": norm, "norm_without": without, "advantage": gain} | logps


def test_peaks_are_counted_by_the_share_of_one_token() -> None:
    """Norms above 1; one token has more than half; its advantage is negative; its ratio is above 3."""
    made = [
        _update(peaks.PLAIN, 1, 8.0, 3.9, ratio=50.0),  # a peak of one token with A < 0
        _update(peaks.PLAIN, 1, 4.0, 1.9, gain=2.0),  # of one token with A > 0
        _update(peaks.PLAIN, 2, 2.0, 1.1, ratio=3.1),  # of several
        _update(peaks.PLAIN, 2, 1.0, 0.1, ratio=9.0),  # no peak
        _update(peaks.DUAL, 1, 1.5, 0.2),
        _update(peaks.DUAL, 2, 0.3, 0.2),
    ]
    said = peaks.said(pd.DataFrame(made))
    assert "In 2 runs of R3, never clipped (exploratory), 3 of 4 updates have a norm above 1. In 2 of these one" in said
    assert "less than half. 1 of these tokens have a negative advantage, and 1 a ratio pi/old above 3." in said
    assert "In the median mu gives such a token 0.368, old 0.0498, and pi 7.07 times that." in said
    assert (
        "On the same seeds with a dual clip 1 of 2 norms are above 1; the largest norm is 1.5 with it and 8 without."
        in said
    )
    assert peaks.said(pd.DataFrame(made[:4])) == "" and peaks.said(NONE) == peaks.markdown(NONE) == ""


def test_the_picture_of_peaks_is_of_the_middle_run() -> None:
    """The seed whose largest norm is the median of the runs of R3 alone; both panels have one scale."""
    made = pd.DataFrame([_update(arm, seed, norm / less, 0.5) for arm, less in ((peaks.PLAIN, 1.0), (peaks.DUAL, 20.0))
                         for seed, norm in ((1, 9.0), (2, 3.0), (3, 2.0))])  # fmt: skip
    assert peaks.shown_seed(made) == 2 and "never clipped, seed 2." in peaks.markdown(made).replace("\n", " ")
    left, right = peaks.picture(made, 2).axes
    assert left.get_title() == "R3" and left.get_ylim() == right.get_ylim()
    assert [float(line.get_ydata()[0]) for line in left.lines[:2]] == [3.0, 0.5]  # pyright: ignore
