"""safetensors files, written whole or not at all, and to the same bytes by every process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from lab.files import RecordError, atomic_file, sync_file


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replaces the safetensors file in one step; contiguous tensors that share no memory are not copied.

    Metadata are sorted by name, because safetensors' own order changes from process to process. After a RecordError the
    former file is as it was.
    """
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor in own.values())
    # safetensors refuses tensors that share memory (tied weights, views of one buffer).
    own = {name: x.clone() if storages[x.untyped_storage().data_ptr()] > 1 else x for name, x in own.items()}
    with atomic_file(path) as temporary:
        try:
            safetensors.torch.save_file(own, temporary, None if metadata is None else dict(metadata))
        except safetensors.SafetensorError as error:
            raise RecordError(f"cannot write {path}: {error}") from error
        if metadata is not None:
            _order(temporary)
        sync_file(temporary)


def _order(path: Path) -> None:
    """Rewrites the header with its metadata sorted by name, which does not change its length."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size, (len(text), size)
        # Padded with spaces, as the format allows: the offsets of the tensors count from the header's end.
        file.seek(8)
        file.write(text.ljust(size))


__all__ = ["write_tensors"]
