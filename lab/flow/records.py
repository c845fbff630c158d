"""The records of a flow: those of lab/casebook.py, with flow.json for all rows and flow.html for the page."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

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
    for name in COLUMNS:
        column = frame[name]
        is_name = name in ("error", "kind", "objective")
        if is_name and not column.map(lambda value: isinstance(value, str)).all():
            raise ValueError(f"{path}: {name}: expected a text in every row, got {column.tolist()[0]!r} in the first")
        if name not in WORDS:
            try:
                frame[name] = column.astype("float64")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: {name}: expected numbers, got others ({error})") from error
    for name in ("reward", "entropy"):
        if not np.isfinite(frame[name]).all():
            got = frame[name][~np.isfinite(frame[name])].iloc[0]
            raise ValueError(f"{path}: {name}: expected finite numbers, got {got}")
    # Older records have null for an infinity: B's, for no noise, and that of a mu that never takes what old does. A
    # policy that is itself nan has no KL either way, and its nulls are nan.
    is_inf = frame["kl_old_mu"].isna() & frame["kl_mu_old"].notna()
    restored = frame.assign(B=frame["B"].fillna(math.inf), kl_old_mu=frame["kl_old_mu"].mask(is_inf, math.inf))
    restored.attrs = dict(frame.attrs)  # pandas does not promise to keep them
    return restored


def write(folder: RunFolder, frame: pd.DataFrame) -> Path:
    """Writes flow.json, which marks the flow as done, and returns its path."""
    return casebook.write(folder, FILE, frame, COLUMNS)
