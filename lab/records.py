"""The folder of one run, `runs/<name>/<UTC time>-<config hash>/`: all that it produced, and nothing half-written.

A run that was killed is found again by the hash of its config, its metrics are cut back to the last checkpoint, and it
goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import numbers
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from lab.files import (
    TEMPORARY,
    RecordError,
    append_line,
    atomic_folder,
    atomic_write,
    disk_errors,
    exclusive,
    sync_file,
    whole_lines,
    write_synced,
)
from lab.manifest import manifest
from lab.traces import Trace

RESERVED = ("step", "non_finite")
STATE, SHARDED = "state.json", "sharded.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on after `step`: its tensors by name, and everything else as plain JSON values."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class ShardedCheckpoint:
    """A checkpoint that other processes wrote and read: the step after which a run goes on, and its folder."""

    step: int
    path: Path


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. Writing raises RecordError (one line: path and reason) where the disk refuses."""

    path: Path

    @staticmethod
    def create(root: Path, name: str, config_hash: str, now: datetime) -> RunFolder:
        """A new folder `root/<name>/<UTC time>-<config hash>`; a time that is taken is moved on by whole seconds."""
        if now.tzinfo is None:
            raise ValueError(f"expected a time with a time zone, got {now.isoformat()}")
        for part in (name, config_hash):
            if not re.fullmatch(r"\w[\w.+=-]*", part):
                raise ValueError(f"expected a name of letters, digits and . _ + = -, got {part!r}")
        parent = Path(root) / name
        now = now.astimezone(UTC)
        while True:
            path = parent / f"{now:%Y%m%dT%H%M%SZ}-{config_hash}"
            with disk_errors(path, "make folder"):
                parent.mkdir(parents=True, exist_ok=True)
                try:
                    path.mkdir()
                    return RunFolder(path)
                except FileExistsError:
                    now += timedelta(seconds=1)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The run folder at `path`; ValueError if there is none (a run folder holds config.yaml)."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise ValueError(f"{path}: expected a run folder (with config.yaml), got {_what_is(path)}")
        return RunFolder(path)

    @staticmethod
    def find_resumable(root: Path, name: str, config_hash: str) -> RunFolder | None:
        """The newest run of that name and config hash, if it is unfinished; None otherwise."""
        # A folder whose process died before it wrote its config holds nothing to go on from.
        folders = sorted(p.parent for p in (Path(root) / name).glob(f"*Z-{config_hash}/config.yaml"))
        return RunFolder(folders[-1]) if folders and not RunFolder(folders[-1]).is_finished else None

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end: the verdict is the last thing that it writes before the report."""
        return (self.path / "verdict.json").is_file()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other processes from writing here; RecordError if one does already. A killed process holds nothing."""
        with exclusive(self.path / ".lock", f"cannot write in {self.path}: another process is running this run"):
            yield

    def discard(self) -> None:
        """Removes the folder of a run that could not start."""
        assert not self.metrics(), f"{self.path} has records"
        with disk_errors(self.path, "remove"):
            shutil.rmtree(self.path)

    def write_config(self, text: str) -> None:
        """config.yaml: the resolved configuration."""
        atomic_write(self.path / "config.yaml", text)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """manifest.json: what the run ran on (see `manifest`)."""
        atomic_write(self.path / "manifest.json", _json(manifest))

    def write_verdict(self, verdict: Mapping[str, Any]) -> None:
        """verdict.json: stable or not, and why (see `lab.verdict`); from now on the run is finished."""
        atomic_write(self.path / "verdict.json", _json(verdict))

    def write_report(self, html: str) -> None:
        """report.html: one self-contained page."""
        atomic_write(self.path / "report.html", html)

    def append_metrics(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Adds the line of one global step to metrics.jsonl and waits until the disk has it.

        JSON has no NaN and no infinity: such a value is written as null and its name is listed under `non_finite`.
        A torn line that a killed process left behind is removed first; a full disk leaves the others as they were.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        non_finite = [name for name, value in values.items() if not math.isfinite(value)]
        line: dict[str, Any] = {"step": step, **values, **dict.fromkeys(non_finite)}
        if non_finite:
            line["non_finite"] = non_finite
        append_line(self.path / "metrics.jsonl", json.dumps(line, allow_nan=False).encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order; a torn last line is left out, a torn line before it is a ValueError."""
        path = self.path / "metrics.jsonl"
        records = []
        for number, line in enumerate(whole_lines(path), start=1):
            try:
                record = json.loads(line)
                assert isinstance(record, dict) and isinstance(record["step"], int)
            except (ValueError, KeyError, AssertionError) as error:
                raise ValueError(f"{path}, line {number}: expected a JSON object with a step, got {line!r}") from error
            records.append(record)
        return records

    def truncate_metrics(self, last_step: int) -> None:
        """Drops the lines after `last_step` in one step: what a resumed run will compute again."""
        kept = [line for line in self.metrics() if line["step"] <= last_step]
        atomic_write(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))

    def save_checkpoint(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2
    ) -> Path:
        """checkpoints/step-NNNNNN with tensors.safetensors and state.json, then removes all but the newest `keep`.

        `state` holds JSON values only (JSON keeps every float64 exactly). The folder appears whole, with the SHA-256 of
        both parts inside, so that `latest_checkpoint` can tell a damaged one.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        # Clones, because safetensors refuses tensors that share memory (tied weights).
        data = safetensors.torch.save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        body = {"step": step, "state": dict(state)}
        parts = {"tensors_sha256": _sha256(data), "state_sha256": _sha256(_canonical(body)), **body}
        path = self._new_checkpoint(step)
        with atomic_folder(path) as folder:
            write_synced(folder / "tensors.safetensors", data)
            write_synced(folder / STATE, _json(parts).encode())
        self._prune(keep)
        return path

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None; ValueError with the file's name if its content is damaged."""
        folders = self._checkpoints(STATE)
        return _load_checkpoint(folders[-1]) if folders else None

    def sharded_checkpoint(self, step: int, write: Callable[[Path], object], keep: int = 2) -> Path:
        """checkpoints/step-NNNNNN filled by `write(folder)`, by other processes where it asks them; prunes as above.

        The folder appears whole: files are flushed to the disk, their sizes go into sharded.json, then it is renamed.
        RecordError where `write` left no file in it.
        """
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        path = self._new_checkpoint(step)
        with atomic_folder(path) as folder:
            write(folder)
            with disk_errors(path):
                files = sorted(p for p in folder.rglob("*") if p.is_file())
                if not files:  # written elsewhere: the former checkpoints are all that there is
                    raise RecordError(
                        f"cannot write {path}: expected files in a folder that all machines share, got none"
                    )
                for file in files:
                    sync_file(file)
                sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
            write_synced(folder / SHARDED, _json({"step": step, "bytes": sizes}).encode())
        self._prune(keep)
        return path

    def latest_sharded_checkpoint(self) -> ShardedCheckpoint | None:
        """The newest whole sharded checkpoint, or None; ValueError with the file's name if one is lost or cut."""
        folders = self._checkpoints(SHARDED)
        if not folders:
            return None
        folder = folders[-1]
        try:
            parts = json.loads((folder / SHARDED).read_bytes())
            step, sizes = int(parts["step"]), dict(parts["bytes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / SHARDED}: damaged checkpoint ({error})") from error
        for name, size in sizes.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                raise ValueError(f"{folder / name}: damaged checkpoint (expected {size} bytes, got {found})")
        return ShardedCheckpoint(step, folder)

    def save_trace(self, step: int, trace: Trace) -> Path:
        """rollouts/step-NNNNNN.safetensors: what the step sampled and scored."""
        path = self.path / "rollouts" / f"step-{step:06d}.safetensors"
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
        trace.save(path)
        return path

    def traces(self) -> list[Path]:
        """The trace files, oldest step first; `Trace.load` opens one."""
        return sorted((self.path / "rollouts").glob("step-*.safetensors"), key=_step_of)

    def _new_checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step goes; what a killed process left half-written is removed."""
        path = self.path / "checkpoints" / f"step-{step:06d}"
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            for stray in path.parent.glob(f"{TEMPORARY}*"):
                shutil.rmtree(stray)
        return path

    def _prune(self, keep: int) -> None:
        with disk_errors(self.path / "checkpoints"):
            for old in self._checkpoints(STATE, SHARDED)[:-keep]:
                shutil.rmtree(old)

    def _checkpoints(self, *last_parts: str) -> list[Path]:
        """The checkpoint folders that have one of these last-written parts, oldest step first."""
        folders = (self.path / "checkpoints").glob("step-*")
        return sorted((f for f in folders if any((f / part).is_file() for part in last_parts)), key=_step_of)


def _load_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, both parts compared with the checksums that were written with them."""
    state_path, tensors_path = folder / STATE, folder / "tensors.safetensors"
    try:
        parts = json.loads(state_path.read_bytes())
        body, tensors_sha256 = {"step": parts["step"], "state": parts["state"]}, parts["tensors_sha256"]
        if _sha256(_canonical(body)) != parts["state_sha256"]:
            raise ValueError("its checksum differs from the one written with it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state_path}: damaged checkpoint ({error})") from error
    with disk_errors(tensors_path, "read"):
        data = tensors_path.read_bytes()
    if _sha256(data) != tensors_sha256:
        raise ValueError(f"{tensors_path}: damaged checkpoint (its checksum differs from the one in state.json)")
    return Checkpoint(parts["step"], safetensors.torch.load(data), parts["state"])


def _number(name: str, value: object) -> float | int:
    """The metric's value as a plain number; ValueError for a reserved name or anything that is no number."""
    if name in RESERVED:
        raise ValueError(f"metric name {name!r} is reserved")
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: expected a number, got {type(value).__name__}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _what_is(path: Path) -> str:
    if not path.exists():
        return "nothing there"
    return "a folder without it" if path.is_dir() else "a file"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), indent=2, allow_nan=False) + "\n"


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


__all__ = ["Checkpoint", "RecordError", "RunFolder", "ShardedCheckpoint", "Trace", "atomic_write", "manifest"]
