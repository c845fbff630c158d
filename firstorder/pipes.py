"""Output whose reader may go away, such as `| head -1`: the command goes on in silence and keeps its own exit code.

A run's results are its folder, not its lines, so a closed pipe is no reason to end it. A full disk is an error, which
names the stream.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _Lasting(io.FileIO):
    """A file for writing; once its reader is gone, or its disk full, whatever is written is dropped."""

    def write(self, data: Any, /) -> int:
        """The number of bytes taken. OSError, with the stream's name, where the disk takes none."""
        if not len(data):  # how libraries ask whether a stream is binary; a full device refuses even that
            return 0
        try:
            return super().write(data)
        except BrokenPipeError:
            self._drop()
            return super().write(data)
        except OSError as error:
            # Once is enough: Python writes what a buffer still holds again as the process ends.
            self._drop()
            name = {1: "stdout", 2: "stderr"}.get(self.fileno())
            raise OSError(error.errno, error.strerror, name) from error

    def _drop(self) -> None:
        # The descriptor itself, because processes that the command starts write to it, too.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def outlive_readers() -> None:
    """Makes stdout and stderr drop what is written after their reader has gone."""
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    """The stream over the same descriptor, or itself where it is none, as on a Windows console."""
    if not isinstance(stream, io.TextIOWrapper):  # None, too, where the descriptor was closed from the start
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)  # under `python -u` there is no buffer in between
    if type(raw) is not io.FileIO:
        return stream
    file = _Lasting(raw.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        file if raw is stream.buffer else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
