"""Output whose reader may go away, such as `| head -1`: the command goes on in silence and keeps its own exit code.

A run's results are its folder, not its lines, so a closed pipe is no reason to end it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _Lasting(io.FileIO):
    """A file for writing; once its reader is gone, whatever is written is dropped."""

    def write(self, data: Any, /) -> int:
        """The number of bytes taken."""
        try:
            return super().write(data)
        except BrokenPipeError:
            # The descriptor itself, because processes that the command starts write to it, too.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)


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
