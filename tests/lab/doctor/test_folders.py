"""Folders of dumps: which files are the steps of one run, and how the ranks of a step are one trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.doctor import dumps
from lab.doctor.importers import rows
from lab.doctor.importers.folders import joined, load_steps, step_files
from lab.doctor.steps.arrival import Arrivals
from lab.doctor.view import View
from tests.lab.doctor.test_importers import ROWS, write_slime


def written(source: Path, target: Path) -> Path:
    """The file, moved to another name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return source.rename(target)


def test_ranks_of_a_step_are_one_trace(tmp_path: Path) -> None:
    """The files of one step give the responses of all, in order, with the number of the rank; steps are in order."""
    halves, run = {3: ROWS[:3], 5: ROWS[3:]}, tmp_path / "run" / "token_exports"
    for step, ranks in ((10, (3, 5)), (9, (3, 5)), (11, (5,))):
        for rank in ranks:
            written(dumps.prime_rl(tmp_path / "source", halves[rank]), run / f"step_{step}" / f"rank_{rank}.jsonl")
    files = step_files(tmp_path / "run")
    assert [(step.number, len(step.paths)) for step in files] == [(9, 2), (10, 2), (11, 1)]
    first, second, third = load_steps(files)
    assert (first.trace.step, second.trace.step, first.format, first.is_pi) == (9, 10, "prime-rl", True)
    assert not first.left_out and torch.equal(first.trace.tokens, rows.trace(ROWS).tokens)
    for dump, engines in ((first, [3] * 3 + [5] * 3), (third, [5] * 3)):  # where the others wrote nothing, too
        assert dump.trace.engines is not None and dump.trace.engines.tolist() == engines


def write_train(path: Path, given: list[dict[str, Any]]) -> Path:
    """A rank's file of miles's training dump."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_slime(path, given)


RANKS: dict[str, Callable[[Path, int, int, list[dict[str, Any]]], Path]] = {
    "training": lambda run, step, rank, given: write_train(run / f"{step}_{rank}.pt", given),
    "policy loss": lambda run, step, rank, given: written(
        dumps.miles(run / f"{step} {rank}", given), run / f"rank_{rank}_call_{step}.pt"
    ),
}
"""Writers of a rank's file of miles: folder, step, rank and rows."""


@pytest.mark.parametrize("kind", RANKS)
def test_ranks_that_hold_the_same_rows_count_once(kind: str, tmp_path: Path) -> None:
    """Two data-parallel groups of two tensor-parallel ranks: the rows of ranks 0 and 2, and how many files are left."""
    hole = [ROWS[0] | {"logp_mu": [math.nan, *ROWS[0]["logp_mu"][1:]]}, *ROWS[1:]]  # nan is not equal to itself
    for rank, part in enumerate((hole[:3], hole[:3], hole[3:], hole[3:])):
        RANKS[kind](tmp_path, 7, rank, part)
    (dump,) = load_steps(step_files(tmp_path))
    assert dump.trace.engines is not None and dump.trace.engines.tolist() == [0] * 3 + [2] * 3
    assert torch.equal(dump.trace.logp_old, rows.trace(ROWS).logp_old)
    repeat = "2 of a step's 4 files repeat the rows of another, as tensor-parallel ranks do, and are left out."
    assert dump.left_out == (repeat,)


def test_ranks_before_the_last_pipeline_stage_are_left_out(tmp_path: Path) -> None:
    """They have no log_probs: those of the last stage are read; where no rank has them, the first file is named."""
    for rank, part in enumerate((ROWS[:3], ROWS[3:])):
        write_slime(tmp_path / f"7_{rank}.pt", part, log_probs=None)
        write_slime(tmp_path / f"7_{rank + 2}.pt", part)
    (dump,) = load_steps(step_files(tmp_path))
    assert dump.trace.engines is not None and dump.trace.engines.tolist() == [2] * 3 + [3] * 3
    lack = "lack log-probabilities of old, as ranks before the last pipeline stage do"
    assert dump.left_out == (f"2 of a step's 4 files {lack}, and are left out.",) and not dump.caveat
    for rank in (2, 3):
        (tmp_path / f"7_{rank}.pt").unlink()
    with pytest.raises(ValueError, match=r"7_0\.pt: .*--get-mismatch-metrics, .* is not on the last pipeline stage$"):
        list(load_steps(step_files(tmp_path)))


def test_files_without_tokens_share_no_context(tmp_path: Path) -> None:
    """Neither two ranks of a call nor two calls: each response's tokens are its own, as nobody knows which are."""
    changed = [row | {"logp_mu": [x - 0.5 for x in row["logp_mu"]]} for row in ROWS]
    for call in (0, 1):
        for rank, given in enumerate((ROWS, changed)):
            RANKS["policy loss"](tmp_path, call, rank, given)
    steps, arrivals = list(load_steps(step_files(tmp_path))), Arrivals()
    for dump in steps:
        view = View.of(dump.trace)
        assert len(dump.trace) == 2 * len(ROWS) and len(view.context_n.unique()) == len(view)
        arrivals.add(dump.trace.step, view)
    assert len(steps) == 2 and arrivals.num_shared == 0


def test_parts_joined_are_the_whole() -> None:
    """A trace cut into responses and joined again is the trace."""
    whole = rows.trace(ROWS)
    parts = [rows.trace([row]) for row in ROWS]
    same = joined([replace(part, num_experts=whole.num_experts) for part in parts])
    for name in ("tokens", "offsets", "num_prompt", "logp_mu", "logp_old", "entropy_old", "experts_mu", "is_response"):
        assert getattr(same, name).equal(getattr(whole, name)), name
    with pytest.raises(ValueError, match="entropy_old: expected in all 2 files of the step, got it in 1"):
        joined([parts[0], replace(parts[1], entropy_old=None)])


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (lambda routes: [layers[1:] for layers in routes], r"experts: expected layers \(0, 1, 2\) in all files"),
        (lambda routes: [[ids[1:] for ids in layers] for layers in routes], r"experts_mu: .* slots .*, got \[1, 2\]"),
    ],
)
def test_routes_of_other_layers_or_slots_are_one_line(kept: Callable[[Any], Any], words: str) -> None:
    """A rank whose routes have fewer layers or slots than another's does not fit."""
    cut = [row | {name: kept(row[name]) for name in ("experts_mu", "experts_old")} for row in ROWS]
    with pytest.raises(ValueError, match=words):
        joined([rows.trace(ROWS), rows.trace(cut)])


def test_files_are_steps_by_their_names(tmp_path: Path) -> None:
    """Each format's names are known; verl's hook comes before its texts; two runs, or none, are one line."""
    (tmp_path / "nemo").mkdir()
    for step in (2, 10):
        dumps.nemo_rl(tmp_path / "nemo", ROWS).rename(tmp_path / "nemo" / f"train_data_step{step}.jsonl")
    assert [step.number for step in step_files(tmp_path / "nemo")] == [2, 10]
    for name in ("verl/3.jsonl", "verl/3.engines.jsonl", "own/run-1.parquet", "own/run-2.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [step.paths[0].name for step in step_files(tmp_path / "verl")] == ["3.engines.jsonl"]
    assert [step.number for step in step_files(tmp_path / "own", columns={"tokens": "ids"})] == [1, 2]
    for name in ("ranks/train_12_0.pt", "ranks/train_12_1.pt", "ranks/train_3_0.pt", "whole/7.pt", "whole/train_12.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [(step.number, len(step.paths)) for step in step_files(tmp_path / "ranks")] == [(3, 1), (12, 2)]
    assert [(step.number, len(step.paths)) for step in step_files(tmp_path / "whole")] == [(7, 1), (12, 1)]
    for name in (
        "slime/rollout_data/7.pt",
        "slime/train_data/7.pt",
        "miles/rollout_data/7.pt",
        "miles/train_data/7_1.pt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for run in ("slime", "miles"):  # --dump-details writes both; the first has mu alone
        ((step,), folder) = step_files(tmp_path / run), tmp_path / run / "train_data"
        assert [path.parent for path in step.paths] == [folder] and step_files(folder) == [step]
    with pytest.raises(ValueError, match=r"expected files of steps \(.*\), got none of them in 2 files"):
        step_files(tmp_path / "own")
    for run in ("a", "b"):
        (tmp_path / "two" / run).mkdir(parents=True)
        (tmp_path / "two" / run / "step-000001.safetensors").touch()
    with pytest.raises(ValueError, match="expected one run, got step 1 twice"):
        step_files(tmp_path / "two")


def test_steps_are_read_one_after_the_other(tmp_path: Path) -> None:
    """A step's file is opened when its turn comes, not before: memory holds one step."""
    for step in (1, 2):
        rows.trace(ROWS).save(tmp_path / f"step-{step:06d}.safetensors")
    steps = load_steps(step_files(tmp_path))
    assert next(steps).trace.step == 1
    (tmp_path / "step-000002.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"step-000002\.safetensors"):
        next(steps)
