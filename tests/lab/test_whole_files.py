"""Laws of writing: a reader, a kill, a full disk and a refused folder leave every file whole, old or new."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from lab.files import atomic_folder, exclusive
from lab.records import RecordError, RunFolder, atomic_write
from tests.forks import begin, end


def write_until_killed(run: RunFolder) -> int:
    """Writes step after step, and says which are done."""
    for step in itertools.count(1):
        run.append_metrics(step, {"reward/mean": float(step)})
        run.save_checkpoint(step, {"w": torch.full((50_000,), float(step))}, {"step": step})
        run.write_manifest({"step": step, "text": "x" * 100_000})
        print(step, flush=True)
    raise AssertionError


@pytest.mark.parametrize("wait", [0.0, 0.007])
def test_a_process_killed_while_writing_leaves_whole_records(run: RunFolder, tmp_path: Path, wait: float) -> None:
    """After kill -9 at any moment every file reads, the last checkpoint is the step's or the next, writing goes on."""
    log = tmp_path / "log"
    run.append_metrics(0, {"reward/mean": 0.0})
    child = begin(lambda: write_until_killed(run), log)
    for _ in range(60_000):
        if log.exists() and log.read_text().count("\n") >= 3:
            break
        time.sleep(0.001)
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    assert end(child) == -signal.SIGKILL
    done = int(log.read_text().split("\n")[:-1][-1])
    found = run.latest_checkpoint()
    assert found is not None and done <= found.step <= done + 1
    assert torch.equal(found.tensors["w"], torch.full((50_000,), float(found.step))) and found.state == {
        "step": found.step
    }
    steps = [record["step"] for record in run.metrics()]
    assert steps == list(range(len(steps))) and steps[-1] in (done, done + 1)
    assert json.loads((run.path / "manifest.json").read_text())["step"] in (done, done + 1)
    run.truncate_metrics(found.step)
    run.append_metrics(found.step + 1, {"reward/mean": 0.0})
    assert [r["step"] for r in run.metrics()] == list(range(found.step + 2))


def full(*_: object) -> int:
    """The system's error on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_changes_nothing(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every writer names the path and the reason, leaves the former content, and leaves no temporary file."""
    run.append_metrics(0, {"reward/mean": 0.5})
    run.save_checkpoint(0, {"w": torch.zeros(2)}, {})
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    monkeypatch.setattr(os, "fsync", full)
    writers = {
        "config.yaml": lambda: run.write_config("other"),
        "metrics.jsonl": lambda: run.append_metrics(1, {"reward/mean": 0.6}),
        "step-000001": lambda: run.save_checkpoint(1, {"w": torch.ones(2)}, {}),
        "report.html": lambda: run.write_report("<html>"),
    }
    for name, write in writers.items():
        with pytest.raises(RecordError, match=rf"^cannot write .*{name}: No space left on device$"):
            write()
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_a_reader_sees_the_former_file_or_the_new_one(run: RunFolder) -> None:
    """Writing never touches the former bytes: a reader that opened them before reads them to the end."""
    with open(run.path / "config.yaml") as reader:
        run.write_config("name: other\n")
        assert reader.read() == "name: demo\n"
    assert (run.path / "config.yaml").read_text() == "name: other\n"


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the new folder cannot take its place, the former one is there again and nothing else is left."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "weights").write_text("former")
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == "step" and not Path(source).name.endswith("-former"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RecordError, match="Input/output error"), atomic_folder(tmp_path / "step") as new:
        (new / "weights").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert (tmp_path / "step" / "weights").read_text() == "former"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A root below a file, and a run folder that was removed, give the path and the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot make folder .*: Not a directory$"):
        RunFolder.create(tmp_path / "file", "demo", "abc", datetime.now(UTC))
    with pytest.raises(RecordError, match=r"cannot write .*gone.x: No such file or directory$"):
        atomic_write(tmp_path / "gone" / "x", "text")


def test_all_of_a_folder_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut never finds an empty file under the final name: each file and folder is synced before the rename."""
    synced: set[int] = set()
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino) or fsync(descriptor))

    def renamed(source: Path, target: Path) -> None:
        assert {path.stat().st_ino for path in (source, *source.rglob("*"))} <= synced
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    with atomic_folder(tmp_path / "export") as folder:
        (folder / "config.json").write_text("{}")
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "weights").write_bytes(b"w" * 9)
    assert (tmp_path / "export" / "deep" / "er" / "weights").read_bytes() == b"w" * 9


def test_a_write_leaves_the_umask_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment has another thread another umask; files and folders have the permissions that it leaves."""
    os.umask(mask := os.umask(0))

    def refuse(mask: int) -> int:
        raise AssertionError(f"umask({mask:o})")

    monkeypatch.setattr(os, "umask", refuse)
    atomic_write(tmp_path / "file", "text")
    with atomic_folder(tmp_path / "folder"), exclusive(tmp_path / "lock", "held"):
        pass
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"file": 0o666 & ~mask, "folder": 0o777 & ~mask, "lock": 0o666 & ~mask}


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No marker file stands in for a lock there: a killed process would hold it for good."""

    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    line = r"^cannot lock .*/lock: Function not implemented$"
    with pytest.raises(RecordError, match=line), exclusive(tmp_path / "lock", "held"):
        pass
