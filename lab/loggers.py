"""The loggers that a run's config names, which take its metrics besides metrics.jsonl, built over its folder.

Those that write into the folder leave their files whole and raise RecordError where the disk refuses a row.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lab.extras import how_to_install
from lab.files import RecordError, append_bytes, append_line, atomic_write, disk_errors, whole_lines
from lab.lightning import Logger


def build_loggers(names: Sequence[str], run_name: str, folder: Path, first: int) -> list[Logger]:
    """One logger per name in the `logging:` block; `first` is the number of global steps taken before.

    Raises ValueError, with the command that installs it, for a logger whose package is missing.
    """
    loggers: list[Logger] = []
    for name in names:
        try:
            loggers.append(_logger(name, run_name, folder, first))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"logging.loggers: {name} is not installed ({how_to_install('loggers')}): {error}"
            ) from None
    return loggers


class _FileLogger(Logger):
    """A logger whose files lie in a folder of its name inside the run's."""

    _name: ClassVar[str]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._name

    @property
    def version(self) -> str:
        """Empty: the run's folder is the version."""
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml has the hyperparameters."""


class CsvLogger(_FileLogger):
    """csv/metrics.csv: one line per row and one column per metric, empty where a row has no such metric.

    A run that continues after `first` global steps keeps the same file. Lightning's CSVLogger would start an empty
    one, and it loses rows if the disk fills up while it adds a column.
    """

    _name = "csv"

    def __init__(self, folder: Path, first: int):
        super().__init__()
        self.path = folder / "csv" / "metrics.csv"
        rows = _read_csv(self.path)
        # Rows after the checkpoint are dropped: the run computes them again.
        self.rows = {int(row["step"]): row for row in rows if int(row["step"]) <= first}
        # Sorted, so that the header does not depend on which metric came first.
        self.columns = sorted({name for row in self.rows.values() for name in row} | {"step"})
        if len(self.rows) < len(rows):
            self._write_all()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds the row, replacing an earlier one of this step; after a RecordError the file is as it was."""
        assert step is not None
        # repr keeps every digit of a float64.
        row = {"step": str(step)} | {name: repr(float(value)) for name, value in metrics.items()}
        is_new, has_columns = step not in self.rows, row.keys() <= set(self.columns)
        # Copies, because the row enters both before the disk has taken it.
        former = dict(self.rows), list(self.columns)
        self.rows[step] = row
        self.columns = sorted({*self.columns, *row})
        try:
            # One appended line will do unless lines on the disk change, as with a new column or a step that is there.
            if is_new and has_columns and self.path.is_file():
                append_line(self.path, _csv_line(row.get(name, "") for name in self.columns))
            else:
                self._write_all()
        except RecordError:
            self.rows, self.columns = former
            raise

    def _write_all(self) -> None:
        with disk_errors(self.path):
            self.path.parent.mkdir(exist_ok=True)
        lines = [self.columns, *([row.get(name, "") for name in self.columns] for row in self.rows.values())]
        atomic_write(self.path, b"".join(_csv_line(line) + b"\n" for line in lines))


class TensorBoardLogger(_FileLogger):
    """tensorboard/events.out.tfevents.*: one event per row, and one file each time that the run begins or continues.

    Lightning's TensorBoardLogger writes from a thread, which reports a full disk late, and not in one line.
    """

    _name = "tensorboard"

    def __init__(self, folder: Path):
        # protobuf makes these classes at import, so a type checker sees none.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__()
        self._Event, self._Summary, self._RecordWriter = Event, Summary, RecordWriter
        # The viewer reads the files of a folder in the order of their names.
        self.path = folder / "tensorboard" / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds the row; after a RecordError the file is as it was."""
        if not self.path.exists():
            with disk_errors(self.path):
                self.path.parent.mkdir(exist_ok=True)
            # Readers expect the version of the format as the first event of a file.
            self._append(self._Event(wall_time=time.time(), file_version="brain.Event:2"))
        values = [self._Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._append(self._Event(wall_time=time.time(), step=step, summary=self._Summary(value=values)))

    def _append(self, event: Any) -> None:
        data = io.BytesIO()
        self._RecordWriter(data).write(event.SerializeToString())
        append_bytes(self.path, data.getvalue())


def _logger(name: str, run_name: str, folder: Path, first: int) -> Logger:
    if name == "csv":
        return CsvLogger(folder, first)
    if name == "tensorboard":
        return TensorBoardLogger(folder)
    if name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(project="firstorder", name=run_name, save_dir=str(folder))
    from lightning.pytorch.loggers import MLFlowLogger

    # The user's own server where one is named; else a database in the run folder (MLflow 3 writes no plain files).
    database = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    return MLFlowLogger("firstorder", run_name=run_name, tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", database))


def _read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of the file, each without its empty cells; none where there is no file."""
    rows = csv.DictReader(line.decode() for line in whole_lines(path))
    return [{name: value for name, value in row.items() if value} for row in rows]


def _csv_line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().encode()
