"""Whole runs with `compile: true`: the same bits again, a true zero, one line without a compiler."""

from __future__ import annotations

import shutil

from firstorder.cli import main
from lab.config.load import config_hash
from lab.records import RunFolder
from sandbox.kernels.compiled import build
from sandbox.run import run
from tests.sandbox.test_resume import CONFIG, config, only_folder

FEW = ("--num_steps", "4", "--evaluation.every", "2")


def test_the_same_config_gives_the_same_bits_also_from_a_checkpoint(tmp_path):
    """A compiled run with defects and Pr3 repeats every metric, and so does one that goes on from its step 3."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = run(config(tmp_path / "first", "--compile", "true", *FEW), progress="none")
    chosen = config(tmp_path / "second", "--compile", "true", *FEW)
    second = run(chosen, progress="none")
    assert second.metrics() == first.metrics()
    folder = only_folder(tmp_path / "second")
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    (folder / "verdict.json").unlink()
    resumed = run(chosen, folder=RunFolder.open(folder), progress="none")
    assert resumed.metrics() == first.metrics()
    eager = run(config(tmp_path, *FEW), progress="none")
    assert eager.metrics() != first.metrics()


def test_an_exact_engine_has_no_discrepancy(tmp_path):
    """Without defects log mu equals log old in every bit of a run that replays mu's routes: every estimator is 0."""
    chosen = config(tmp_path, "--compile", "true", "--engine.defects", "[]", "--algorithm.replay", "{mode: R3}", *FEW)
    rows = [row for row in run(chosen, progress="none").metrics() if "rollout_corr/k3_kl" in row]
    assert len(rows) >= 4
    assert {row["rollout_corr/k3_kl"] for row in rows} == {0.0}


def test_compile_is_part_of_a_configs_hash_where_it_is_true(tmp_path):
    """Equal hashes promise equal numbers; a config that does not name `compile` keeps the hash that it had before."""
    without, with_null = config(tmp_path), config(tmp_path, "--compile", "null")
    assert config_hash(without) == config_hash(with_null) != config_hash(config(tmp_path, "--compile", "true"))


def test_a_run_without_a_compiler_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    """`firstorder train --compile true` without a compiler: exit code 2, one line that names the field, no folder."""
    path, output = tmp_path / "config.yaml", tmp_path / "runs"
    path.write_text(CONFIG)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    build.library.cache_clear()
    assert main(["train", str(path), "--compile", "true", "--output", str(output)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "compile: expected a C++ compiler" in lines[0]
    assert not output.exists()
