"""The queue: cells without a row run as one-thread Ray tasks, on one machine or many.

A row is added when its run has ended. A killed queue continues where it stopped: finished cells are not run again,
and an interrupted run continues from its checkpoint. One queue at a time works on a folder of rows.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from lab.config.load import config_hash
from lab.files import atomic_write
from lab.manifest import manifest
from lab.ray_session import fetch, ray_session, wait
from lab.records import RunFolder
from sandbox.ledger.branch import branch_row
from sandbox.ledger.cells import Cell, Cells, row_of
from sandbox.ledger.engine_fit import fitted_row
from sandbox.ledger.probes import probes_of
from sandbox.run import NonFiniteError, initial_model, open_task, run

OBJECT_STORE_BYTES = 128 * 2**20
"""Rows are a few kB; this is near the least that Ray accepts."""

ROW = "row.json"
"""The row in the run's own folder: the next queue finds it there if one is killed before it adds the row."""


def run_cell(cell: Cell, root: str, compiled: bool) -> dict[str, Any]:
    """Runs or continues the cell below the folder `root`; returns its row, with the seconds that it took.

    `compiled`: with the compiled kernels, whose rounding differs as another machine's would: not part of the key. A run
    that became non-finite has a row too, and its verdict says so. `cpu_seconds` is the processor time of the run after
    its cold start, which hardly depends on the machine's load; null if the run was resumed.
    """
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if cell.made_by == "engine_fit":
        return fitted_row(cell, root)
    if cell.made_by == "branch":
        return branch_row(cell, root, compiled)
    config = cell.config.model_copy(update={"output": root} | ({"compile": True} if compiled else {}))
    place = Path(root), config.name, config_hash(config)
    if (kept := _kept_row(cell, RunFolder.find_newest(*place))) is not None:
        return kept
    folder = RunFolder.find_resumable(*place)
    if config.cold_start is not None:  # before the clock starts: the first run of a regime makes it for all
        initial_model(config, open_task(config), "none")
    is_whole, started, worked = folder is None, time.monotonic(), time.process_time()
    try:
        folder = run(config, folder=folder, progress="none")
    except NonFiniteError:
        # `run` has written record and verdict before it raised: the folder is the newest of this config.
        folder = RunFolder.find_newest(*place)
        assert folder is not None
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - worked
    times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 2) if is_whole else None}
    verdict = json.loads((folder.path / "verdict.json").read_text(encoding="utf-8"))
    found = row_of(cell, folder.metrics(), verdict, probes_of(folder)) | times | {"compiled": compiled}
    atomic_write(folder.path / ROW, json.dumps(found, allow_nan=False))
    return found


def _kept_row(cell: Cell, folder: RunFolder | None) -> dict[str, Any] | None:
    """The cell's row from the folder of its run; None unless this commit made it, without local changes."""
    if folder is None or not (folder.path / ROW).is_file():
        return None
    found, now = json.loads((folder.path / ROW).read_text(encoding="utf-8")), manifest(cell.seed)
    # Of another commit, a row that was removed from the ledger to be made again would only come back.
    is_of_this_code = found["commit"] is not None and found["commit"] == now.get("commit")
    is_clean = found["has_local_changes"] is False and now.get("has_local_changes") is False  # None: not known
    return found if found["cell"] == cell.key and is_of_this_code and is_clean else None


def missing(cells: Sequence[Cell], store: Cells) -> list[Cell]:
    """The cells without a row, in the given order, without repeated keys."""
    done = store.rows()
    return list({cell.key: cell for cell in cells if cell.key not in done}.values())


def work(
    cells: Sequence[Cell],
    store: Cells,
    *,
    root: str,
    address: str | None = None,
    jobs: int | None = None,
    compiled: bool = False,
) -> Iterator[tuple[Cell, dict[str, Any] | Exception]]:
    """Runs the cells without a row in the store and adds their rows; yields each with its row or its error.

    The caller holds the store (`Cells.held`) until the last has come, so that no other queue makes the same runs.
    `jobs` is the number of one-thread tasks at a time on this machine (None: one per CPU); the cluster at `address`
    runs one per CPU.
    """
    wanted = missing(cells, store)
    if not wanted:
        return
    # No retry by Ray: a lost worker is reported, and the next queue continues its run from the checkpoint.
    task = ray.remote(num_cpus=1, max_retries=0)(run_cell)
    places = jobs or os.cpu_count()
    with ray_session(address, num_cpus=places, object_store_bytes=OBJECT_STORE_BYTES, field="--address"):
        running = {task.remote(cell, root, compiled): cell for cell in wanted}
        while running:
            (ready,) = wait(list(running))
            cell = running.pop(ready)
            try:
                found = fetch(ready)
            except RayTaskError as error:
                yield cell, error.cause
                continue
            except RayError as error:  # the worker died: out of memory, a lost machine
                yield cell, error
                continue
            # Added here and not by its task: one process writes the rows of a queue.
            store.add(found)
            yield cell, found


__all__ = ["missing", "run_cell", "work"]
