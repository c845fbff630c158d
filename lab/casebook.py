"""Records of a case-by-case enumeration: a folder with config, manifest, one JSON file of columns, and a page.

Until all cases are done, cases.jsonl holds their rows, one line per case, from which a killed study continues. The
JSON file holds columns, not rows: {"name", "config_hash", "meaning": {column: words}, "columns": {column: [values]}}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd
from pydantic import BaseModel

from lab.config.load import config_hash, to_yaml
from lab.files import append_line, atomic_write, disk_errors, whole_lines
from lab.manifest import manifest
from lab.records import RunFolder
from lab.strict import parse_json

CASES = "cases.jsonl"

Rows = list[dict[str, Any]]
"""The rows of one case."""


@runtime_checkable
class Recorded(Protocol):
    """A config that says where its records go."""

    @property
    def name(self) -> str: ...
    @property
    def output(self) -> str: ...
    @property
    def seed(self) -> int: ...


def create(config: Recorded) -> RunFolder:
    """A new record folder, with the resolved config and what it runs on."""
    assert isinstance(config, BaseModel)
    folder = RunFolder.create(Path(config.output), config.name, config_hash(config), datetime.now(UTC))
    folder.write_config(to_yaml(config))
    folder.write_manifest(manifest(config.seed))
    return folder


def resumable(config: Recorded, file: str) -> RunFolder | None:
    """The newest folder of this config if it was cut short, so lacks `file`; None otherwise."""
    assert isinstance(config, BaseModel)
    newest = RunFolder.find_newest(Path(config.output), config.name, config_hash(config))
    return None if newest is None or (newest.path / file).is_file() else newest


def keep_case(folder: RunFolder, rows: Rows) -> None:
    """Adds the rows of the next case to cases.jsonl, and waits until the disk has them.

    In the notation of Python's json, which has NaN and Infinity: only a continued study reads them, to the same bits.
    """
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    append_line(folder.path / CASES, json.dumps(plain).encode())


def kept_cases(folder: RunFolder) -> list[Rows]:
    """The rows of each case in cases.jsonl, with NaN for null; ValueError names a damaged line."""
    path, cases = folder.path / CASES, []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            rows = parse_json(line)
            if not isinstance(rows, list):
                raise TypeError("no list")
            cases.append([{k: math.nan if v is None else v for k, v in row.items()} for row in rows])
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected the rows of a case, got {line[:60]!r}") from error
    return cases


def read(path: str | Path, kind: str) -> pd.DataFrame:
    """The dataframe in a JSON file of columns; ValueError names a file without the records of `kind`."""
    path = Path(path)
    with disk_errors(path, "read"):
        data = path.read_bytes()
    try:
        parts = parse_json(data)
        frame = pd.DataFrame(parts["columns"])
        frame.attrs |= {"name": parts["name"], "config_hash": parts["config_hash"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the records of {kind}, got damaged ones ({error})") from error
    if frame.empty:
        raise ValueError(f"{path}: expected the records of {kind}, got no rows")
    return frame


def write(folder: RunFolder, file: str, frame: pd.DataFrame, meanings: Mapping[str, str]) -> Path:
    """Writes the frame as the JSON file, which marks the study as done; its path.

    Missing values are null. JSON has no infinity, so it stands as the text "inf" or "-inf", which `float` reads.
    """
    path = folder.path / file
    columns = {str(name): [_worded(_plain(value)) for value in frame[name]] for name in frame}
    meaning = {name: meanings[name] for name in columns if name in meanings}
    atomic_write(path, json.dumps({**frame.attrs, "meaning": meaning, "columns": columns}, allow_nan=False) + "\n")
    # Only now: until the JSON file is whole, the cases are all that a killed study continues from.
    (folder.path / CASES).unlink(missing_ok=True)
    return path


def newest(path: Path, file: str) -> Path | None:
    """The `file` in the record folder at `path`, or in the newest one inside it; None where there is none."""
    if (path / file).is_file():
        return path / file
    inside = sorted(path.glob(f"*/{file}"))
    return inside[-1] if inside else None


def _plain(value: Any) -> Any:
    """The value as one of Python's own; None where it is missing."""
    return None if value is pd.NA else value.item() if isinstance(value, np.generic) else value


def _worded(value: Any) -> Any:
    """The value for JSON: None for nan, and text for an infinity."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)
