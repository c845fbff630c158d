"""The records of an audit: a folder with the config, what it ran on, audit.json with every row, and the page.

Until all rows are there they stand in cases.jsonl, a line a case, from which an audit that was killed goes on.
audit.json holds columns, not rows: {"name", "config_hash", "meaning": {column: words}, "columns": {column: [values]}}.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.audit.config import AuditConfig
from lab.audit.run import Rows
from lab.audit.table import COLUMNS, measures
from lab.config.load import config_hash, to_yaml
from lab.files import append_line, atomic_write, disk_errors, whole_lines
from lab.manifest import manifest
from lab.records import RunFolder

FILE, PAGE, CASES = "audit.json", "audit.html", "cases.jsonl"


def create(config: AuditConfig) -> RunFolder:
    """A new record folder, with the resolved config and what the audit runs on."""
    folder = RunFolder.create(Path(config.output), config.name, config_hash(config), datetime.now(UTC))
    folder.write_config(to_yaml(config))
    folder.write_manifest(manifest(config.seed))
    return folder


def resumable(config: AuditConfig) -> RunFolder | None:
    """The newest folder of this config, if its audit was cut short; None otherwise."""
    folders = sorted(
        p.parent for p in (Path(config.output) / config.name).glob(f"*Z-{config_hash(config)}/config.yaml")
    )
    return RunFolder(folders[-1]) if folders and not (folders[-1] / FILE).is_file() else None


def keep_case(folder: RunFolder, rows: Rows) -> None:
    """Adds the rows of the next case to cases.jsonl, and waits until the disk has them."""
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    append_line(folder.path / CASES, json.dumps(plain, allow_nan=False).encode())


def kept_cases(folder: RunFolder) -> list[Rows]:
    """The rows of each case in cases.jsonl, nan where null stands; ValueError with the line of a damaged one."""
    path, cases = folder.path / CASES, []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            rows = json.loads(line)
            if not isinstance(rows, list):
                raise TypeError("no list")
            cases.append([{k: math.nan if v is None else v for k, v in row.items()} for row in rows])
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected the rows of a case, got {line[:60]!r}") from error
    return cases


def to_json(frame: pd.DataFrame) -> str:
    """The frame as the text of audit.json; no data is null."""
    columns = {str(name): [_plain(value) for value in frame[name]] for name in frame}
    meaning = {name: COLUMNS[name] for name in columns if name in COLUMNS}
    return json.dumps({**frame.attrs, "meaning": meaning, "columns": columns}, allow_nan=False) + "\n"


def read(path: str | Path) -> pd.DataFrame:
    """The dataframe that an audit.json holds; ValueError with the file's name where it holds none."""
    path = Path(path)
    with disk_errors(path, "read"):
        text = path.read_text(encoding="utf-8")
    try:
        parts = json.loads(text)
        frame = pd.DataFrame(parts["columns"])
        frame.attrs |= {"name": parts["name"], "config_hash": parts["config_hash"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the records of an audit, got damaged ones ({error})") from error
    return _typed(frame)


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with missing numbers as nan, and draws as integers that may be missing."""
    routers = ("router_disagreement", "router_staleness")
    for name in ("asked_discrepancy", "asked_staleness", *routers, *measures(frame)):
        frame[name] = frame[name].astype("float64")
    frame["num_draws"] = frame["num_draws"].astype("Int64")
    return frame


def write(folder: RunFolder, frame: pd.DataFrame) -> Path:
    """Writes audit.json, which ends the audit; its path."""
    path = folder.path / FILE
    atomic_write(path, to_json(frame))
    (folder.path / CASES).unlink(missing_ok=True)
    return path


def newest(path: Path) -> Path | None:
    """The audit.json that a path means: of a record folder, or of the newest one inside; None where there is none."""
    if (path / FILE).is_file():
        return path / FILE
    inside = sorted(path.glob(f"*/{FILE}"))
    return inside[-1] if inside else None


def _plain(value: Any) -> Any:
    """A JSON value; what is missing or not finite is null."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)) else value


__all__ = [
    "FILE", "PAGE", "create", "keep_case", "kept_cases", "newest", "read", "resumable", "to_json", "write",
]  # fmt: skip
