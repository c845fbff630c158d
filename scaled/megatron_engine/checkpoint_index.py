"""A safe reading of a sharded checkpoint's pickles, with listed classes only, before Megatron reads them.

torch reads the index, `.metadata`, and every value that is no tensor by pickle, which calls whatever a file names.
Whoever can write into a checkpoint's folder could run code in every rank that continues from it. So a file that names
anything beyond the classes of an index is refused, and so is a value that `torch.load(weights_only=True)` refuses; the
rest can do no harm in torch's own reader. Source of the danger: Python's documentation of `pickle`.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

INDEX = ".metadata"
COMMON = "common.pt"
"""Megatron's file for values that are not tensors."""

CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""The types of an index, by module: they only hold values."""

DAMAGED = (OSError, EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError)
"""Errors of reading bytes that are no pickle, or a pickle of something else."""


class _Unpickler(pickle.Unpickler):
    """Knows CLASSES and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 names the module in which it defines its paths; 3.11 and 3.12 have no such module.
        module = "pathlib" if module == "pathlib._local" else module
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def check_pickles(folder: Path) -> None:
    """ValueError, naming the file, where a checkpoint's index or a value names a class that no checkpoint needs."""
    index = read_index(folder / INDEX)
    for key, place in (index.storage_data or {}).items():
        if not isinstance(index.state_dict_metadata.get(key.fqn), BytesStorageMetadata):
            continue
        path = folder / place.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                value = io.BytesIO(file.read(place.length))
            with torch.serialization.safe_globals([io.BytesIO]):  # Megatron's extra states are bytes in one of these
                torch.load(value, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, *DAMAGED) as error:
            raise ValueError(f"{path}: expected plain values, got {key.fqn}, which {_reason(error)}") from None


def read_index(path: Path) -> Metadata:
    """The index of a sharded checkpoint; ValueError, naming the file, where it names a class that no index needs."""
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: expected the index of a checkpoint, got one that names {error}") from None
    except DAMAGED as error:
        raise ValueError(f"{path}: expected the index of a checkpoint, got a damaged file ({error})") from None
    if not isinstance(found, Metadata):
        raise ValueError(f"{path}: expected the index of a checkpoint, got {type(found).__name__}")
    return found


def read_common(folder: Path) -> dict[str, Any]:
    """The checkpoint's values that are not tensors, with the run that wrote it under `about`.

    ValueError, naming the file, where it is damaged or names a class: a pickle of anything else could run code.
    """
    path = folder / COMMON
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return {**found, "about": {**found["about"], "shape": str(found["about"]["shape"])}}
    except (pickle.UnpicklingError, *DAMAGED) as error:
        raise ValueError(f"{path}: expected the description of a checkpoint, got one that {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The class that a pickle names, which torch says amid its advice; else the first line of the error."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"names {named[1]}" if named else f"is damaged ({str(error).strip().partition(chr(10))[0]})"


__all__ = ["COMMON", "DAMAGED", "INDEX", "check_pickles", "read_common", "read_index"]
