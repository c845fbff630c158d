"""docs/exact-training-tables.md says what exact runs end at: a cell of each of its kinds of table, computed again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages.exact_training import (
    CASES,
    ERRORS,
    NUM_PROBLEMS,
    NUMBERS,
    PICTURE,
    REMEDIES,
    TITLES,
    cell,
    ends,
    problem,
    run,
)

pytestmark = pytest.mark.unchecked

PAGE = (Path(__file__).parents[2] / "docs" / "exact-training-tables.md").read_text()
FRONT = (Path(__file__).parents[2] / "docs" / "exact-training.md").read_text()
HEADS = [f"| {number} at the end | {' | '.join(TITLES[r] for r in REMEDIES)} |\n" for number in NUMBERS]


def row(number: str, reward: str, title: str) -> list[str]:
    """The cells of that row; tables of the sparse reward stand before those of the single one."""
    parts = PAGE.split(HEADS[NUMBERS.index(number)])
    part = parts[1 + list(CASES).index(reward)]
    (found,) = [line for line in part.split("\n\n")[0].splitlines() if line.startswith(f"| {title} |")]
    return found.strip("| ").split(" | ")[1:]


def test_the_page_has_every_run() -> None:
    """Each error has its row in the tables of each of its rewards, and the picture is there."""
    for reward, titles in CASES.items():
        for number in ("entropy", "reward"):
            for title in titles:
                assert len(row(number, reward, title)) == len(REMEDIES)
    assert f"images/{PICTURE.name}" in FRONT and PICTURE.exists()
    assert set(CASES["single"]) <= set(CASES["sparse"]) == set(ERRORS)


@pytest.mark.slow
def test_the_picture_names_the_ends_that_are_computed() -> None:
    """Beside each line stands where its run ends: the sharper engine without a weight, and the best reward."""
    drawn = re.findall(r">([^<>]*\S[^<>]*)</text>", PICTURE.read_text())
    again = run(ERRORS["sharper, logits x 1.3"], "none", 0)
    told = [float(words.rsplit(" ", 1)[1]) for words in drawn if words.startswith("no weight ")]
    # Both panels of entropy stand before those of reward, and the sharper engine on the right.
    assert told[1::2] == pytest.approx([again["entropy"][-1], again["reward"][-1]], abs=2e-3)
    assert f"best policy {problem(0)[0].optimum:.3f}" in drawn


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "number"), [("sparse", "entropy"), ("single", "reward")])
def test_the_page_holds_what_is_computed(reward: str, number: str) -> None:
    """The eight runs of a cell, made again: without a weight, under a sharper engine."""
    title = "sharper, logits x 1.3"
    again = cell([ends(title, "none", seed, reward) for seed in range(NUM_PROBLEMS)], number)
    # 200 updates of Adam carry rounding along; the third digit may be another machine's.
    assert float(again.split()[0]) == pytest.approx(float(row(number, reward, title)[0].split()[0]), abs=2e-3)
