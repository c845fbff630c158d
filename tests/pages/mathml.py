"""Fenced `math` blocks as MathML, which browsers draw themselves: formulas need no script and no network."""

from __future__ import annotations

import re
from typing import Any


def fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """A display formula; the formatter that zensical.toml names for pymdownx.superfences."""
    # Here, since the tests of `spelled_out` run without the packages of the site.
    from latex2mathml.converter import convert

    return f'<div class="formula">{convert(spelled_out(source), display="block")}</div>'


def spelled_out(source: str) -> str:
    r"""TeX with what TeX adds by itself and latex2mathml leaves out.

    That is a limit below \sum or \prod, not beside it, and a thin space on both sides of \log.
    """
    below = re.sub(r"\\(sum|prod)(?=[_^])", r"\\\1\\limits", source)
    before = re.sub(r"(?<=[\w}])\s*\\log\b", r"\\,\\log", below)
    return re.sub(r"\\log\b\s*(?=\\(?!left)|\w)", r"\\log\\,", before)
