"""Lightning's loggers get what metrics.jsonl gets, under the same step numbers."""

from __future__ import annotations

import csv
import re
import resource
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from firstorder.cli import main
from lab.config.load import load
from lab.files import TEMPORARY
from lab.loggers import CsvLogger
from lab.records import RunFolder
from sandbox.config import SandboxRun
from sandbox.run import run

CONFIG = Path("configs/smoke.yaml").resolve()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunFolder:
    """A run that both loggers took whole."""
    words = ["--output", str(tmp_path_factory.mktemp("whole")), "--logging.loggers", "[csv, tensorboard]"]
    return run(load(str(CONFIG), words, {"sandbox": SandboxRun}), progress="none")


def in_csv(folder: RunFolder) -> dict[int, dict[str, float]]:
    """The rows of the CSV file by their step, without empty cells."""
    with open(folder.path / "csv" / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    return {int(row.pop("step")): row for row in rows}


def in_tensorboard(folder: RunFolder) -> dict[int, dict[str, float]]:
    """The same of the event files, as their viewer reads them; an event that came again counts once."""
    events, found = EventAccumulator(str(folder.path / "tensorboard")).Reload(), {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def in_record(folder: RunFolder) -> dict[int, dict[str, float]]:
    """The same of metrics.jsonl."""
    return {row["step"]: {name: value for name, value in row.items() if name != "step"} for row in folder.metrics()}


def test_csv_and_tensorboard_hold_the_record(whole):
    """Every metric of every row of metrics.jsonl, and no other, is in the CSV and TensorBoard logs at its step."""
    assert list(in_record(whole)) == [0, 1, 2, 3, 4]
    assert in_csv(whole) == in_record(whole)
    # TensorBoard keeps float32.
    for number, row in in_record(whole).items():
        assert in_tensorboard(whole)[number] == pytest.approx(row, rel=1e-6)
    assert in_tensorboard(whole).keys() == in_record(whole).keys()


@pytest.mark.parametrize("logger", ["csv", "tensorboard"])
@pytest.mark.parametrize("refused", [0, 3])
def test_a_full_disk_under_a_logger_stops_the_run(logger, refused, whole, tmp_path, capsys, monkeypatch):
    """Where the disk has no room for a logger's row, the run ends in one line with exit code 2, and what is there is
    whole; with room again the run continues, and record and log have every row."""
    words = ["train", str(CONFIG), "--progress", "none", "--output", str(tmp_path), "--logging.loggers", f"[{logger}]"]
    former: list[int] = []
    real, no_limit = RunFolder.append_metrics, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def append(self: RunFolder, step: int, metrics: dict[str, float]) -> None:
        real(self, step, metrics)
        if step == refused:  # the record has this row, so that the logger's file is the next one to be written
            sizes = [path.stat().st_size for path in (self.path / logger).glob("*")]
            former.extend(sizes)
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes, default=0) + 10, resource.RLIM_INFINITY))

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", append)
        try:
            assert main(words) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    out, err = capsys.readouterr()
    reason = r"(File too large|only 10 of \d+ bytes were taken)"
    assert out == "" and re.fullmatch(rf"error: cannot write \S*/{logger}/\S+: {reason}\n", err), err
    folder = RunFolder(next((tmp_path / "smoke").iterdir()))
    assert folder.metrics() == whole.metrics()[: refused + 1]
    read = in_csv if logger == "csv" else in_tensorboard
    assert not [path for path in folder.path.rglob("*") if TEMPORARY in path.name]
    if refused > 0:
        assert [path.stat().st_size for path in (folder.path / logger).glob("*")] == former
        assert read(folder) == {number: row for number, row in read(whole).items() if number < refused}
    assert main([*words, "--resume"]) == 0
    assert folder.metrics() == whole.metrics() and read(folder) == read(whole)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_line_is_passed_over(cut, tmp_path):
    """Wherever a killed process tore the last line of the CSV file, the others are kept and the next is whole."""
    rows = {number: {"actor/lr": 1e-6, "timing_s/step": 2.0 + number} for number in range(3)}
    logger = CsvLogger(tmp_path, 0)
    for number, row in rows.items():
        logger.log_metrics(row, step=number)
    whole = logger.path.read_bytes()
    logger.path.write_bytes(whole[: max(-cut, -len(whole.splitlines()[-1]))])
    again = CsvLogger(tmp_path, 2)
    assert set(again.rows) == {0, 1}
    again.log_metrics(rows[2], step=2)
    assert logger.path.read_bytes() == whole
