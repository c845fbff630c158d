"""Laws of checkpoints that ranks write while the run goes on: each is there once all is written, or never."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lab.files import RecordError
from lab.records import RunFolder
from scaled.cluster.saving import Checkpoints


class HeldRanks:
    """Ranks whose part of a checkpoint is written once somebody waits for it, or says `done`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.folder: Path | None = None
        self.done, self.num_asked = False, 0

    def save(self, folder: Path) -> None:
        (folder / "part").write_bytes(b"weights")

    def begin_save(self, folder: Path) -> None:
        assert self.folder is None
        (folder / "torn").write_bytes(b"wei")
        if self.error is not None:
            raise self.error
        self.folder, self.done = folder, False

    def has_saved(self, wait: bool = False) -> bool:
        self.num_asked += 1
        if not (wait or self.done):
            return False
        folder, self.folder = self.folder, None
        assert folder is not None
        if self.error is not None:
            raise self.error
        (folder / "torn").rename(folder / "part")
        self.save(folder)
        return True


@pytest.fixture
def ranks() -> HeldRanks:
    return HeldRanks()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def names(folder: RunFolder) -> list[str]:
    """All that is in the folder of checkpoints, what is temporary included."""
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def steps(folder: RunFolder) -> list[int]:
    """The steps of the checkpoints that are there."""
    return [int(name.removeprefix("step-")) for name in names(folder) if name.startswith("step-")]


def test_a_checkpoint_is_there_once_all_is_written(folder: RunFolder, ranks: HeldRanks) -> None:
    """Until the ranks have finished no step has it, and a run that is killed continues from the one before."""
    checkpoints = Checkpoints(folder, ranks, 2, asynchronous=True)
    for step in (2, 4):
        checkpoints.save(step)
        checkpoints.poll()
        assert steps(folder) == list(range(2, step, 2))
        ranks.done = True
        checkpoints.poll()
        found = folder.latest_sharded_checkpoint()
        assert found is not None and found.step == step
        assert (found.path / "part").read_bytes() == b"weights" and not (found.path / "torn").exists()
    assert names(folder) == ["step-000002", "step-000004"]
    asked = ranks.num_asked
    checkpoints.poll()
    checkpoints.finish()
    assert ranks.num_asked == asked  # nothing is being written, and nobody is asked


def test_a_save_waits_for_the_one_before(folder: RunFolder, ranks: HeldRanks) -> None:
    """At most one checkpoint is being written: the next one publishes it first. The newest `keep` stay."""
    checkpoints = Checkpoints(folder, ranks, 1, asynchronous=True)
    for step in (2, 4, 6):
        checkpoints.save(step)
        assert steps(folder) == [step - 2][: step // 2 - 1]
    checkpoints.finish()
    assert names(folder) == ["step-000006"]


@pytest.mark.parametrize("is_at_once", [True, False])
def test_an_error_of_the_disk_is_one_line(folder: RunFolder, ranks: HeldRanks, is_at_once: bool) -> None:
    """Before the copy is made or behind a step, it names the checkpoint, leaves nothing, and the next one is whole."""
    checkpoints = Checkpoints(folder, ranks, 2, asynchronous=True)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "elsewhere")
    if not is_at_once:
        checkpoints.save(2)
    ranks.error = full
    with pytest.raises(RecordError, match=r"^cannot write .*/checkpoints/step-000002: No space left on device$"):
        checkpoints.save(2) if is_at_once else checkpoints.finish()
    assert names(folder) == []
    ranks.error = None
    checkpoints.finish()
    checkpoints.save(4)
    checkpoints.finish()
    assert names(folder) == ["step-000004"]


def test_a_death_comes_as_it_is(folder: RunFolder, ranks: HeldRanks) -> None:
    """An ended process is no error of the disk: its own exception comes, and leaves nothing behind."""
    checkpoints = Checkpoints(folder, ranks, 2, asynchronous=True)
    checkpoints.save(2)
    ranks.error = ChildProcessError("rank 1 of 2 died")
    with pytest.raises(ChildProcessError, match=r"^rank 1 of 2 died$"):
        checkpoints.finish()
    assert names(folder) == []


def test_what_is_abandoned_is_removed(folder: RunFolder, ranks: HeldRanks) -> None:
    """A checkpoint that nobody will finish is gone, with its temporary folder; those before stay."""
    checkpoints = Checkpoints(folder, ranks, 2, asynchronous=True)
    checkpoints.save(2)
    checkpoints.finish()
    checkpoints.save(4)
    checkpoints.abandon()
    checkpoints.abandon()
    assert names(folder) == ["step-000002"]
    asked = ranks.num_asked
    checkpoints.finish()
    assert ranks.num_asked == asked


def test_a_synchronous_one_is_there_at_once(folder: RunFolder, ranks: HeldRanks) -> None:
    """Without `asynchronous` the ranks are asked to save, and the checkpoint is there when they have."""
    checkpoints = Checkpoints(folder, ranks, 2, asynchronous=False)
    checkpoints.save(2)
    assert names(folder) == ["step-000002"] and ranks.num_asked == 0
