"""The checkpoints of a run on a cluster: ranks write them, the driver publishes each once all have finished.

A checkpoint that is written while the run continues is published between two steps, or before the next one begins.
Until then its folder is a temporary one, so that a killed run continues from the checkpoint before.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

from lab.records import RunFolder


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

    def save(self, step: int) -> None:
        """Saves after that step; where asynchronous, returns once the ranks have copied their parts."""
        if not self.asynchronous:
            self.folder.sharded_checkpoint(step, self.ranks.save, self.keep)
            return
        self.finish()
        with ExitStack() as stack:
            self.ranks.begin_save(stack.enter_context(self.folder.sharded(step, self.keep)))
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


__all__ = ["Checkpoints", "Saving"]
