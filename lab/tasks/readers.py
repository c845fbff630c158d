"""Rows of a problem file as mappings, each with its place for messages: JSON Lines, Parquet, Arrow, `datasets` folders.

pyarrow and datasets (the extra `data`) are imported only for files that need them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.extras import how_to_install
from lab.files import require_regular
from lab.strict import parse_json

Row = tuple[str, dict[str, Any]]
"""`path:number` (lines and rows count from 1), and the row."""

TABLES = (".parquet", ".arrow")
SAVED = "state.json"
"""The file that marks a folder of `datasets.save_to_disk` with one split."""
SPLITS = "dataset_dict.json"
"""The file that marks a folder of splits."""


def read_rows(path: str, example: str) -> Iterator[Row]:
    """The rows of a file or folder, by its kind.

    `.parquet` and `.arrow` files; a folder that `datasets.save_to_disk` wrote (of one split); a folder of Parquet or
    Arrow files, in the order of their names; any other file is JSON Lines. Raises ValueError in one line, beginning
    with the path, for anything unreadable; `example` is an expected row.
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
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(
                f"{where}: expected a JSON object such as {example}, got invalid JSON ({error})"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object such as {example}, got {short(row)}")
        yield where, row


def _lines(path: str) -> Iterator[bytes]:
    """The lines one by one, without line breaks: a large file is never held whole."""
    require_regular(Path(path))
    try:
        with open(path, "rb") as file:
            for line in file:
                # A file is iterated by \n; splitlines also takes \r\n and a lone \r for an end.
                yield from line.splitlines()
    except OSError as error:
        raise ValueError(f"{path}: expected a file of problems, got: {error.strerror or error}") from error


def files(path: str) -> list[Path]:
    """The files of a problem file or folder, sorted by name; empty where there is none."""
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
    # Checked first: datasets maps the files into memory, where a torn one ends the process by a signal.
    for table in sorted(folder.glob("*.arrow")):
        for _ in _arrow_batches(table):
            pass
    try:
        # Not pyarrow alone: the folder may also hold a selection or an order of the rows.
        rows = iter(datasets.load_from_disk(str(folder)).with_format(None))
    except Exception as error:  # a broken file makes datasets raise errors of any kind
        raise _not_saved(folder, error) from error
    number = 0
    while True:
        try:
            row = dict(next(rows))
        except StopIteration:
            return
        except Exception as error:
            raise _not_saved(folder, error) from error
        number += 1
        yield f"{folder}:{number}", row


def _not_saved(folder: Path, error: Exception) -> ValueError:
    return ValueError(f"{folder}: expected a folder that datasets.save_to_disk wrote, got: {first_line(error)}")


def _table_rows(path: Path) -> Iterator[Row]:
    number = 0
    for batch in (_parquet_batches if path.suffix == ".parquet" else _arrow_batches)(path):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:{number}", row


def _parquet_batches(path: Path) -> Iterator[Any]:
    """The rows of a Parquet file, 4096 at a time; ValueError for any other file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ValueError(_not_installed(path, "pyarrow")) from error
    try:
        for batch in pq.ParquetFile(path).iter_batches(4096):
            # Unchecked offsets of a damaged file could be read out of bounds.
            batch.validate(full=True)
            yield batch
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: expected a Parquet file, got: {first_line(error)}") from error


def _arrow_batches(path: Path) -> Iterator[Any]:
    """The rows of an Arrow file, in its own batches; ValueError for any other file.

    Read, not mapped into memory, where an offset beyond the end of a torn file would be a signal, not an error.
    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise ValueError(_not_installed(path, "pyarrow")) from error
    try:
        with pa.OSFile(str(path)) as source:
            for batch in _batches(source, pa):
                batch.validate(full=True)
                yield batch
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: expected an Arrow file, got: {first_line(error)}") from error


def _batches(source: Any, pa: Any) -> Iterator[Any]:
    """The batches of either Arrow layout under the one suffix: `datasets` writes streams, most others files."""
    try:
        file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        yield from pa.ipc.open_stream(source)
    else:
        for number in range(file.num_record_batches):
            yield file.get_batch(number)


def _not_installed(path: Path, package: str) -> str:
    return f"{path}: expected {package} to read it, which is not installed ({how_to_install('data')})"


def first_line(error: Exception) -> str:
    """An error's first line, or its type where it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
