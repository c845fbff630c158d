"""safetensors files, written whole or not at all, and to the same bytes by every process."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lab.files import RecordError, atomic_file, disk_errors, sync_file

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The types of the format, by its own names."""

CHUNK = 2**24
"""Bytes that are handed to the disk in one call."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A tensor that is written a part at a time: its parts along the first axis, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]


def write_evidence(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], what: str) -> str:
    """Writes what a failure leaves; a clause for its line, which says where `what` is, or why it could not be written.

    The clause begins with "; ". It is the failure that must be reported: an error of the disk does not replace it.
    """
    try:
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_tensors(path, tensors, metadata)
    except RecordError as error:
        return f"; {error}"
    return f"; {what} are in {path}"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Blocks], metadata: Mapping[str, str] | None = None
) -> None:
    """Replaces the safetensors file in one step; contiguous tensors are not copied.

    Metadata are sorted by name, because safetensors' own order changes from process to process. After a RecordError the
    former file is as it was.
    """
    # Wide types first, so that every tensor starts at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in names:
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8, where the data are to begin.
    text = text.ljust(-(-len(text) // 8) * 8)
    with atomic_file(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                value = tensors[name]
                written = sum(_write(file, part) for part in ([value] if isinstance(value, Tensor) else value.parts()))
                expected = math.prod(value.shape) * value.dtype.itemsize
                # The header is written: with a part missing, every later tensor would be read from a wrong place.
                if written != expected:
                    raise RecordError(f"cannot write {path}: expected {expected} bytes of {name}, got {written}")
        sync_file(temporary)


def _write(file: io.BufferedWriter, tensor: Tensor) -> int:
    if tensor.numel() == 0:  # torch has no view of nothing in another type
        return 0
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):
        file.write(data[start : start + CHUNK])  # a slice of a memoryview, so no copy
    return len(data)
