"""docs/bounds.md has the library's numbers: some rows of its tables are computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pages.bounds import CUT_NAMES, GAP_NAMES, cut_row, gap_row
from theory.bounds import BOUNDS

pytestmark = pytest.mark.unchecked

PAGE = (Path(__file__).parents[2] / "docs" / "bounds.md").read_text()


def row(names: tuple[str, ...], key: str) -> list[float]:
    """The cells of the row with that first cell, in the table with these columns."""
    after = PAGE.split(f" | {' | '.join(names)} |\n")
    found = [line for part in after[1:] for line in part.split("\n\n")[0].splitlines() if line.startswith(f"| {key} |")]
    assert len(found) == 1, (key, found)
    return [float(cell) for cell in found[0].strip("| ").split(" | ")[1:]]


@pytest.mark.parametrize(
    ("names", "key", "again"),
    [
        (GAP_NAMES, "2", lambda: gap_row("tabular", 2, 1e-3, "sparse")),
        (CUT_NAMES, "2, 0.1", lambda: cut_row(2, 0.1)),
    ],
)
def test_the_page_holds_what_is_computed(names: tuple[str, ...], key: str, again: Callable[[], str]) -> None:
    """The medians over all of a row's policies are those on the page, to its two digits."""
    computed = [float(cell) for cell in again().split(" | ")]
    # Two digits are rounded by up to one in the second, 10% at worst: another machine may round the other way.
    assert row(names, key) == pytest.approx(computed, rel=0.11)


def test_the_page_names_every_bound_of_the_gap_and_of_cuts() -> None:
    """Each bound of these modules is described on the page by its name."""
    for name, function in BOUNDS.items():
        if function.__module__.split(".")[-1] in ("steps", "gradient", "conditional", "weights", "corrections"):
            assert f"`{name}`" in PAGE, name
