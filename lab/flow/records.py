"""The records of a flow: those of lab/casebook.py, with flow.json for all rows and flow.html for the page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab import casebook
from lab.flow.table import COLUMNS
from lab.records import RunFolder

FILE, PAGE = "flow.json", "flow.html"
WORDS = ("problem", "error", "kind", "objective")
"""Columns that are no measures: names, and the number of a problem."""


def read(path: str | Path) -> pd.DataFrame:
    """The dataframe that a flow.json holds; ValueError names a file that holds none."""
    frame = casebook.read(path, "a flow")
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise ValueError(f"{path}: expected the records of a flow, got none of {', '.join(missing)}")
    for name in (name for name in COLUMNS if name != "problem"):
        frame[name] = _checked(frame[name].tolist(), name, path)
    # Older records have null for an infinity: B's, for no noise, and that of a mu that never takes what old does. A
    # policy that is itself nan has no KL either way, and its nulls are nan.
    is_inf = frame["kl_old_mu"].isna() & frame["kl_mu_old"].notna()
    restored = frame.assign(B=frame["B"].fillna(math.inf), kl_old_mu=frame["kl_old_mu"].mask(is_inf, math.inf))
    restored.attrs = dict(frame.attrs)  # pandas does not promise to keep them
    return restored


def _checked(values: list[Any], name: str, path: str | Path) -> NDArray[Any]:
    """The values of a column: texts or float64; ValueError for any others, and for an end that no table can show."""
    if name in WORDS:
        others = [value for value in values if not isinstance(value, str)]
        if others:
            raise ValueError(f"{path}: {name}: expected a text in every row, got {others[0]!r}")
        return np.array(values, dtype=object)
    try:
        numbers = np.array(values, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {name}: expected numbers, got others ({error})") from error
    if name in ("reward", "entropy") and not np.isfinite(numbers).all():
        raise ValueError(f"{path}: {name}: expected finite numbers, got {numbers[~np.isfinite(numbers)][0]}")
    return numbers


def write(folder: RunFolder, frame: pd.DataFrame) -> Path:
    """Writes flow.json, which marks the flow as done, and returns its path."""
    return casebook.write(folder, FILE, frame, COLUMNS)
