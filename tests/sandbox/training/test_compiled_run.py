"""Whole runs with `compile: true` and `auto`: the same bits again, a true zero, one line without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.config.load import config_hash
from lab.records import RunFolder
from sandbox.kernels.compiled import build
from sandbox.run import run
from tests.sandbox.training.test_resume import CONFIG, config, only_folder, resume

FEW = ("--num_steps", "4", "--evaluation.every", "2")


def cut_off(folder: Path) -> RunFolder:
    """The folder of a finished run as that of one that ended after its last checkpoint but one."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    (folder / "verdict.json").unlink()
    return RunFolder.open(folder)


def test_the_same_config_gives_the_same_bits_also_from_a_checkpoint(tmp_path):
    """A compiled run with defects and Pr3 repeats every metric, and so does one that continues from its step 3."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = run(config(tmp_path / "first", "--compile", "true", *FEW), progress="none")
    chosen = config(tmp_path / "second", "--compile", "true", *FEW)
    second = run(chosen, progress="none")
    assert second.metrics() == first.metrics()
    resumed = run(chosen, folder=cut_off(only_folder(tmp_path / "second")), progress="none")
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


def test_auto_is_the_compiled_run_where_a_compiler_is(tmp_path):
    """`compile: auto` here records, hashes and computes what `compile: true` does, and its words for threads hold."""
    made = {}
    for value in ("auto", "true"):
        (tmp_path / value).mkdir()
        made[value] = run(config(tmp_path / value, "--compile", value, "--threads", "2", *FEW), progress="none")
    assert made["auto"].metrics() == made["true"].metrics()
    hashes = {folder.path.name.split("-")[1] for folder in made.values()}
    assert hashes == {config_hash(config(tmp_path, "--compile", "true", *FEW))}
    assert "\ncompile: true\n" in (made["auto"].path / "config.yaml").read_text()


def test_auto_without_a_compiler_is_torchs_run_and_says_so(tmp_path, monkeypatch, capsys):
    """Without a compiler `compile: auto` is the run without `compile`: its metrics, its hash; one line says so."""
    for name in ("auto", "null"):
        (tmp_path / name).mkdir()
    expected = run(config(tmp_path / "null", *FEW), progress="none")
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library.cache_clear()
    capsys.readouterr()
    found = run(config(tmp_path / "auto", "--compile", "auto", "--threads", "2", *FEW), progress="none")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compile")]
    assert said == [
        "compile: auto: using torch's operators; C++ kernels could not be built: "
        "CXX=no-such-compiler, which is not there"
    ]
    assert found.metrics() == expected.metrics()
    assert found.path.name.split("-")[1] == expected.path.name.split("-")[1]
    assert "\ncompile: null\nthreads: null\n" in (found.path / "config.yaml").read_text().replace(
        "\n# threads of compiled kernels; they change no bit; null: one", ""
    )


def test_an_unfinished_run_with_auto_goes_on(tmp_path):
    """--resume finds a run that said auto by what it stood for, and ends it with the metrics of one never stopped."""
    words = ("--compile", "auto", *FEW)
    whole = run(config(tmp_path, *words), progress="none").metrics()
    cut_off(only_folder(tmp_path))
    assert resume(tmp_path, *words) == 0
    assert RunFolder.open(only_folder(tmp_path)).metrics() == whole
    assert len(list((tmp_path / "runs/resume").iterdir())) == 1


@pytest.mark.parametrize("value", ["always", "1"])
def test_other_words_for_compile_are_refused(tmp_path, value):
    """A value other than true, false, null and auto is one line that names the field and what came."""
    with pytest.raises(ValueError, match=rf"compile: expected true, false, null or auto, got {value}$"):
        config(tmp_path, "--compile", value)
