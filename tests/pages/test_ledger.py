"""The picture of docs/ledger.md has today's verdicts, and a phone shows its numbers."""

from __future__ import annotations

import re

import pytest

from sandbox.claims import CLAIMS
from tests.pages.ledger import COUNTS, PICTURE, found, picture
from tests.pages.study import ROOT

pytestmark = pytest.mark.unchecked
KEPT = PICTURE.read_text(encoding="utf-8")
PHONE = 360
"""Pixels that a phone of 400 leaves to a picture."""


def test_the_picture_has_a_tile_for_each_claim() -> None:
    """The stored one has the words and numbers of today's verdicts, every claim below the words of its own."""
    texts = _texts(KEPT)
    assert texts == _texts(picture())
    tiled = [int(text) for text in texts if text.isdigit()]
    assert sorted(tiled) == sorted(claim.number for claim in CLAIMS)
    words = {one.claim.number: one.word for one in found() if one.decides}
    said = ""
    for text in texts:
        said = said if text.isdigit() else text.partition(" ")[2]
        if text.isdigit() and said != "out of reach":
            assert words[int(text)] == ("inconclusive" if said == "tried again" else said)


def test_the_page_begins_with_it_and_its_counts() -> None:
    """Before the verdicts' words; who cannot see it reads the counts, which are those of its own words."""
    page = COUNTS.page.read_text(encoding="utf-8")
    ((alt, path),) = re.findall(r"!\[([^]]*)\]\(([^)]*)\)", page)
    assert COUNTS.page.parent / path == PICTURE and len(page.partition("![")[0].splitlines()) < 10
    labels = [text for text in _texts(KEPT) if not text.isdigit()]
    assert alt == f"{len(CLAIMS)} claims, a tile each: {', '.join(labels)}"
    assert PICTURE.is_relative_to(ROOT / "docs/images")


def test_a_phone_shows_its_numbers() -> None:
    """The smallest letters are 10 pixels high or more where the picture is as wide as a phone."""
    ((width, height),) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', KEPT)
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", KEPT)]
    assert len(sizes) > len(CLAIMS) and min(sizes) * PHONE / float(width) >= 10
    assert float(height) < 1.3 * float(width)


def _texts(svg: str) -> list[str]:
    return re.findall(r">([^<>]*\S[^<>]*)</text>", svg)
