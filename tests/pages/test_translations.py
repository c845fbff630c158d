"""docs/how-to/translate-a-recipe.md says of every preset and correction what the translations say."""

from __future__ import annotations

from tests.pages.translations import PAGE, page


def test_the_tables_are_the_translations() -> None:
    """Both tables, to the character."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text)
