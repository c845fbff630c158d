"""Rows of a problem file as mappings, each with its place for messages: JSON Lines, Parquet, Arrow, `datasets` folders.

pyarrow and datasets are imported only for files that need them (`pip install 'firstorder[data]'`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, dict[str, Any]]
"""`path:number` (lines and rows count from 1), and the row."""

TABLES = (".parquet", ".arrow")
SAVED = "state.json"
"""The file that `datasets.save_to_disk` leaves in the folder of a split."""
SPLITS = "dataset_dict.json"
"""The file that it leaves in a folder of splits."""


def read_rows(path: str, example: str) -> Iterator[Row]:
    """The rows of a file or folder, by what it is.

    `.parquet` and `.arrow` files; a folder that `datasets.save_to_disk` wrote (of one split); a folder of Parquet or
    Arrow files, in the order of their names; any other file is JSON Lines. Raises ValueError in one line, beginning
    with the path, for what cannot be read; `example` is a row such as was expected.
    """
    place = Path(path)
    if place.suffix in TABLES and place.is_file():
        yield from _table_rows(place)
    elif place.is_dir():
        yield from _folder_rows(place)
    else:
        yield from read_lines(path, example)


def read_lines(path: str, example: str) -> Iterator[Row]:
    """The lines of a JSON Lines file; blank ones are skipped but counted."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: expected a JSON object such as {example}, got invalid JSON ({error})"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object such as {example}, got {short(row)}")
        yield where, row


def _lines(path: str) -> Iterator[bytes]:
    """The lines one by one, without their ends: a large file is never held whole."""
    try:
        with open(path, "rb") as file:
            for line in file:
                yield from line.splitlines()
    except OSError as error:
        raise ValueError(f"{path}: expected a file of problems, got: {error.strerror or error}") from error


def files(path: str) -> list[Path]:
    """The files that a problem file or folder consists of, by name; empty where there is none."""
    place = Path(path)
    return sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place] if place.is_file() else []


def short(value: Any) -> str:
    """The value's type and, on one line, its beginning."""
    text = json.dumps(value, default=str)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _folder_rows(folder: Path) -> Iterator[Row]:
    if (folder / SPLITS).is_file():
        splits = " or ".join(sorted(str(p.parent) for p in folder.glob(f"*/{SAVED}")))
        raise ValueError(
            f"{folder}: expected the folder of one split, {splits or 'of which it has none'}, got that of all"
        )
    if (folder / SAVED).is_file():
        yield from _saved_rows(folder)
        return
    tables = sorted(p for p in folder.iterdir() if p.suffix in TABLES)
    if not tables:
        raise ValueError(
            f"{folder}: expected a folder that datasets.save_to_disk wrote, or one of .parquet or .arrow files, "
            "got one without either"
        )
    for table in tables:
        yield from _table_rows(table)


def _saved_rows(folder: Path) -> Iterator[Row]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(_not_installed(folder, "datasets")) from error
    try:
        # Not pyarrow alone: the folder may hold a selection or an order of the rows beside them.
        rows = datasets.load_from_disk(str(folder)).with_format(None)
        for number, row in enumerate(rows, start=1):
            yield f"{folder}:{number}", dict(row)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder}: expected a folder that datasets.save_to_disk wrote, got: {_line(error)}"
        ) from error


def _table_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ValueError(_not_installed(path, "pyarrow")) from error
    try:
        table = pq.ParquetFile(path).read() if path.suffix == ".parquet" else _arrow_table(path, pa)
    except (OSError, pa.ArrowException) as error:
        kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
        raise ValueError(f"{path}: expected {kind} file, got: {_line(error)}") from error
    number = 0
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:{number}", row


def _arrow_table(path: Path, pa: Any) -> Any:
    """Arrow has two layouts under one suffix: `datasets` writes streams, most others write files."""
    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


def _not_installed(path: Path, package: str) -> str:
    return f"{path}: expected {package} to read it, which is not installed (pip install 'firstorder[data]')"


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
