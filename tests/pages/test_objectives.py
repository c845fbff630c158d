"""docs/objectives.md is what the library prints."""

from __future__ import annotations

from pathlib import Path

from tests.pages.objectives import page


def test_the_page_is_what_describe_prints() -> None:
    """Every preset's composition and every correction's formula stand on the page to the character."""
    assert (Path(__file__).parents[2] / "docs" / "objectives.md").read_text() == page()
