"""Where a run's metrics go besides metrics.jsonl: the loggers that its config names, built over its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


def build_loggers(names: Sequence[str], run_name: str, folder: Path, first: int) -> list[Logger]:
    """One logger a name of the `logging:` block; `first` is the number of global steps taken before.

    Raises ValueError, with how to install it, for a logger whose package is not there.
    """
    loggers: list[Logger] = []
    for name in names:
        try:
            loggers.append(_logger(name, run_name, folder, first))
        except ModuleNotFoundError as error:
            raise ValueError(
                f"logging.loggers: {name} is not installed (pip install 'firstorder[loggers]'): {error}"
            ) from None
    return loggers


def _logger(name: str, run_name: str, folder: Path, first: int) -> Logger:
    if name == "csv":
        # Lightning empties the folder of a CSV logger, so each attempt of a resumed run has its own.
        return CSVLogger(
            str(folder), name="", version="csv" if first == 0 else f"csv-from-{first}", flush_logs_every_n_steps=1
        )
    if name == "tensorboard":
        return TensorBoardLogger(str(folder), name="", version="tensorboard")
    if name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(project="firstorder", name=run_name, save_dir=str(folder))
    from lightning.pytorch.loggers import MLFlowLogger

    # The user's own server where one is named; else a database in the run folder (MLflow 3 writes no plain files).
    database = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    return MLFlowLogger("firstorder", run_name=run_name, tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", database))
