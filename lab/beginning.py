"""The start of a run's process, the same in both worlds: what it read and ran on, kept in manifest.json.

A run that continues keeps the manifest of its first process, and what differs now is added to it. It is refused where
its model or its problems changed: the steps to come would be of another run.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.checkpoints import sha256_of_file
from lab.files import disk_errors
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.tasks.block import TaskBlock
from lab.tasks.readers import files

MODEL_FILES = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Suffixes of a Hugging Face folder's config, weights, tokenizer and chat template."""

WHOLE = 64 << 20
"""Bytes up to which a file is hashed whole; the 61 GB of Qwen3-30B-A3B would take minutes at every start."""

PIECES, PIECE = 16, 1 << 20
"""Pieces of a larger file that are hashed, and the bytes of each. Other weights differ in every piece."""

RECORDS = ("inputs", "resumed", "sha256")
"""Keys of manifest.json beside the environment: the input files, later processes, the hashes of a finished run."""


def input_hashes(model: str | None, task: TaskBlock) -> dict[str, str]:
    """Hashes by path of the files that a config only names: the model folder's and the task's."""
    folder = () if model is None else sorted(p for p in Path(model).glob("*") if p.suffix in MODEL_FILES)
    data = itertools.chain.from_iterable(files(name) for name in task.named_files)
    found = {}
    for path in (*folder, *data):
        with disk_errors(path, "read"):
            found[str(path)] = sha256_of_file(path) if path.stat().st_size <= WHOLE else _of_pieces(path)
    return found


def _of_pieces(path: Path) -> str:
    """`sampled:` and the SHA-256 of the size and of PIECES pieces, spread evenly from the first byte to the last."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for i in range(PIECES):
            file.seek((size - PIECE) * i // (PIECES - 1))
            digest.update(file.read(PIECE))
    return f"sampled:{digest.hexdigest()}"


def other_file(inputs: Mapping[str, str], others: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first path with two hashes in the inputs of two processes, and both, shortened; None if all are equal."""
    for path in sorted(inputs.keys() | others.keys()):
        one, other = (hashes.get(path, "no such file") for hashes in (inputs, others))
        if one != other:
            return path, one[:20], other[:20]
    return None


def require_same_inputs(folder: RunFolder, inputs: Mapping[str, str]) -> None:
    """ConfigError, naming the first file, where a run that continues would read others than it began with."""
    # Empty for a run that begins.
    found = other_file(folder.manifest().get("inputs") or inputs, inputs)
    if found is not None:
        path, old, new = found
        raise ConfigError(
            f"{path}: expected the file with which the run in {folder.path} began ({old}), got another ({new}); put it "
            "back, or start again with --fresh"
        )


def record_process(folder: RunFolder, environment: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Writes manifest.json, or adds this process to `resumed` there, with all in which it differs from the first.

    What this process lacks, as the commit outside a checkout, is null there. Says so on stderr where something differs:
    the bits may, too.
    """
    first = folder.manifest()
    if not first:
        folder.write_manifest({**environment, "inputs": dict(inputs)})
        return
    names = dict.fromkeys([*environment, *(name for name in first if name not in RECORDS)])
    differing = {name: environment.get(name) for name in names if first.get(name) != environment.get(name)}
    if differing:
        print(
            f"{folder.path} continues with another {', '.join(differing)} than it began with: its numbers may differ "
            "from those of a run that was never stopped",
            file=sys.stderr,
        )
    entry = {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", **differing}
    folder.write_manifest(first | {"resumed": [*first.get("resumed", []), entry]})
