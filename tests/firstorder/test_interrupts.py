"""Laws of being stopped: Ctrl-C and SIGTERM end a run with exit code 130 and 143, whole records and one way on."""

from __future__ import annotations

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firstorder.cli import app, main
from lab.files import TEMPORARY
from lab.interrupts import Interrupted, held, interruptible
from lab.records import RunFolder
from tests.firstorder.test_cli import TINY, environment

STEPS = 100_000


def listen() -> None:
    """Undoes what tests that were started by `nohup` or a shell's `&` inherit: SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """The command in a process of its own, in that folder; whoever starts it kills it."""
    command = [sys.executable, "-m", "firstorder", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True, preexec_fn=listen
    )


def wait_for_steps(process: subprocess.Popen[str], folder: Path, num_rows: int) -> None:
    """Returns once the run in `folder` has written that many rows."""
    for _ in range(12_000):
        files = list(folder.glob("runs/tiny/*/metrics.jsonl"))
        if files and len(files[0].read_text().splitlines()) >= num_rows:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the run took no step")


def test_a_stopped_run_says_how_to_continue(tmp_path: Path) -> None:
    """In training: 128 + the signal, one line with the exact command, every row in metrics and logger, no verdict, and
    the command continues where it says, until the next signal."""
    (tmp_path / "tiny run.yaml").write_text(TINY.replace("loggers: []", "loggers: [csv]"))
    words = ["train", "tiny run.yaml", "--num_steps", str(STEPS), "--progress", "none"]
    num_rows = 0
    for signum, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(tmp_path, words)
        try:
            wait_for_steps(process, tmp_path, num_rows + 3)
            process.send_signal(signum)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, out) == (code, "") and err.count("\n") == 1, err
        (folder,) = (tmp_path / "runs" / "tiny").iterdir()
        rows = RunFolder.open(folder).metrics()
        said, command = err.removesuffix("\n").split("; continue with: ")
        assert said == f"interrupted by {signum.name} after step {rows[-1]['step']} of {STEPS}"
        with open(folder / "csv" / "metrics.csv", newline="") as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == [row["step"] for row in rows]
        assert not (folder / "verdict.json").exists() and not list(folder.rglob(f"{TEMPORARY}*"))
        name, *words = shlex.split(command)
        assert name == "firstorder" and len(rows) >= num_rows + 3
        num_rows = len(rows)


def test_an_ignored_signal_stays_ignored() -> None:
    """Under `nohup`, SIGINT ignored: the block and what follows it ignore it too, and still end at SIGTERM."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            with pytest.raises(Interrupted, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def test_any_command_can_be_stopped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A signal in a command without a run is one line; afterwards the process has its own handlers back."""
    former = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def wait(**_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(type(app), "__call__", lambda self, **words: wait(**words))
    assert main(["report"]) == 143
    assert capsys.readouterr().err == "interrupted by SIGTERM\n"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == former


def test_an_ignored_signal_hides_no_other() -> None:
    """Under `nohup` SIGINT is ignored: one that comes first inside `held` leaves the SIGTERM after it in force."""

    def write() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)

    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible(), pytest.raises(Interrupted) as stopped:
            write()
        assert stopped.value.exit_code == 143
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_signal_is_not_lost_where_the_writes_fail() -> None:
    """A signal that comes inside `held` is raised at its end, also when the block ends with an error of its own."""

    def write() -> None:
        with held():
            signal.raise_signal(signal.SIGTERM)
            raise OSError("no space left")

    with interruptible(), pytest.raises(Interrupted) as stopped:
        write()
    assert stopped.value.exit_code == 143 and isinstance(stopped.value.__context__, OSError)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_first_imports_is_one_line(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    """Before the command has begun, 128 + the signal and no traceback: here typer's import brings the signal."""
    lines = ("import os, time", f"os.kill(os.getpid(), {int(signum)})", "time.sleep(60)")
    (tmp_path / "typer.py").write_text("\n".join(lines))
    own = environment()
    own["PYTHONPATH"] = os.pathsep.join([str(tmp_path), own["PYTHONPATH"]])
    found = subprocess.run(
        [sys.executable, "-m", "firstorder", "configs"],
        cwd=tmp_path, env=own, preexec_fn=listen, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (code, "", f"interrupted by {signum.name}\n")
