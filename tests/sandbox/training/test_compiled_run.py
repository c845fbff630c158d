"""Whole runs with `compile: true` and `auto`: the same bits again, a true zero, one line without a compiler."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.config.load import config_hash
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.traces import Trace
from sandbox.kernels.compiled import build
from sandbox.kernels.interface import check_threads
from sandbox.run import run
from tests.sandbox.training.test_resume import CONFIG, config, only_folder, resume

FEW = ("--num_steps", "4", "--evaluation.every", "2")


def cut_off(folder: Path) -> RunFolder:
    """The folder of a finished run as that of one that ended after its last checkpoint but one."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    (folder / "verdict.json").unlink()
    return RunFolder.open(folder)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> RunFolder:
    """A run with `compile: true`, with defects and Pr3."""
    return run(config(tmp_path_factory.mktemp("compiled"), "--compile", "true", *FEW), progress="none")


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> RunFolder:
    """The same run with torch's operators."""
    return run(config(tmp_path_factory.mktemp("eager"), *FEW), progress="none")


def test_the_same_config_gives_the_same_bits_also_from_a_checkpoint(compiled, eager, tmp_path):
    """A compiled run repeats every metric on one thread, and so does one that continues from its step 3."""
    chosen = config(tmp_path, "--compile", "true", *FEW)
    build.library().threads = 2
    assert run(chosen, progress="none").metrics() == compiled.metrics() != eager.metrics()
    assert build.library().threads == 1
    resumed = run(chosen, folder=cut_off(only_folder(tmp_path)), progress="none")
    assert resumed.metrics() == compiled.metrics()


def test_traces_say_that_old_scored_on_mus_experts(compiled):
    """Under Pr3 the old pass replays the rollout's routes."""
    assert {Trace.load(path).old_pass for path in compiled.traces()} == {"replay_rollout"}


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


def test_auto_is_the_compiled_run_where_a_compiler_is(compiled, tmp_path):
    """`compile: auto` on two threads records, hashes and computes what `compile: true` does on one.

    --resume finds the run by what `auto` stood for, and ends it with the metrics of one that was never stopped.
    """
    words = ("--compile", "auto", "--threads", "2", *FEW)
    made = run(config(tmp_path, *words), progress="none")
    assert build.library().threads == 2
    assert made.metrics() == compiled.metrics()
    hashes = {folder.path.name.split("-")[1] for folder in (made, compiled)}
    assert hashes == {config_hash(config(tmp_path, "--compile", "true", *FEW))}
    assert "\ncompile: true\n" in (made.path / "config.yaml").read_text()
    cut_off(made.path)
    assert resume(tmp_path, *words) == 0
    assert RunFolder.open(only_folder(tmp_path)).metrics() == compiled.metrics()
    assert len(list((tmp_path / "runs/resume").iterdir())) == 1


def test_auto_without_a_compiler_is_torchs_run_and_says_so(eager, tmp_path, monkeypatch, capsys):
    """Without a compiler `compile: auto` is the run without `compile`: its metrics, its hash; one line says so."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library.cache_clear()
    capsys.readouterr()
    found = run(config(tmp_path, "--compile", "auto", "--threads", "2", *FEW), progress="none")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compile")]
    assert said == [
        "compile: auto: using torch's operators; C++ kernels could not be built: "
        "CXX=no-such-compiler, which is not there"
    ]
    assert found.metrics() == eager.metrics()
    assert found.path.name.split("-")[1] == eager.path.name.split("-")[1]
    assert "\ncompile: null\nthreads: null\n" in (found.path / "config.yaml").read_text().replace(
        "\n# threads of compiled kernels; they change no bit; null: one", ""
    )


@pytest.mark.parametrize("value", ["always", "1"])
def test_other_words_for_compile_are_refused(tmp_path, value):
    """A value other than true, false, null and auto is one line that names the field and what came."""
    with pytest.raises(ValueError, match=rf"compile: expected true, false, null or auto, got {value}$"):
        config(tmp_path, "--compile", value)


def test_threads_far_beyond_the_cores_are_refused(tmp_path, monkeypatch, capsys):
    """One line with the number of cores, before a folder is made or a thread started; `bench` says the same."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    before = build.library().threads
    said = "error: threads: expected at most 24, 8 for each of this machine's 3 cores, got 25\n"
    for kernels in ((), ("--compile",)):
        assert main(["bench", *kernels, "--threads", "25"]) == 2
        assert capsys.readouterr().err == said
    with pytest.raises(ValueError, match=re.escape(said.removeprefix("error: ").rstrip())):
        run(config(tmp_path, "--compile", "true", "--threads", "25", *FEW), progress="none")
    assert not (tmp_path / "runs").exists() and build.library().threads == before
    check_threads(24)


def test_threads_are_those_of_compiled_kernels(tmp_path):
    """`threads` above 1 needs `compile: true`."""
    with pytest.raises(ConfigError, match="threads: expected 1 without compile: true, got 2"):
        config(tmp_path, "--threads", "2")
