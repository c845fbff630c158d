"""The queue on a real Ray: rows come in, failures are told, and a queue that is killed continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firstorder.cli import main
from lab.files import exclusive
from lab.manifest import manifest
from lab.ray_session import ray_session
from sandbox.ledger import cells, queue
from sandbox.ledger.cells import Cell, Cells, Regime, cell
from sandbox.ledger.claim import Arm, Row
from sandbox.ledger.queue import OBJECT_STORE_BYTES, missing, run_cell, work

pytestmark = pytest.mark.unchecked

CONFIG = """# tiny: a few steps from nothing.
backend: sandbox
num_steps: 4
task: {kind: arithmetic, min_digits: 1, max_digits: 1, num_held_out: 1}
model: {num_layers: 1, hidden_size: 16, num_heads: 1, num_kv_heads: 1, num_experts: 4, expert_size: 16}
cold_start: null
algorithm:
  objective: {preset: minirl}
  batch: {num_prompts: 2, num_responses: 2, num_minibatches: 1}
  sampling: {max_tokens: 8}
evaluation: {every: 4, num_samples: 1, max_prompts: 1}
checkpoint: {every: 1, keep: 1}
traces: {every: 4}
logging: {loggers: []}
"""
MAIN = """
import sys
from pathlib import Path
from tests.sandbox.ledger.test_queue import cells_of, go
list(go(cells_of(Path(sys.argv[1]), 60), Path(sys.argv[1])))
"""


def cells_of(folder: Path, num_steps: int) -> list[Cell]:
    """Three cells of one arm, a seed each."""
    path = folder / "tiny.yaml"
    path.write_text(CONFIG)
    arm = Arm("plain", (("num_steps", str(num_steps)), ("evaluation.every", str(num_steps))))
    return [cell(Regime.open(path), arm, seed) for seed in (0, 1, 2)]


def go(cells: list[Cell], folder: Path) -> Iterator[tuple[Cell, dict[str, Any] | Exception]]:
    """Works on the cells below the folder, one at a time, and holds the rows meanwhile as a command does."""
    store = Cells(folder / "cells.jsonl")
    with store.held():
        yield from work(cells, store, root=str(folder / "runs"), jobs=1)


def test_rows_come_in_and_what_fails_is_told(tmp_path: Path) -> None:
    """Every cell ends as a row that equals the one made without Ray, or as the error that kept it from one."""
    good = cells_of(tmp_path, 4)[:1]
    impossible = "{target_accuracy: 1.0, max_updates: 1, check_every: 1}"
    broken = cell(Regime.open(tmp_path / "tiny.yaml"), Arm("broken", (("cold_start", impossible),)), 0)
    ended = {one.label: found for one, found in go([*good, broken], tmp_path)}
    rows = Cells(tmp_path / "cells.jsonl").rows()
    assert list(rows) == [good[0].key]
    assert isinstance(ended[broken.label], ValueError)
    assert "cold_start" in str(ended[broken.label])
    alone = run_cell(good[0], str(tmp_path / "alone"), compiled=False)
    assert _without_times(rows[good[0].key]) == _without_times(alone)
    assert missing([*good, broken], Cells(tmp_path / "cells.jsonl")) == [broken]
    assert list(go(good, tmp_path)) == []  # nothing to do: nothing is run


def test_compiled_kernels_make_the_same_cell(tmp_path: Path) -> None:
    """With compiled kernels a cell keeps its key and its row says so; its run is the same to rounding."""
    (one, *_) = cells_of(tmp_path, 4)
    eager = run_cell(one, str(tmp_path / "eager"), compiled=False)
    ((_, row),) = work([one], Cells(tmp_path / "cells.jsonl"), root=str(tmp_path), jobs=1, compiled=True)
    assert isinstance(row, dict)
    assert (eager["compiled"], row["compiled"], row["cell"]) == (False, True, eager["cell"])
    (written,) = tmp_path.glob("tiny-plain-0/*/config.yaml")
    assert "compile: true" in written.read_text()
    # Four updates of a fresh model whose draws are the same: float32 leaves 1e-6, rows keep 4 digits.
    found, expected = ([x for x in r["series"]["actor/entropy"] if x is not None] for r in (row, eager))
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-3)


def test_a_row_has_the_first_step_and_every_evaluation(tmp_path: Path) -> None:
    """`first` is the record of global step 1, and `evaluations` are those of metrics.jsonl, step 0 included."""
    (one, *_) = cells_of(tmp_path, 4)
    row = run_cell(one, str(tmp_path), compiled=False)
    (written,) = tmp_path.glob("tiny-plain-0/*/metrics.jsonl")
    records = [json.loads(line) for line in written.read_text().splitlines()]
    assert [m["step"] for m in records] == list(range(5))
    entropies = [record.get("actor/entropy") for record in records[:3]]
    assert row["first"]["actor/entropy"] == pytest.approx(entropies[1], rel=1e-4) != entropies[2]
    seen = [(m["step"], m["eval/accuracy"]) for m in records if "eval/accuracy" in m]
    assert seen[0][0] == 0 and [tuple(x) for x in row["evaluations"]] == [
        (s, pytest.approx(v, rel=1e-4)) for s, v in seen
    ]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("changes", "is_made_again"),
    [
        ({}, False),
        ({"commit": "b"}, True),
        ({"has_local_changes": True}, True),
        ({"commit": None}, True),
        ({"has_local_changes": None}, True),
    ],
)
def test_a_row_that_was_not_added_is_found_in_its_run(
    changes: dict[str, Any], is_made_again: bool, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue killed between a run's end and its row: the next takes the row, with its times, where the same commit
    made it, and makes the run again where other code may have, in the first process or in the second."""
    (one, *_) = cells_of(tmp_path, 4)
    clean = {"commit": "a", "has_local_changes": False}

    def place(at: dict[str, Any]) -> None:
        for module in (cells, queue):
            monkeypatch.setattr(module, "manifest", lambda seed: manifest(seed) | at, raising=False)

    first, second = (clean | changes, clean) if is_first else (clean, clean | changes)
    place(first)
    row = run_cell(one, str(tmp_path), compiled=False)
    place(second)
    found = run_cell(one, str(tmp_path), compiled=False)
    assert len(list(tmp_path.glob("tiny-plain-0/*/verdict.json"))) == 1 + is_made_again
    assert _without_times(row | second) == _without_times(found)
    assert is_made_again or found == row


def test_a_killed_queue_goes_on(tmp_path: Path) -> None:
    """After kill -9 of everything, the rows that were there stay, and the rest is what an unbroken queue gives."""
    store = Cells(tmp_path / "cells.jsonl")
    process = subprocess.Popen([sys.executable, "-c", MAIN, str(tmp_path)], start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not _second_is_under_way(tmp_path, store):
            assert process.poll() is None, "the queue ended before it could be killed"
            assert time.monotonic() < deadline, "no row came in two minutes"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = store.path.read_bytes()
    cells = cells_of(tmp_path, 60)
    left = missing(cells, store)
    assert 0 < len(left) < 3
    _wait_until_free(tmp_path / "runs")
    ended = [one.key for one, _ in go(cells, tmp_path)]
    assert ended == [one.key for one in left]
    assert store.path.read_bytes().startswith(before)
    alone = run_cell(left[0], str(tmp_path / "alone"), compiled=False)
    assert _without_times(store.rows()[left[0].key]) == _without_times(alone)


def _without_times(row: Row) -> dict[str, Any]:
    """The row less what a clock put into it."""
    series = {name: values for name, values in row["series"].items() if not name.startswith("timing")}
    return {name: value for name, value in row.items() if not name.endswith("seconds")} | {"series": series}


def _second_is_under_way(folder: Path, store: Cells) -> bool:
    """Whether one row is there, and the next run has a checkpoint behind it."""
    return len(store.rows()) == 1 and len(list((folder / "runs").glob("*/*/checkpoints/*"))) > 1


def _wait_until_free(root: Path) -> None:
    """Ray's workers see their driver's end within a second or two; until then they hold their run."""
    deadline = time.monotonic() + 60
    for lock in root.glob("*/*/.lock"):
        while True:
            try:
                with exclusive(lock, "held"):
                    break
            except ValueError:
                assert time.monotonic() < deadline, "a worker outlived its driver"
                time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """Queues of this process share one Ray, whose worker stays; the one that is killed starts its own.

    Workers import this module by its name.
    """
    path = os.pathsep.join(dict.fromkeys([str(Path(__file__).resolve().parents[3]), *sys.path]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with ray_session(None, num_cpus=1, object_store_bytes=OBJECT_STORE_BYTES):
            yield


def test_a_cluster_that_is_not_there_is_refused_before_anything_is_made(tmp_path, capsys):
    """One line that names the option; no tally, and no folder of results."""
    words = ["reproduce", "9", "--regime", "paper", "--address", "127.0.0.1:1", "--results", str(tmp_path / "results")]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --address: no Ray cluster at 127.0.0.1:1: ") and err.count("\n") == 1
    assert not (tmp_path / "results").exists()
