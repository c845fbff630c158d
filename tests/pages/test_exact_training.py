"""The picture of docs/exact-training.md shows the study that the page tells of."""

from __future__ import annotations

import re

import pytest

from tests.pages.exact_training import COLUMNS, PICTURE, REMEDIES, config, kept, run
from tests.pages.study import FRONT

pytestmark = pytest.mark.unchecked


def test_the_picture_names_the_ends_of_the_study() -> None:
    """Each label has the mean of the study's own last values, in the order of the panels."""
    drawn = re.findall(r">([^<>]*\S[^<>]*)</text>", PICTURE.read_text())
    ends = kept().groupby(["kind", "objective"])[list(COLUMNS)].mean()
    for remedy in REMEDIES:
        told = [float(words.rsplit(" ", 1)[1]) for words in drawn if re.fullmatch(rf"{remedy} [\d.]+", words)]
        means = [ends.loc[(error.kind, remedy), name] for name in COLUMNS for error in config().errors]
        # 150 updates of Adam amplify rounding, so the third digit may differ between machines.
        assert told == pytest.approx(means, abs=1e-3)
    assert f"best policy {kept()['optimum'].max():.3f}" in drawn
    assert f"images/{PICTURE.name}" in FRONT.read_text(encoding="utf-8")


def test_a_run_of_the_picture_is_one_of_the_study() -> None:
    """Observed at its end alone, a run ends where the study's row of the same problem, error and remedy does."""
    of = config(observe_every=150)
    (row,) = kept().query("problem == 3 and kind == 'sharper' and objective == 'no weight'").to_dict("records")
    again = run(of, 3, of.errors[1], "no weight")
    assert [again[name][-1] for name in COLUMNS] == pytest.approx([row[name] for name in COLUMNS], abs=2e-3)
