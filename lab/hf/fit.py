"""The one-line message for weights that do not fit a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def misshapen(name: str, expected: Sequence[int], tensor: Tensor) -> str | None:
    """The weight with both shapes where its own is another or its numbers are no floats, else None."""
    if tuple(tensor.shape) == tuple(expected) and tensor.is_floating_point():
        return None
    return f"{name} (expected {tuple(expected)}, got {tuple(tensor.shape)} {str(tensor.dtype)[6:]})"


def misfits(problems: Mapping[str, Sequence[str]]) -> str:
    """`missing a, b; unexpected c and 7 more` for the kinds of problems that have names; empty where none has."""
    return "; ".join(f"{kind} {some(names)}" for kind, names in problems.items() if names)


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
