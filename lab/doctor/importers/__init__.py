"""Traces from what other systems dump: one file a format, chosen by what the file is.

| file               | whose                                     | mu | old | experts        | module     |
|--------------------|-------------------------------------------|----|-----|----------------|------------|
| .safetensors       | ours (lab/traces.py has the schema)       | x  | x   | of both        |            |
| .jsonl, .parquet   | anyone's: a row a response (rows.py)      | x  | x   | of both        | rows.py    |
| .jsonl             | verl, `trainer.rollout_data_dir`          | +  | +   | + of mu        | verl.py    |
| .pt                | slime, `--save-debug-rollout-data`        | x  |     | x of mu        | slime.py   |
| .pt                | slime, `--save-debug-train-data`          | x  | x   | x of mu        | slime.py   |

x: as dumped; +: once a few lines are added to the trainer, which the error of a file without them says.
"""

from __future__ import annotations

from pathlib import Path

from lab.doctor.importers import rows, slime, verl
from lab.traces import Trace


def load_trace(path: Path) -> Trace:
    """The trace in a file of any known format; ValueError, with the file's name and the field, where there is none."""
    path = Path(path)
    suffix = path.suffix
    try:
        if suffix == ".pt":
            return slime.load(path)
        if suffix == ".parquet":
            return rows.load_parquet(path)
        if suffix == ".jsonl":
            lines, places = rows.read_jsonl(path)
            return verl.trace(lines, places) if verl.is_verl(lines) else rows.trace(lines, places)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if suffix == ".safetensors":
        return Trace.load(path)
    raise ValueError(f"{path}: expected a trace as .safetensors, .jsonl, .parquet or .pt, got {suffix or 'no suffix'}")


__all__ = ["load_trace"]
