"""The pictures and the map of docs/border.md are those of the kept rows."""

from __future__ import annotations

import re

import pytest

from tests.pages.border import DOCS, map_to_click, pictures, tables

pytestmark = pytest.mark.unchecked


def test_the_pictures_hold_the_numbers_of_the_rows() -> None:
    """Every number that a picture prints is in the kept file; lines may differ by a matplotlib's or a font's width."""
    for name, text in pictures().items():
        kept = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert _texts(kept) == _texts(text) and len(_texts(text)) > 10


def test_the_map_to_click_has_the_runs_of_the_rows() -> None:
    assert (DOCS / "border-map.html").read_text(encoding="utf-8") == map_to_click()


def test_the_tables_are_those_of_the_rows() -> None:
    assert (DOCS / "border-tables.md").read_text(encoding="utf-8") == tables()


def test_the_page_is_four_printed_pages() -> None:
    """At most 2,000 words without the tables, and every section of the tables that it links is there."""
    text = (DOCS / "border.md").read_text(encoding="utf-8")
    assert len([word for line in text.splitlines() if not line.startswith("|") for word in line.split()]) <= 2000
    heads = re.findall(r"^## (.*)$", (DOCS / "border-tables.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 ]", "", head.lower()).replace(" ", "-") for head in heads}
    linked = re.findall(r"border-tables\.md#([a-z0-9-]+)", text)
    assert len(linked) > 5 and set(linked) <= anchors


def test_no_star_of_a_symbol_begins_italics() -> None:
    """A paragraph with two bare x* would have what stands between them in italics."""
    for name in ("border.md", "border-tables.md"):
        for paragraph in re.split(r"\n\s*\n", (DOCS / name).read_text(encoding="utf-8")):
            bare = re.sub(r"`[^`]*`", "", paragraph)
            assert paragraph.startswith("|") or bare.count("x*") < 2, paragraph


def _texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]*\S[^<>]*)</text>", svg)
