"""Rows from files, one after the other: a file of any size is never in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lab.doctor.importers.bad_rows import Bad, Read
from lab.doctor.importers.format import Placed
from lab.files import disk_errors

PARQUET_ROWS = 32
"""Rows that are decoded at a time: of 30,000 tokens each they are some 100 MB as Python numbers."""


def read_jsonl(path: Path) -> Iterator[Read]:
    """The objects of a file, one per line, each with its place; a line that is none is Bad."""
    is_empty = True
    with disk_errors(path, "read"), path.open("rb") as file:
        for i, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = Bad(f"line {i}: expected a JSON object, got {error}")
            if not isinstance(row, (dict, Bad)):
                row = Bad(f"line {i}: expected a JSON object, got {type(row).__name__}")
            is_empty = False
            yield row, f"line {i}"
    if is_empty:
        raise ValueError("expected at least 1 row, got an empty file")


def read_parquet(path: Path) -> Iterator[Placed]:
    """The rows of a Parquet file, without their nulls; ValueError where pyarrow is missing or the file is none."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow: pip install 'firstorder[data]'") from error
    b = 0
    with disk_errors(path, "read"):
        opened = path.open("rb")
    try:
        with opened, pyarrow.parquet.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}, f"response {b}"
                    b += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"expected a Parquet file, got {' '.join(str(error).split())}") from error
    if b == 0:
        raise ValueError("expected at least 1 row, got none")
