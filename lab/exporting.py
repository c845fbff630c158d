"""A model's export to a Hugging Face folder: whole or absent, and never over anything else."""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.files import TEMPORARY, atomic_folder, disk_errors
from lab.tasks.tokenizers import TOKENIZER_FILES

COPIED = (
    *TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""The files copied from the folder that the model was opened from."""


def write_folder(to: Path, fill: Callable[[Path], None]) -> bool:
    """Creates the folder and has `fill` write into it, whole or not at all; False where this export exists already.

    Raises ValueError where `to` holds anything else, RecordError where the disk refuses.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        if to.is_dir() and _holds(to, fill):
            return False
        raise ValueError(f"--to: expected a folder that is empty, absent or holds exactly this export, got {to}")
    with disk_errors(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(to) as folder:
            fill(folder)
    return True


def has_tokenizer(folder: Path) -> bool:
    """Whether a Hugging Face folder has the file of a tokenizer, whatever others are about it."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copies the tokenizer's files; False, and nothing is copied, where there is no tokenizer.

    The end tokens in a generation config mean nothing without it.
    """
    if not has_tokenizer(source):
        return False
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return True


def _holds(to: Path, fill: Callable[[Path], None]) -> bool:
    """Whether the folder has the files that `fill` writes, byte for byte, and no others."""
    # Beside the folder, not in /tmp: this disk has room for an export already.
    with disk_errors(to), tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}{to.name}-", dir=to.parent) as name:
        scratch = Path(name)
        fill(scratch)
        if {p.name for p in to.iterdir()} != {p.name for p in scratch.iterdir()}:
            return False
        # Not shallow, which takes equal sizes and times for equal bytes.
        return all(filecmp.cmp(to / p.name, p, shallow=False) for p in scratch.iterdir())
