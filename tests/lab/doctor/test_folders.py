"""Folders of dumps: which files are the steps of one run, and how the ranks of a step are one trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.doctor import dumps
from lab.doctor.importers import rows
from lab.doctor.importers.folders import joined, load_steps, step_files
from tests.lab.doctor.test_importers import ROWS


def test_ranks_of_a_step_are_one_trace(tmp_path: Path) -> None:
    """The files of one step give the responses of all, in order, with the number of the rank; steps are in order."""
    for step in (10, 9):
        for rank in (0, 1):
            source = dumps.prime_rl(tmp_path / "source", ROWS)
            target = tmp_path / "run" / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    files = step_files(tmp_path / "run")
    assert [(step.number, len(step.paths)) for step in files] == [(9, 2), (10, 2)]
    first, second = load_steps(files)
    assert (first.trace.step, second.trace.step, first.format, first.is_pi) == (9, 10, "prime-rl", True)
    assert first.trace.engines is not None and first.trace.engines.tolist() == [0] * len(ROWS) + [1] * len(ROWS)
    assert first.trace.logp_mu[: len(first.trace.logp_mu) // 2].equal(
        first.trace.logp_mu[len(first.trace.logp_mu) // 2 :]
    )


def test_parts_joined_are_the_whole() -> None:
    """A trace cut into responses and joined again is the trace, but for the numbers of the parts."""
    whole = rows.trace(ROWS)
    parts = [rows.trace([row]) for row in ROWS]
    same = joined([replace(part, num_experts=whole.num_experts) for part in parts])
    for name in ("tokens", "offsets", "num_prompt", "logp_mu", "logp_old", "entropy_old", "experts_mu", "is_response"):
        assert getattr(same, name).equal(getattr(whole, name)), name
    assert same.engines is not None and same.engines.tolist() == list(range(len(ROWS)))
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
