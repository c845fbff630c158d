"""Bounds as pairs of numbers: `BOUNDS` lists every inequality of the project by name.

Each function returns a `Bound` with lhs <= rhs. Its docstring has the statement, the proof, and where it is tight or
loose.
"""

from __future__ import annotations

from collections.abc import Callable

from theory.bounds import conditional, corrections, gradient, routing, steps, topk, weights
from theory.bounds.bound import Bound

BOUNDS: dict[str, Callable[..., Bound]] = {
    name: found
    for module in (routing, topk, steps, gradient, conditional, corrections, weights)
    for name, found in vars(module).items()
    if not name.startswith("_") and getattr(found, "__annotations__", {}).get("return") in ("Bound", Bound)
}
"""Every bound by name, as its module has it: a public function that returns a `Bound` of that name."""

__all__ = ["BOUNDS", "Bound"]
