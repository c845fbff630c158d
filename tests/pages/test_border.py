"""docs/border.md is computed from the kept rows."""

from __future__ import annotations

import re

import pytest

from tests.pages.border import DOCS, PART, block, page, pictures

pytestmark = pytest.mark.unchecked


def test_the_page_is_computed_from_the_rows() -> None:
    """The page is rebuilt to the letter from cells.jsonl without a run."""
    assert (DOCS / "border.md").read_text(encoding="utf-8") == page()


def test_the_readme_has_the_studys_numbers() -> None:
    """Between its marks the README says what the page's tables say, to the character."""
    assert PART.read() == block((DOCS / "border.md").read_text(encoding="utf-8"))


def test_the_pictures_hold_the_numbers_of_the_rows() -> None:
    """Every number that a picture prints is in the kept file; lines may differ by a matplotlib's or a font's width."""
    for name, text in pictures().items():
        kept = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert _texts(kept) == _texts(text) and len(_texts(text)) > 10


def _texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]*\S[^<>]*)</text>", svg)
