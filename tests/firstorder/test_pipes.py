"""Laws of a reader that goes away, as `| head -1` does: nothing ends early, and nothing is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.records import RunFolder
from tests.firstorder.copied_command import begin_copy
from tests.firstorder.test_cli import ROOT, TINY, environment
from tests.forks import end

NUM_STEPS = 30


def leave(folder: Path, words: list[str], flags: tuple[str, ...] = (), num_lines: int = 1) -> tuple[int, list[str]]:
    """The command's exit code and its first lines, after which its reader of stdout and stderr is gone."""
    command = [sys.executable, *flags, "-m", "firstorder", *words]
    out, err = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, cwd=folder, env=by_flags_alone(), stdout=out, stderr=err, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(num_lines)]
            process.stdout.close()
            return process.wait(timeout=120), lines
        finally:
            process.kill()


def by_flags_alone() -> dict[str, str]:
    """The environment without the variable that does what `-u` does."""
    return {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}


def leave_copy(folder: Path, words: list[str], flags: tuple[str, ...], num_lines: int) -> tuple[int, list[str]]:
    """The same of a copy of this process."""
    reader, writer = os.pipe()
    child = begin_copy(words, folder, (writer, writer), is_unbuffered=flags == ("-u",))
    os.close(writer)
    with open(reader) as file:
        lines = [file.readline() for _ in range(num_lines)]
    return end(child), lines


def test_these_processes_run_this_checkouts_code(tmp_path: Path) -> None:
    """From another folder, too, where `python -m` would find the installed command, which may be another checkout's."""
    command = [sys.executable, "-c", "import firstorder, lab; print(firstorder.__file__, lab.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(ROOT / name / "__init__.py") for name in ("firstorder", "lab")]


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("num_lines", [0, 1])
def test_a_run_outlives_the_reader_of_its_progress(tmp_path: Path, num_lines: int, flags: tuple[str, ...]) -> None:
    """Every step is taken, verdict and page are written, and the exit code is the run's own."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["train", "tiny.yaml", "--num_steps", str(NUM_STEPS), "--progress", "lines"]
    is_whole = num_lines == 1 and flags == ()  # one with a start and an end of Python's own is enough
    code, lines = (leave if is_whole else leave_copy)(tmp_path, words, flags, num_lines)
    assert code == 0 and all(line.startswith("tiny ") and "step   10/30" in line for line in lines)
    (path,) = (tmp_path / "runs" / "tiny").iterdir()
    run = RunFolder.open(path)
    assert [row["step"] for row in run.metrics()] == list(range(NUM_STEPS + 1))
    assert run.is_finished and (path / "report.html").is_file()


@pytest.mark.parametrize(("words", "wanted"), [(["configs"], 0), (["--help"], 0), (["train", "none.yaml"], 2)])
def test_a_command_that_only_prints_keeps_its_exit_code(words: list[str], wanted: int, tmp_path: Path) -> None:
    """Also an error's, whose line nobody reads."""
    assert leave(tmp_path, words, num_lines=0)[0] == wanted


PRINTS = ["configs", "--help", "--version"]
WITH_TORCH = [
    "doctor --list-formats",
    "train smoke --print-config",
    "audit audit/small --print-config",
    "plan scaled/minirl/n1 --no-dry-run",
    "plan scaled/minirl/n1 --no-dry-run --json",
    "launch scaled/minirl/n1 --kind ray --output /shared/runs",
]


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without /dev/full")
LINE = "error: stdout: no space left on device"


@FULL
@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", PRINTS)
def test_a_full_disk_below_stdout_is_one_line(words: str, flags: tuple[str, ...]) -> None:
    """It names stdout, whatever prints: the command itself or its help."""
    command = [sys.executable, *flags, "-m", "firstorder", *words.split()]
    env = by_flags_alone()
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, f"{LINE}\n")


@FULL
@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", WITH_TORCH)
def test_a_full_disk_below_a_table_is_one_line(words: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Also where a config or a table is printed, in copies of this process."""
    with open("/dev/full", "w") as full, open(tmp_path / "stderr", "w+") as told:
        child = begin_copy(words.split(), ROOT, (full.fileno(), told.fileno()), is_unbuffered=flags == ("-u",))
        code = end(child)
        told.seek(0)
        lines = told.read().splitlines()
    assert code == 2 and lines[-1] == LINE
    assert all(line.startswith(("stored objects:", "not on this machine:")) for line in lines[:-1]), lines
