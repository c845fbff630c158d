"""The checkpoints of a run folder: each is read whole, or refused with the name of its damaged file.

One kind holds all tensors of one process, with checksums; the other the files of many processes, with their sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from torch import Tensor

from lab.files import RecordError, atomic_folder, disk_errors
from lab.strict import parse_json, short

STATE, SHARDED = "state.json", "sharded.json"
"""The file that each kind of checkpoint writes last; its presence marks the checkpoint as complete."""


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run continues after `step`: tensors by name, everything else as plain JSON values."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class ShardedCheckpoint:
    """A checkpoint that other processes wrote and read: the step after which a run continues, and its folder."""

    step: int
    path: Path


Found = TypeVar("Found", Checkpoint, ShardedCheckpoint)


def newest(folders: Sequence[Path], load: Callable[[Path], Found]) -> Found | None:
    """The last of these checkpoints, given from the oldest to the newest; None if there is none.

    Raises ValueError if it is damaged, naming the newest whole one before it. The user decides whether to continue from
    that one, because other files may be damaged too.
    """
    for folder in folders[-1:]:
        try:
            return load(folder)
        except ValueError as error:
            offer = older(folders, load) or "no other one is whole: start again with --fresh"
            raise ValueError(f"{error}; {offer}") from error
    return None


def older(
    folders: Sequence[Path], load: Callable[[Path], Checkpoint | ShardedCheckpoint], last: int | None = None
) -> str | None:
    """Advice to continue from the newest whole one but the last, of at most `last` steps; None if there is none.

    `folders` are given from the oldest to the newest.
    """
    for index in reversed(range(len(folders) - 1)):
        with contextlib.suppress(ValueError):
            step = load(folders[index]).step
            if last is None or step <= last:
                newer = " and ".join(map(str, folders[index + 1 :]))
                return f"that of step {step} is whole: remove {newer} to continue from it"
    return None


def read(folder: Path) -> Checkpoint | ShardedCheckpoint:
    """The checkpoint of either kind in `folder`; raises ValueError as below."""
    return read_checkpoint(folder) if (folder / STATE).is_file() else read_shards(folder)


def read_shards(folder: Path) -> ShardedCheckpoint:
    """The sharded checkpoint in `folder`; raises ValueError, naming the file, where a size is not the recorded one."""
    try:
        parts = _object(folder / SHARDED, "step", "bytes")
        step, sizes = int(parts["step"]), dict(parts["bytes"])
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder / SHARDED}: damaged checkpoint ({error})") from error
    # Compare sizes alone: checksums would read every byte of a cluster's checkpoint once more.
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise ValueError(f"{folder / name}: damaged checkpoint (expected {size} bytes, got {found})")
    return ShardedCheckpoint(step, folder)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, with both files checked against the checksums saved with them.

    Raises ValueError, naming the file, where one is damaged or cannot be read.
    """
    state_path, tensors_path = folder / STATE, folder / "tensors.safetensors"
    try:
        parts = _object(state_path, "step", "state", "tensors_sha256", "state_sha256")
        body, tensors_sha256 = {"step": parts["step"], "state": parts["state"]}, parts["tensors_sha256"]
        # The checksum is of the canonical form, as other white space or another order of keys is no damage.
        if sha256(canonical(body)) != parts["state_sha256"]:
            raise ValueError("its checksum differs from the one written with it")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{state_path}: damaged checkpoint ({error})") from error
    # Read once, so that the checksum is of the bytes that are loaded.
    with disk_errors(tensors_path, "read"):
        data = tensors_path.read_bytes()
    if sha256(data) != tensors_sha256:
        raise ValueError(f"{tensors_path}: damaged checkpoint (its checksum differs from the one in state.json)")
    return Checkpoint(parts["step"], safetensors.torch.load(data), parts["state"])


def _object(path: Path, *keys: str) -> dict[str, Any]:
    """The JSON object in a file; ValueError where it holds another value or lacks one of these keys."""
    value = parse_json(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {short(value)}")
    for key in keys:
        if key not in value:
            raise ValueError(f"{key}: missing")
    return value


def write_checkpoint(path: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Writes the folder `path`, whole or not at all: tensors.safetensors, and state.json with both parts' SHA-256."""
    # Clones, because safetensors refuses tensors that share memory (tied weights).
    data = safetensors.torch.save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    body = {"step": step, "state": dict(state)}
    # Checksums of the bytes in memory, so that a read finds whatever the disk changed.
    parts = {"tensors_sha256": sha256(data), "state_sha256": sha256(canonical(body)), **body}
    with atomic_folder(path) as folder:
        (folder / "tensors.safetensors").write_bytes(data)
        (folder / STATE).write_bytes((json.dumps(parts, indent=2, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def shards_written(path: Path, step: int) -> Iterator[Path]:
    """A temporary folder for the block to fill, which then becomes `path`, with the sizes of its files in sharded.json.

    Raises RecordError where the block left no file and where the disk fails; `path` is then as before.
    """
    with atomic_folder(path) as folder:
        yield folder
        with disk_errors(path):
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            # Without this check an empty checkpoint would be published, and push out the former ones.
            if not files:
                raise RecordError(f"cannot write {path}: expected files in a folder that all machines share, got none")
            sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
        # Written last, as it marks the checkpoint as complete.
        (folder / SHARDED).write_bytes((json.dumps({"step": step, "bytes": sizes}, indent=2) + "\n").encode())


def canonical(value: Mapping[str, Any]) -> bytes:
    """A state's JSON with sorted keys: the bytes of its checksum. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def sha256(data: bytes) -> str:
    """SHA-256 in hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file in hex digits, read a part at a time, since a trace has the routes of a whole batch."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
