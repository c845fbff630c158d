"""The picture of docs/exact-training.md labels the ends of its runs."""

from __future__ import annotations

import re

import pytest

from tests.pages.exact_training import NUM_UPDATES, PICTURE, SHARPER, problem, run
from tests.pages.study import FRONT

pytestmark = pytest.mark.unchecked


@pytest.mark.slow
def test_the_picture_names_the_ends_that_are_computed() -> None:
    """The labels have the computed ends of the run under the sharper engine without a weight, and the best reward."""
    drawn = re.findall(r">([^<>]*\S[^<>]*)</text>", PICTURE.read_text())
    again = run(SHARPER, "none", NUM_UPDATES)
    told = [float(words.rsplit(" ", 1)[1]) for words in drawn if words.startswith("no weight ")]
    # The entropy panels come before the reward panels, the sharper engine on the right. 200 updates of Adam amplify
    # rounding, so the third digit may differ between machines.
    assert told[1::2] == pytest.approx([again["entropy"][-1], again["reward"][-1]], abs=2e-3)
    assert f"best policy {problem()[0].optimum:.3f}" in drawn
    assert f"images/{PICTURE.name}" in FRONT.read_text(encoding="utf-8")
