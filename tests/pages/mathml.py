"""Fenced `math` blocks as MathML, which browsers draw themselves: formulas need no script and no network."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """A display formula; the formatter that zensical.toml names for pymdownx.superfences."""
    return f'<div class="formula">{convert(source, display="block")}</div>'
