"""The one-line message for weights that do not fit a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def misshapen(name: str, expected: Sequence[int], tensor: Tensor) -> str | None:
    """The weight's name with both shapes, where its shape differs or its type is no float; else None."""
    if tuple(tensor.shape) == tuple(expected) and tensor.is_floating_point():
        return None
    return f"{name} (expected {tuple(expected)}, got {tuple(tensor.shape)} {str(tensor.dtype)[6:]})"


def misfits(problems: Mapping[str, Sequence[str]]) -> str:
    """`missing a, b; unexpected c and 7 more` for the kinds of problems with names; empty where none has any."""
    return "; ".join(f"{kind} {some(names)}" for kind, names in problems.items() if names)


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first `limit` names, and the number of the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
