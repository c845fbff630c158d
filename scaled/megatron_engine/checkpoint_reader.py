"""The weights in a sharded checkpoint, one parameter at a time, under their Hugging Face names; needs no Megatron.

Each parameter is joined from the pieces that the ranks wrote, whatever their layout was. torch reads these pieces. The
index is a pickle, which could run code, so `checkpoint_index` reads it and refuses all but an index's own classes.
"""

from __future__ import annotations

import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lab.hf import ModelShape
from lab.hf.shards import Stated
from scaled.megatron_engine.checkpoint_index import DAMAGED, INDEX, read_common, read_index
from scaled.megatron_engine.names import Stored, stored


class _Into(LoadPlanner):
    """A load planner that makes torch's reader copy into one tensor; the plan itself is `CheckpointReader`'s."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensor[tuple(slice(start, start + length) for start, length in place)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # `resolve_tensor` gave a view, and the reader has copied into it

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a plan was requested, but CheckpointReader makes it")

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner  # type: ignore[assignment]


class CheckpointReader:
    """The weights of `shape` in a checkpoint's folder.

    about: the shape and precision of the run that wrote it, and whether it had a distributed optimizer and a predictor.
    stated: shape and dtype of every weight by Hugging Face name.
    Raises ValueError, naming the file or the folder, where it is damaged, or of another model.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self.folder = folder
        self.about = read_common(folder)["about"]
        self._index = read_index(folder / INDEX)
        if self.about["shape"] != repr(shape):
            raise ValueError(
                f"{folder}: expected a checkpoint of the config's model, {shape}, got one of {self.about['shape']}"
            )
        self._files = FileSystemReader(folder)
        self._files.set_up_storage_reader(self._index, is_coordinator=True)
        self._places = {name: (one, part) for one in stored(shape) for part, name in enumerate(one.rule.names)}
        self._held: tuple[Stored, Tensor] | None = None
        self.stated: Stated = {
            name: (size, self._stated(self._places[name][0]).dtype) for name, size in shape.weights().items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, bit for bit as trained.

        Keeps the Megatron parameter that contains it in memory, since the next name is often another part of it. Raises
        ValueError, naming the file, where a piece is missing or damaged.
        """
        one, part = self._places[name]
        if self._held is None or self._held[0] is not one:
            self._held = None  # free it before the next one is read
            self._held = one, self._parameter(one)
        return one.rule.parts(self._held[1])[part].reshape(one.rule.shapes[part])

    def _stated(self, one: Stored) -> Any:
        entry = self._index.state_dict_metadata.get(one.key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{self.folder / INDEX}: expected the weights of the config's model, got no {one.key}")
        return entry.properties

    def _parameter(self, one: Stored) -> Tensor:
        entry: Any = self._index.state_dict_metadata[one.key]
        sizes = one.rule.shapes
        # The parameter's shape by its Hugging Face parts: without the rows that pad a vocabulary.
        rows = (sum(size[0] for size in sizes), *sizes[0][1:])
        start, size = ((), rows) if one.expert is None else ((one.expert,), (1, *rows))
        wanted = ChunkStorageMetadata(torch.Size((*start, *(0 for _ in rows))), torch.Size(size))
        items = create_read_items_for_chunk_list(one.key, entry, [wanted])
        # `torch.empty` below: a piece that the index lacks would keep what the memory held before.
        if sum(prod(item.lengths) for item in items) != prod(size):
            raise ValueError(f"{self.folder / INDEX}: expected all pieces of {one.key}, got some of them")
        whole = torch.empty(size, dtype=entry.properties.dtype)
        for item in items:  # one by one, so that the error names the damaged file
            file = self.folder / self._files.storage_data[item.storage_index].relative_path
            try:
                self._files.read_data(LoadPlan([item]), _Into(whole)).wait()
            except (pickle.UnpicklingError, AssertionError, *DAMAGED) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(f"{file}: damaged checkpoint, cannot read {one.key} ({reason})") from None
        return whole.reshape(rows)


__all__ = ["CheckpointReader"]
