"""Laws of inputs that are no regular files: a reader of a named pipe, or of a device, would wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.files import RecordError, require_regular
from lab.tasks.readers import read_rows
from tests.firstorder.test_cli import ROOT, TINY, fails, tiny

__all__ = ["tiny"]  # a fixture

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")

READERS = [
    ("train {}", "x.yaml"), ("train {} --print-config", "x.yaml"), ("audit {}", "x.yaml"), ("flow {}", "x.yaml"),
    ("plan {}", "x.yaml"), ("export {} --to m", "x.yaml"), ("filter {} data.jsonl", "x.yaml"),
    ("promote runs/x --to {}", "x.yaml"), ("train base.yaml", "x.yaml"),
    ("calibrate {} tiny.yaml", "x.jsonl"), ("calibrate x.jsonl {}", "x.yaml"),
    ("doctor {}", "x.jsonl"), ("doctor {}", "x.parquet"), ("doctor {}", "x.pt"), ("doctor {}", "x.safetensors"),
    ("doctor {} --columns tokens=t", "x.safetensors"), ("doctor mu.jsonl --old {}", "x.jsonl"),
    ("doctor mu.jsonl --old {}", "x.parquet"), ("doctor {}", "r3_trace_rank0.jsonl"),
    ("doctor {} --localise --model m", "x.safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "name"), READERS, ids=[f"{command} {name}" for command, name in READERS])
def test_a_named_pipe_is_refused(command: str, name: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with its name, at once. A writer in wait keeps a faulty reader from holding up the tests."""
    os.mkfifo(name)
    Path("base.yaml").write_text("base: x.yaml\n")
    Path("mu.jsonl").write_text('{"tokens": [1, 2], "num_prompt": 1, "logp_mu": [-1]}')
    stop = threading.Event()
    writer = threading.Thread(target=_open_when_read, args=(name, stop))
    writer.start()
    try:
        line = fails(capsys, *command.format(name).split())
    finally:
        stop.set()
        writer.join()
    assert line.endswith(f"{name}: expected a regular file, got a named pipe")


def _open_when_read(name: str, stop: threading.Event) -> None:
    """Ends the wait of every reader of the pipe, until `stop`."""
    while not stop.wait(0.05):
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no reader
            continue


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a system without /dev/zero")
def test_a_device_is_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal would wait for its user, and /dev/zero has no end."""
    for device in ("/dev/zero", "/dev/null"):
        assert fails(capsys, "train", device) == f"{device}: expected a regular file, got a device"
        with pytest.raises(RecordError, match=r"^/dev/.*: expected a regular file, got a device$"):
            next(read_rows(device, "{}"))


def test_problems_are_no_pipe(tiny: Path) -> None:
    """Of every suffix that a problem file can have."""
    for name in ("x.jsonl", "x.parquet", "x.arrow"):
        os.mkfifo(name)
        with pytest.raises(RecordError, match=f"^{name}: expected a regular file, got a named pipe$"):
            next(read_rows(name, "{}"))


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="a system without /dev/fd")
def test_the_shells_own_pipes_are_read(tiny: Path) -> None:
    """`<(...)` and `/dev/stdin` are pipes whose writer is there: a config through them is read as from a file."""
    read, write = os.pipe()
    os.write(write, TINY.encode())
    os.close(write)
    assert main(["train", f"/dev/fd/{read}", "--print-config"]) == 0
    os.close(read)
    command = [sys.executable, "-m", "firstorder", "train", "/dev/stdin", "--print-config"]
    done = subprocess.run(command, input=TINY, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and "name: tiny" in done.stdout


def test_absent_files_and_folders_are_left_to_their_reader(tmp_path: Path) -> None:
    """They have messages of their own."""
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        require_regular(path)
    (tmp_path / "file").touch()
    require_regular(tmp_path / "file")
