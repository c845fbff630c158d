"""One error for every name looked up in a table: it gives the name, the nearest valid one, and all of them.

`number` does the same for values: a plain float, or an error with the value. `listed` fills a table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, TypeVar

Named = TypeVar("Named")

ALIKE = 0.5
"""The Ratcliff-Obershelp similarity, in [0, 1], from which one name may be meant for another."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`did you mean 'R3'?`: the option spelt most like `name`, the first of equals; empty where none is similar."""
    found = difflib.get_close_matches(name, list(options), n=1, cutoff=ALIKE)
    return f"did you mean {found[0]!r}?" if found else ""


def unknown_name(kind: str, name: str, options: Iterable[str]) -> ValueError:
    """The error to raise where `name` is not one of the options of this kind."""
    options = list(options)
    hint = did_you_mean(name, options)
    return ValueError(f"unknown {kind} {name!r}{hint and f': {hint}'} (expected one of: {', '.join(options)})")


def listed(table: dict[str, Any]) -> Callable[[Named], Named]:
    """Decorator that enters an object into the table under its `name`; AssertionError where the name is taken."""

    def add(named: Named) -> Named:
        # The object's own name: a class that forgot to set one must not take its base's place.
        name = vars(named)["name"]
        assert name not in table, f"two things are called {name!r}"
        table[name] = named
        return named

    return add


def number(label: str, value: object) -> float:
    """The value as a float. Raises ValueError where it is not a real number (a bool is not)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{label}: expected a number, got {value!r}")
    return float(value)
