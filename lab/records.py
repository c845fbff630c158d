"""The folder of one run, `runs/<name>/<UTC time>-<config hash>/`: all that it produced, and nothing half-written.

A killed run is found again by the hash of its config; its metrics are cut back to the last checkpoint, from which it
continues.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from lab import checkpoints
from lab.checkpoints import SHARDED, STATE, Checkpoint, ShardedCheckpoint
from lab.files import TEMPORARY, RecordError, append_line, atomic_write, disk_errors, exclusive
from lab.manifest import manifest
from lab.run_files import StoredManifest, StoredVerdict, metrics_line, read_rows, read_stored
from lab.traces import Apart, Trace


def dated_folder(parent: Path, now: datetime, suffix: str = "") -> Path:
    """A new folder `parent/<UTC time><suffix>`; a taken time is advanced by whole seconds. Raises RecordError."""
    now = now.astimezone(UTC)
    while True:
        path = parent / f"{now:%Y%m%dT%H%M%SZ}{suffix}"
        with disk_errors(path, "make folder"):
            parent.mkdir(parents=True, exist_ok=True)
            try:  # mkdir fails where the folder exists, so that two processes never share one
                path.mkdir()
                return path
            except FileExistsError:
                now += timedelta(seconds=1)


@dataclass(frozen=True)
class RunFolder:
    """One run on disk. Writing raises RecordError (one line: path and reason) where the disk refuses."""

    path: Path

    @staticmethod
    def create(root: Path, name: str, config_hash: str, now: datetime) -> RunFolder:
        """A new folder `root/<name>/<UTC time>-<config hash>`; a taken time is advanced by whole seconds."""
        if now.tzinfo is None:
            raise ValueError(f"expected a time with a time zone, got {now.isoformat()}")
        for part in (name, config_hash):  # parts of a path and of a glob pattern: no separator, no `*`
            if not re.fullmatch(r"\w[\w.+=-]*", part):
                raise ValueError(f"expected a name of letters, digits and . _ + = -, got {part!r}")
        return RunFolder(dated_folder(Path(root) / name, now, f"-{config_hash}"))

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The run folder at `path`; ValueError if there is none (a run folder holds config.yaml)."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            got = ("a folder without it" if path.is_dir() else "a file") if path.exists() else "nothing there"
            raise ValueError(f"{path}: expected a run folder (with config.yaml), got {got}")
        return RunFolder(path)

    @staticmethod
    def find_newest(root: Path, name: str, config_hash: str) -> RunFolder | None:
        """The newest folder of that name and config hash; None where there is none."""
        # A folder whose process died before it wrote its config holds nothing to continue from.
        folders = _by_age(Path(root) / name, f"*Z-{config_hash}")
        return RunFolder(folders[-1]) if folders else None

    @staticmethod
    def find_resumable(root: Path, name: str, config_hash: str) -> RunFolder | None:
        """The newest run of that name and config hash, if it lacks steps, verdict or page; None otherwise."""
        newest = RunFolder.find_newest(root, name, config_hash)
        if newest is None or (newest.is_finished and (newest.path / "report.html").is_file()):
            return None
        return newest

    @property
    def is_finished(self) -> bool:
        """Whether the run took its last step: the verdict is the last file that it writes before its page."""
        return (self.path / "verdict.json").is_file()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps other processes from writing here; RecordError if one does already. A killed process holds nothing.

        The temporary files that it left behind are removed.
        """
        with exclusive(self.path / ".lock", f"cannot write in {self.path}: another process is running this run"):
            with disk_errors(self.path, "clean"):
                for stray in self.path.rglob(f"{TEMPORARY}*"):  # of a killed process, for nobody else writes here now
                    shutil.rmtree(stray) if stray.is_dir() else stray.unlink(missing_ok=True)
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
        """manifest.json: the run's environment and input files (see `lab.beginning`)."""
        atomic_write(self.path / "manifest.json", _json(manifest))

    def hashes(self) -> dict[str, str]:
        """SHA-256 in hex digits of config, metrics, traces and the last-written part of each checkpoint, by path.

        That part holds the checksums of the checkpoint's tensors, or the sizes of its files.
        """
        files = [self.path / "config.yaml", self.path / "metrics.jsonl", *self.traces()]
        files += [folder / part for folder in self._checkpoints(STATE, SHARDED) for part in (STATE, SHARDED)]
        with disk_errors(self.path, "read"):
            return {str(f.relative_to(self.path)): checkpoints.sha256_of_file(f) for f in files if f.is_file()}

    def seal(self) -> None:
        """Adds `hashes` to manifest.json, by which the records of a finished run can be checked later."""
        self.write_manifest(self.manifest() | {"sha256": self.hashes()})

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
        append_line(self.path / "metrics.jsonl", metrics_line(step, metrics))

    def append_timing(self, step: int, seconds: Mapping[str, float]) -> None:
        """Adds the seconds of one global step to timing.jsonl; metrics.jsonl repeats to the bit, and times do not."""
        line = {"step": step, **{name: round(value, 6) for name, value in seconds.items()}}
        append_line(self.path / "timing.jsonl", json.dumps(line, allow_nan=False).encode())

    def timing(self) -> dict[int, dict[str, Any]]:
        """The lines of timing.jsonl by step, the last of each (a resumed run repeats some); none without a file."""
        return {record["step"]: record for _, record in read_rows(self.path / "timing.jsonl")}

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, steps ascending; without a torn last line; ValueError for any other bad line."""
        records: list[dict[str, Any]] = []
        for where, record in read_rows(self.path / "metrics.jsonl"):
            if records and record["step"] <= records[-1]["step"]:
                before = records[-1]["step"]
                raise ValueError(f"{where}: step: expected one above {before} of the line before, got {record['step']}")
            records.append(record)
        return records

    def verdict(self) -> dict[str, Any] | None:
        """The content of verdict.json; None for a run that has not ended, ValueError for a malformed file."""
        return read_stored(self.path / "verdict.json", StoredVerdict)

    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json, empty where there is none; ValueError for a malformed file."""
        return read_stored(self.path / "manifest.json", StoredManifest) or {}

    def truncate_metrics(self, last_step: int) -> None:
        """Drops the lines after `last_step`, which a resumed run computes again, in one replacement of the file.

        ValueError names the first step up to it that has no line (the run could get no verdict), and the way on.
        """
        path = self.path / "metrics.jsonl"
        kept = [line for line in self.metrics() if line["step"] <= last_step]
        steps = [line["step"] for line in kept]
        # Step 0 needs no row: `RunRecorder.begin` writes it where it is missing.
        if last_step > 0 and len(steps) <= last_step:
            missing = next(i for i in range(last_step + 1) if i >= len(steps) or steps[i] != i)
            got = f"none of step {missing}" if steps else "none at all"
            offer = checkpoints.older(self._checkpoints(STATE, SHARDED), checkpoints.read, last=missing - 1)
            offer = offer or "without them it has no verdict: start again with --fresh"
            wanted = f"the rows up to step {last_step}, from whose checkpoint the run continues"
            raise ValueError(f"{path}: expected {wanted}, got {got}; {offer}")
        # JSON gives a float back by its shortest text, so the kept lines stay the same bytes.
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))

    def save_checkpoint(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2
    ) -> Path:
        """Writes checkpoints/step-NNNNNN (tensors.safetensors and state.json), then removes all but the newest `keep`.

        `state` holds JSON values only (JSON keeps every float64 exactly). The folder appears whole, with the SHA-256 of
        both parts inside, so that `latest_checkpoint` can recognise a damaged one.
        """
        path = self._new_checkpoint(step, keep)
        checkpoints.write_checkpoint(path, step, tensors, state)
        self._prune(keep)
        return path

    def checkpoint(self, step: int | None = None) -> Path:
        """The folder of the checkpoint of `step`, by default of the newest one; ValueError where there is none."""
        folders = {_step_of(path): path for path in self._checkpoints(STATE, SHARDED)}
        if not folders:
            raise ValueError(
                f"{self.path}: expected a run with a checkpoint, got none; its config exports where it starts"
            )
        chosen = max(folders) if step is None else step
        if chosen not in folders:
            kept = ", ".join(map(str, sorted(folders)))
            raise ValueError(f"--step: expected a step whose checkpoint the run has kept ({kept}), got {step}")
        return folders[chosen]

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, or None; if it is damaged, ValueError names the file and an older whole checkpoint."""
        return checkpoints.newest(self._checkpoints(STATE), checkpoints.read_checkpoint)

    @contextlib.contextmanager
    def sharded(self, step: int, keep: int = 2) -> Iterator[Path]:
        """The folder of a sharded checkpoint, to be filled in the block; it counts only once the block has succeeded.

        It then appears whole: files are flushed to the disk, their sizes go into sharded.json, and it is renamed.
        Prunes as above. RecordError where the block left no file in the folder.
        """
        with checkpoints.shards_written(self._new_checkpoint(step, keep), step) as folder:
            yield folder
        self._prune(keep)

    def latest_sharded_checkpoint(self) -> ShardedCheckpoint | None:
        """The newest sharded checkpoint, or None; ValueError as above if a file of it is lost or cut."""
        return checkpoints.newest(self._checkpoints(SHARDED), checkpoints.read_shards)

    def save_trace(self, step: int, trace: Trace, apart: Apart | None = None) -> Path:
        """Writes rollouts/step-NNNNNN.safetensors, the step's samples and scores; `apart` as of `Trace.save`."""
        path = self.path / "rollouts" / f"step-{step:06d}.safetensors"
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
        trace.save(path, apart)
        return path

    def traces(self) -> list[Path]:
        """The trace files, oldest step first; `Trace.load` opens one."""
        paths = (self.path / "rollouts").glob("step-*.safetensors")
        return sorted((path for path in paths if re.fullmatch(r"step-\d+", path.stem)), key=_step_of)

    def _new_checkpoint(self, step: int, keep: int) -> Path:
        """The path of a step's checkpoint, beside which `keep` - 1 older ones are kept."""
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 checkpoint, got {keep}")
        path = self.path / "checkpoints" / f"step-{step:06d}"
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
        return path

    def _prune(self, keep: int) -> None:
        with disk_errors(self.path / "checkpoints"):
            for old in self._checkpoints(STATE, SHARDED)[:-keep]:
                # Renamed first: of a folder half removed by a kill, the next `hold` removes the rest.
                shutil.rmtree(old.rename(old.with_name(f"{TEMPORARY}{old.name}")))

    def _checkpoints(self, *last_parts: str) -> list[Path]:
        """The checkpoint folders that have one of these last-written parts, oldest step first."""
        folders = (f for f in (self.path / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", f.name))
        return sorted((f for f in folders if any((f / part).is_file() for part in last_parts)), key=_step_of)


def run_folders(path: Path) -> list[Path]:
    """The run folders in a folder of runs, the newest last; the path alone where it is one itself or holds none."""
    inside = _by_age(path, "*")
    return inside if inside and not (path / "config.yaml").is_file() else [path]


def _by_age(parent: Path, pattern: str) -> list[Path]:
    """The run folders of this pattern, oldest first: their names begin with the UTC time."""
    return sorted(config.parent for config in parent.glob(f"{pattern}/config.yaml"))


def _step_of(path: Path) -> int:
    # By number: as text, step-1000000 comes before step-999999.
    return int(path.stem.removeprefix("step-"))


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), indent=2, allow_nan=False) + "\n"


__all__ = ["RecordError", "RunFolder", "atomic_write", "manifest"]
