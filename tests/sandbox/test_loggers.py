"""Lightning's loggers get what metrics.jsonl gets, under the same step numbers."""

from __future__ import annotations

import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lab.config.load import load
from sandbox.config import SandboxRun
from sandbox.run import run


def test_csv_and_tensorboard_hold_the_record(tmp_path):
    """Every metric of every row of metrics.jsonl stands in the CSV and TensorBoard logs at that row's step."""
    words = ["--output", str(tmp_path), "--logging.loggers", "[csv, tensorboard]"]
    folder = run(load("configs/smoke.yaml", words, {"sandbox": SandboxRun}), progress="none")
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]

    with open(folder.path / "csv" / "metrics.csv", newline="") as file:
        logged = {int(row["step"]): row for row in csv.DictReader(file)}
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    for row in rows:
        for name in row.keys() - {"step"}:
            assert float(logged[row["step"]][name]) == row[name], name
            scalars = {event.step: event.value for event in events.Scalars(name)}
            # TensorBoard keeps float32.
            assert scalars[row["step"]] == pytest.approx(row[name], rel=1e-6), name
