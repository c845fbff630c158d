"""Files that are either whole or absent: written beside their place, flushed to the disk, then renamed over it.

A process killed at any moment leaves the former file or the new one, and at worst a stray `.tmp-` file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

TEMPORARY = ".tmp-"

# POSIX lets the umask be read only by setting it, for all threads; on import there are fewest.
os.umask(_UMASK := os.umask(0))


class RecordError(ValueError):
    """The disk did not take what had to be recorded; the message is one line with the path and the reason."""


@contextlib.contextmanager
def disk_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turns an OSError inside the block into a RecordError that names `path` and the reason.

    To read, `path` must be what `require_regular` takes.
    ChildProcessError passes unchanged: a process that died while writing (a rank of a cluster) says nothing about the
    disk.
    """
    if action == "read":
        require_regular(path)
    try:
        yield
    except ChildProcessError:  # a subclass of OSError
        raise
    except OSError as error:
        raise RecordError(f"cannot {action} {path}: {error.strerror or error}") from error


def require_regular(path: Path) -> None:
    """RecordError for a named pipe or a device, whose reader may wait for ever; absent files and folders pass.

    So does a pipe that the shell opened, such as `<(...)` or /dev/stdin, as its writer is there.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # left to the reader, which says why
        return
    is_opened = stat.S_ISFIFO(mode) and re.fullmatch(r"/dev/fd|/proc/\d+/fd", str(path.resolve().parent))
    if (stat.S_ISFIFO(mode) and not is_opened) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        got = "a named pipe" if stat.S_ISFIFO(mode) else "a device"
        raise RecordError(f"{path}: expected a regular file, got {got}")


def sync_file(path: Path) -> None:
    """Waits until the file's bytes are on the disk, whichever process wrote them."""
    # Windows flushes only what is open for writing.
    with open(path, "r+b" if sys.platform == "win32" else "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the folder's own entries (names, renames) are on the disk; Windows has no such call for folders."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file for the block to write and sync, which replaces `path` in one step when the block ends.

    After a RecordError or an error in the block the former file is as it was.
    """
    path = Path(path)
    with disk_errors(path):
        # In the same folder, because os.replace is atomic within one file system only.
        descriptor, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            # mkstemp makes a private file; a record is as readable as any other file of its owner.
            os.chmod(temporary, 0o666 & ~_UMASK)
            os.replace(temporary, path)
            sync_folder(path.parent)  # else a power cut could undo the rename
        finally:
            temporary.unlink(missing_ok=True)


def atomic_write(path: Path, data: str | bytes) -> None:
    """Replaces the file by `data` (text as UTF-8) in one step; after a RecordError the former file is as it was."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        sync_file(temporary)


def append_line(path: Path, line: bytes) -> None:
    """Appends the line (given without line break), creating the file if absent, and waits until the disk has it.

    A torn line that a killed process left behind is removed first; after a RecordError the others are as they were.
    Only one process may append at a time (`exclusive`): a second could cut off the line that the first is writing.
    """
    with disk_errors(path), open(path, "a+b", buffering=0) as file:
        end = _end_of_last_line(file)
        file.truncate(end)
        _append(file, end, line + b"\n")


def append_bytes(path: Path, data: bytes) -> None:
    """Appends the bytes, creating the file if absent, and waits for the disk; a RecordError appends none."""
    with disk_errors(path), open(path, "a+b", buffering=0) as file:
        _append(file, file.seek(0, os.SEEK_END), data)


def _append(file: io.FileIO, end: int, data: bytes) -> None:
    try:
        # Append mode writes at the end, wherever reading has left the position.
        # The file is unbuffered, so write() counts the bytes that the disk took.
        if (written := file.write(data)) != len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were taken")
        os.fsync(file.fileno())
    except OSError:
        # A full disk may have taken a part of the data: cut it off again, so that no torn line stays.
        file.truncate(end)
        raise


def whole_lines(path: Path) -> list[bytes]:
    """The lines that `append_line` wrote, without a torn last one; none where there is no file."""
    if not path.is_file():
        return []
    with disk_errors(path, "read"):
        # After the last line break comes nothing, or a torn line. splitlines would return the torn line as well.
        return path.read_bytes().split(b"\n")[:-1]


@contextlib.contextmanager
def exclusive(lock: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file, creating it if absent; RecordError(refusal) where another process holds it.

    A killed process holds nothing: the system releases its locks. RecordError where the file system has none.
    """
    # On a file system without locks filelock would fall back to a marker file, which a killed process leaves behind.
    held = FileLock(lock, mode=0o666 & ~_UMASK, fallback_to_soft=False)
    with disk_errors(lock, "lock"):
        try:
            held.acquire(blocking=False)
        except Timeout as error:  # an OSError, too
            raise RecordError(refusal) from error
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `path` when the block ends well and removed when it does not.

    The block need not sync what it writes: all of it is flushed to the disk before the rename.
    """
    path = Path(path)
    with disk_errors(path):
        temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent))
        former = temporary.with_name(f"{temporary.name}-former")
        try:
            os.chmod(temporary, 0o777 & ~_UMASK)
            yield temporary
            # All of it first: after a power cut the folder's own name must not stand for an empty one or empty files.
            for entry in temporary.rglob("*"):
                if entry.is_dir():
                    sync_folder(entry)
                elif entry.is_file():
                    sync_file(entry)
            sync_folder(temporary)
            # A kill between the two renames leaves nothing at `path`, so callers replace no folder that must survive.
            if path.exists():  # no rename replaces a folder that has entries, so the former one moves aside
                os.replace(path, former)
            try:
                os.replace(temporary, path)
            except OSError:
                if former.exists():
                    os.replace(former, path)
                raise
            sync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(former, ignore_errors=True)


def _end_of_last_line(file: io.FileIO) -> int:
    """The size of the file without a torn last line; reads backwards, so that long runs do not slow down."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
