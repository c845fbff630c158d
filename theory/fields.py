"""The description of a frozen dataclass's field, written once beside it: words, range and source.

    cap: Annotated[float, About("upper bound of the weight", gt=0)] = 2.0

`require_ranges` checks the ranges; the config schema, the comments of a printed config and the rules of a promotion are
derived from the same words, so that a new number is written in one place.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, get_type_hints


@dataclass(frozen=True)
class About:
    """Words for a field, the bounds of its values (None: no bound), and where a paper prints it."""

    words: str
    gt: int | float | None = None
    ge: int | float | None = None
    lt: int | float | None = None
    le: int | float | None = None
    source: str = ""

    @cached_property
    def bounds(self) -> dict[str, int | float]:
        """The bounds that are set, by the names of Python's comparisons: gt, ge, lt, le."""
        found = {name: getattr(self, name) for name in ("gt", "ge", "lt", "le")}
        return {name: bound for name, bound in found.items() if bound is not None}

    def allows(self, value: int | float) -> bool:
        """Whether the value is within all bounds; nan is within none."""
        return all(getattr(operator, name)(value, bound) for name, bound in self.bounds.items())

    def rule(self, name: str) -> str:
        """The bounds as a formula: `cap > 0`, `0 < w_min <= 1`."""
        low = {name: bound for name, bound in self.bounds.items() if name in ("gt", "ge")}
        high = {name: bound for name, bound in self.bounds.items() if name in ("lt", "le")}
        signs = {"gt": (">", "<"), "ge": (">=", "<="), "lt": ("<", "<"), "le": ("<=", "<=")}
        # A lower bound stands left of the name, with its sign turned round, where there is an upper one.
        right = "".join(f" {signs[key][0]} {bound:g}" for key, bound in high.items())
        if not right:
            return name + "".join(f" {signs[key][0]} {bound:g}" for key, bound in low.items())
        return "".join(f"{bound:g} {signs[key][1]} " for key, bound in low.items()) + name + right


@cache
def about(cls: type) -> dict[str, About]:
    """The described fields of a dataclass, in its order; a class that only changes a default keeps its base's words."""
    found: dict[str, About] = {}
    # Bases first, so that a subclass's own words replace theirs.
    for base in reversed(cls.__mro__):
        # `from __future__ import annotations` leaves strings, and get_type_hints drops Annotated unless told otherwise.
        hints = get_type_hints(base, include_extras=True) if "__annotations__" in vars(base) else {}
        for name in vars(base).get("__annotations__", {}):
            words = [word for word in getattr(hints[name], "__metadata__", ()) if isinstance(word, About)]
            found |= {name: words[0]} if words else {}
    return {field.name: found[field.name] for field in fields(cls) if field.name in found}


def require_ranges(part: Any, label: str = "") -> None:
    """Raises ValueError for the first number out of range: `{label or its name}: expected ..., got ...`."""
    for name, words in about(type(part)).items():
        value = getattr(part, name)
        # A value without bounds need not be a number: `betas` is a pair, and some fields may be None.
        if words.bounds and not words.allows(value):
            raise ValueError(f"{label or name}: expected {words.rule(name)}, got {value}")
