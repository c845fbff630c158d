"""The checkpoints of a run on a cluster: ranks write them, the driver publishes each once all have finished.

A checkpoint that is written while the run continues is published between two steps, or before the next one begins.
Until then its folder is a temporary one, so that a killed run continues from the checkpoint before.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

import safetensors.torch

from lab.backlog import from_tensors, to_tensors
from lab.files import disk_errors
from lab.records import RunFolder
from theory.contracts import Task
from theory.oversampling import Backlog


@runtime_checkable
class Saving(Protocol):
    """The part of a group of ranks that writes checkpoints."""

    def save(self, folder: Path) -> None:
        """Writes every rank's part."""
        ...

    def begin_save(self, folder: Path) -> None:
        """Begins to write every rank's part."""
        ...

    def has_saved(self, wait: bool = False) -> bool:
        """Whether all parts are written."""
        ...


BACKLOG = "backlog.safetensors"


def _write_backlog(folder: Path, backlog: Backlog | None) -> None:
    """Writes it after the ranks, which want an empty folder."""
    if backlog is not None:
        with disk_errors(folder):
            safetensors.torch.save_file(to_tensors(backlog), folder / BACKLOG)


def read_backlog(checkpoint: Path, task: Task) -> Backlog | None:
    """The responses in progress at this checkpoint; None where it has none."""
    path = checkpoint / BACKLOG
    return from_tensors(safetensors.torch.load_file(path), task) if path.is_file() else None


class _Abandoned(Exception):
    """A checkpoint that nobody will finish."""


class Checkpoints:
    """Saves into a run's folder and keeps the newest `keep`; at most one is being written.

    Raises the ranks' errors, and RecordError where the disk fails; the checkpoint at hand is then not published.
    """

    def __init__(self, folder: RunFolder, ranks: Saving, keep: int, asynchronous: bool):
        self.folder, self.ranks, self.keep, self.asynchronous = folder, ranks, keep, asynchronous
        self._open: ExitStack | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint has been begun and is neither published nor abandoned."""
        return self._open is not None

    def save(self, step: int, backlog: Backlog | None = None) -> None:
        """Saves after that step; where asynchronous, returns once the ranks have copied their parts.

        `backlog` goes into a file of its own, with its routes, which are fetched for it.
        """
        if not self.asynchronous:
            with self.folder.sharded(step, self.keep) as folder:
                self.ranks.save(folder)
                _write_backlog(folder, backlog)
            return
        self.finish()
        with ExitStack() as stack:
            folder = stack.enter_context(self.folder.sharded(step, self.keep))
            self.ranks.begin_save(folder)
            _write_backlog(folder, backlog)
            self._open = stack.pop_all()  # the folder's context stays open: its exit publishes

    def poll(self) -> None:
        """Publishes the checkpoint if it is written; does not wait."""
        self._settle(wait=False)

    def finish(self) -> None:
        """Waits until all is written and publishes it."""
        self._settle(wait=True)

    def abandon(self) -> None:
        """Removes the unfinished checkpoint; ranks may still be writing it, and must not be used again."""
        stack, self._open = self._open, None
        if stack is not None:
            # An exception makes the folder's context remove it.
            stack.__exit__(_Abandoned, _Abandoned(), None)

    def _settle(self, wait: bool) -> None:
        stack, self._open = self._open, None
        if stack is None:
            return
        with stack:  # its exit publishes, and turns an error of the disk into a RecordError
            if not self.ranks.has_saved(wait):
                self._open = stack.pop_all()


__all__ = ["Checkpoints", "Saving", "read_backlog"]
