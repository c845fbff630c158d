"""The pictures and the map of docs/border.md are those of the kept rows."""

from __future__ import annotations

import re

import pytest

from tests.pages.border import DOCS, map_to_click, pictures

pytestmark = pytest.mark.unchecked


def test_the_pictures_hold_the_numbers_of_the_rows() -> None:
    """Every number that a picture prints is in the kept file; lines may differ by a matplotlib's or a font's width."""
    for name, text in pictures().items():
        kept = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert _texts(kept) == _texts(text) and len(_texts(text)) > 10


def test_the_map_to_click_has_the_runs_of_the_rows() -> None:
    assert (DOCS / "border-map.html").read_text(encoding="utf-8") == map_to_click()


def _texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]*\S[^<>]*)</text>", svg)
