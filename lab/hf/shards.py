"""The weights of a Hugging Face folder, written one tensor at a time: safetensors of a bounded size, and an index.

safetensors' own writer needs all tensors of a file in memory, too much for a large model. The format itself is a header
with every tensor's place, then the bytes: the header needs names, shapes and types alone.
Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from lab.hf.shape import Shape

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest size of a file in bytes, as transformers has it; a larger tensor gets its own file."""

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Stated = Mapping[str, tuple[Shape, torch.dtype]]
"""Shape and type of every tensor by name, in the order in which they are read."""


def write_weights(
    folder: Path, stated: Stated, read: Callable[[str], Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes model.safetensors, or several files and their index where it would have more than `max_shard_bytes`.

    `read` is called once per name and may return a view that the next call overwrites: one tensor is held at a time.
    Raises ValueError where a tensor that it returns is not of the stated shape and type.
    """
    # On the meta device: shapes and types without bytes, all that the plan of the files needs.
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in stated.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_bytes)
    for file, names in plan.filename_to_tensors.items():
        _write_file(folder / file, {name: stated[name] for name in names}, read)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, stated: Stated, read: Callable[[str], Tensor]) -> None:
    # Wider types first, so that each tensor starts at a multiple of its element's size.
    names = sorted(stated, key=lambda name: -stated[name][1].itemsize)
    with open(path, "wb") as file:
        file.write(_header(names, stated))
        for name in names:
            _write_tensor(file, name, stated[name], read(name))


def _header(names: Sequence[str], stated: Stated) -> bytes:
    """The header: its length as a little-endian 64-bit number, then JSON, space-padded to a multiple of 8 bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape, dtype = stated[name]
        end = offset + prod(shape) * dtype.itemsize
        fields[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: IO[bytes], name: str, stated: tuple[Shape, torch.dtype], tensor: Tensor) -> None:
    if (tuple(tensor.shape), tensor.dtype) != (tuple(stated[0]), stated[1]):
        raise ValueError(f"{name}: expected {tuple(stated[0])} {stated[1]}, got {tuple(tensor.shape)} {tensor.dtype}")
    # As uint8, because numpy has no bfloat16.
    file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
