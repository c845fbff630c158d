"""One error for every name looked up in a table: it says what came, the nearest valid name, and all of them.

`number` is its companion for values: a plain float, or an error that says what came.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Real


def nearest(name: str, options: Iterable[str]) -> str:
    """The option spelt most like `name` (Ratcliff-Obershelp similarity; the first of equals)."""
    return difflib.get_close_matches(name, list(options), n=1, cutoff=0.0)[0]


def unknown_name(kind: str, name: str, options: Iterable[str]) -> ValueError:
    """The error to raise where `name` is not one of the options of this kind."""
    options = list(options)
    return ValueError(
        f"unknown {kind} {name!r}: did you mean {nearest(name, options)!r}? (expected one of: {', '.join(options)})"
    )


def number(label: str, value: object) -> float:
    """The value as a float. Raises ValueError where it is no real number (a bool is none)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{label}: expected a number, got {value!r}")
    return float(value)


__all__ = ["nearest", "number", "unknown_name"]
