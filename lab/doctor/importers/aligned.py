"""Rows with a value for every token, prompt included: the prompt ends where the first token was sampled.

Letters: S tokens of a row, P of its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.doctor.importers.format import Row


def listed(raw: Row, name: str, place: str, size: int | None = None) -> list[Any]:
    """The list in a field; ValueError with place and field if it is no list, or does not have `size` values."""
    values = raw.get(name)
    if values is None:
        raise ValueError(f"{place}: {name}: missing; the row has {', '.join(map(str, raw))}")
    if not isinstance(values, list):
        raise ValueError(f"{place}: {name}: expected a list, got {type(values).__name__}")
    if size is not None and len(values) != size:
        raise ValueError(f"{place}: {name}: expected {size} values, one per token, got {len(values)}")
    return values


def mask_of(raw: Row, name: str, place: str, size: int | None = None) -> list[bool]:
    """The list in a field (`listed`) as a mask."""
    return masked(listed(raw, name, place, size), name, place)


def masked(values: list[Any], name: str, place: str) -> list[bool]:
    """The values as a mask; ValueError for anything but 0, 1, true and false."""
    for at, value in enumerate(values):
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"{place}: {name}.{at}: expected 0 or 1, got {value!r}")
    return [bool(value) for value in values]


def unprompted(tokens: list[Any], is_sampled: list[bool], columns: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The row of rows.py from S tokens, a mask of those that mu sampled, and columns of S values.

    P is the place of the first sampled token: at least 1, and S if none was sampled.
    """
    # Place 0 follows no token, so it has no prediction: it is prompt whatever the mask says.
    P = next((at for at, is_one in enumerate(is_sampled) if is_one and at > 0), len(tokens))
    row = {"tokens": tokens, "num_prompt": P, "is_response": is_sampled[P:]}
    return row | {name: values[P:] for name, values in columns.items()}
