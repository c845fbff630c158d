"""One error for every name looked up in a table: it says what came, the nearest valid name, and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str]) -> str:
    """The option spelt most like `name` (Ratcliff-Obershelp similarity; the first of equals)."""
    return difflib.get_close_matches(name, list(options), n=1, cutoff=0.0)[0]


def unknown_name(kind: str, name: str, options: Iterable[str]) -> ValueError:
    """The error to raise where `name` is not one of the options of this kind."""
    options = list(options)
    return ValueError(
        f"unknown {kind} {name!r}: did you mean {nearest(name, options)!r}? (expected one of: {', '.join(options)})"
    )


__all__ = ["nearest", "unknown_name"]
