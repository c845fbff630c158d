"""Rows from files, one at a time: no file is ever in memory as a whole.

Errors name the file, as one dump may be read from two (`--old`).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from lab.doctor.importers.bad_rows import Bad, Read
from lab.doctor.importers.format import Placed
from lab.extras import how_to_install
from lab.files import disk_errors

PARQUET_ROWS = 32
"""Rows decoded at a time: with 30,000 tokens each, about 100 MB as Python numbers."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses the cycle collector: rows are millions of small lists without cycles, and scanning them dominates."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_jsonl(path: Path) -> Iterator[Read]:
    """The JSON objects of a file, one per line, each with its place; any other line is Bad."""
    is_empty = True
    with disk_errors(path, "read"), path.open("rb") as file:
        for i, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = _object(line)
            except (ValueError, RecursionError) as error:
                row = Bad(f"line {i}: expected a JSON object, got invalid JSON ({error})")
            if not isinstance(row, (dict, Bad)):
                row = Bad(f"line {i}: expected a JSON object, got {type(row).__name__}")
            is_empty = False
            yield row, f"line {i}"
    if is_empty:
        raise ValueError(f"{path}: expected at least 1 row, got an empty file")


def _object(line: bytes) -> Any:
    """The value of a line of JSON; ValueError in the words of `json` if it is invalid."""
    try:
        return from_json(line)  # two to six times as fast, and stricter: it refuses lone surrogates
    except ValueError:
        return json.loads(line)


def read_parquet(path: Path) -> Iterator[Placed]:
    """The rows of a Parquet file without their nulls; ValueError if pyarrow is missing or it is no Parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"Parquet needs pyarrow: {how_to_install('data')}") from error
    b = 0
    with disk_errors(path, "read"):
        opened = path.open("rb")
    try:
        with opened, pyarrow.parquet.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for row in _rows_of(batch):
                    yield {name: value for name, value in row.items() if value is not None}, f"response {b}"
                    b += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, got {' '.join(str(error).split())}") from error
    if b == 0:
        raise ValueError(f"{path}: expected at least 1 row, got none")


def _rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch as Python values; routes (lists of lists of lists of ints) become arrays."""
    # Routes are most of a row's numbers: as Python lists, those of a batch would take gigabytes.
    routed = [name for name in batch.schema.names if _is_routes(batch.schema.field(name).type)]
    for b, row in enumerate(batch.drop_columns(routed).to_pylist()):
        yield row | {name: _array(batch.column(name)[b]) for name in routed}


def _is_routes(kind: Any) -> bool:
    import pyarrow.types as types

    for _ in range(3):
        if not (types.is_list(kind) or types.is_large_list(kind)):
            return False
        kind = kind.value_type
    return bool(types.is_integer(kind))


def _array(value: Any) -> Any:
    """One response's routes as an array (rows, layers, slots); as nested lists if these are ragged or hold nulls."""
    rows = value.values
    if rows is None or len(rows) == 0:
        return value.as_py()
    layers = rows.flatten()
    # Means, not yet sizes: `is_even` asks every list to be as long, which a fraction never is.
    L, K = len(layers) / len(rows), len(flat := layers.flatten()) / max(1, len(layers))
    # flatten() drops the offsets, so a reshape is right only if every list has the same length.
    is_even = all(
        lists.null_count == 0 and bool((np.diff(lists.offsets.to_numpy()) == size).all())
        for lists, size in ((rows, L), (layers, K))
    )
    if not is_even or flat.null_count:
        return value.as_py()
    return flat.to_numpy().reshape(len(rows), int(L), int(K)).copy()  # the buffer is read-only
