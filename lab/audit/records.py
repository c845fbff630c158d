"""The records of an audit, as in lab/casebook.py: audit.json has all rows, audit.html is the page."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lab import casebook
from lab.audit.table import COLUMNS, measures
from lab.records import RunFolder

FILE, PAGE = "audit.json", "audit.html"


def read(path: str | Path) -> pd.DataFrame:
    """The dataframe in an audit.json; ValueError with the file's name if it has none."""
    frame = casebook.read(path, "an audit")
    # A column of nulls alone comes back as objects; `num_draws` has nullable integers, as in `audit`.
    routers = ("router_disagreement", "router_staleness")
    for name in ("asked_discrepancy", "asked_staleness", *routers, *measures(frame)):
        frame[name] = frame[name].astype("float64")
    frame["num_draws"] = frame["num_draws"].astype("Int64")
    return frame


def write(folder: RunFolder, frame: pd.DataFrame) -> Path:
    """Writes audit.json, whose presence marks the audit as finished; its path."""
    return casebook.write(folder, FILE, frame, COLUMNS)
