"""Named tensors as bytes with an index, in buckets of bounded size: the form in which they enter the object store.

Ray writes the pieces of a bucket straight into its shared memory, and receivers view them there without a copy. Tensors
travel as uint8, since numpy has no bfloat16; every bit survives.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from theory.contracts import NamedTensors

ALIGNMENT = 64
"""Bytes: every tensor starts at a multiple of this, so that it can be viewed in its own dtype."""

AS_IT_LIES = 64 * 2**10
"""Bytes from which a tensor is a piece of a bucket as it lies: of smaller ones the pieces cost a sender and two
receivers as much time as the copy."""


@dataclass(frozen=True)
class Entry:
    """One tensor's place in a bucket: `piece` is a number, `start` and `num_bytes` count bytes of that piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: int
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some named tensors as pieces of bytes: the first has the small ones, each other one is a large tensor."""

    entries: tuple[Entry, ...]
    # Ray writes arrays straight into its shared memory, each as a buffer of its own.
    pieces: tuple[np.ndarray, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(int(piece.nbytes) for piece in self.pieces)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name, as views of the bucket's memory: read or copy them, never write to them."""
        flat = [_flat(piece) for piece in self.pieces]
        for entry in self.entries:
            yield entry.name, _view(flat[entry.piece], entry)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, a view as those of `tensors`."""
        entry = next(entry for entry in self.entries if entry.name == name)
        return _view(_flat(self.pieces[entry.piece]), entry)


def _flat(piece: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # Ray's memory is read-only, of which torch warns, as it has no read-only tensors. Nobody writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(piece)


def _view(flat: Tensor, entry: Entry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    if entry.num_bytes == 0:  # torch has no view of an empty tensor in another dtype
        return torch.empty(entry.shape, dtype=dtype)
    return flat[entry.start : entry.start + entry.num_bytes].view(dtype).view(entry.shape)


EMPTY = Bucket((), ())
"""A bucket without tensors."""


class Filling:
    """A bucket that is being filled; `memory` has room for the tensors that are copied."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self.entries: list[Entry] = []
        self.whole: list[np.ndarray] = []
        self.copied = self.num_bytes = 0

    def add(self, name: str, tensor: Tensor, as_it_lies: bool) -> None:
        if as_it_lies:
            piece, start = 1 + len(self.whole), 0
            self.whole.append(tensor.detach().view(-1).view(torch.uint8).numpy())
        else:
            piece, start = 0, aligned(self.copied)
            # The gap travels, too, and uninitialised bytes would differ from run to run.
            self.memory[self.copied : start] = 0
            self.copied = start + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.entries.append(Entry(name, dtype, tuple(tensor.shape), piece, start, tensor.nbytes))
        if piece == 0:
            # At once, also from a GPU and from a tensor with strides: no copy of the tensor in between.
            _view(torch.from_numpy(self.memory), self.entries[-1]).copy_(tensor.detach())
        self.num_bytes = aligned(self.num_bytes) + tensor.nbytes

    def close(self) -> Bucket:
        return Bucket(tuple(self.entries), (self.memory[: self.copied], *self.whole))


def can_stay(tensor: Tensor) -> bool:
    """Whether a bucket can have the tensor as it lies in this process's memory, and gains by it."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes >= AS_IT_LIES


class Staging:
    """Memory for the copies of one bucket, which a process keeps: fresh memory costs more time than the copy."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def room(self, size: int) -> np.ndarray:
        """At least `size` bytes, the same as at the last call if that had as many."""
        if len(self._memory) < size:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory


def buckets(
    named_tensors: NamedTensors, bucket_bytes: int, are_kept: bool = False, staging: Staging | None = None
) -> Iterator[Bucket]:
    """The tensors in buckets of at most `bucket_bytes` bytes; a larger tensor has a bucket of its own.

    Tensors are copied to `staging` as they arrive, so one bucket and one tensor are alive at a time; but large ones
    that somebody keeps (`are_kept`) stay where they lie. Those that nobody keeps are copied: the memory of one serves
    the next. A bucket is valid until the next is asked for, as all are copied to the same memory.
    """
    staging = Staging() if staging is None else staging
    filling: Filling | None = None
    for name, tensor in named_tensors:
        if filling is not None and aligned(filling.num_bytes) + tensor.nbytes > bucket_bytes:
            yield filling.close()
            filling = None
        if filling is None:
            filling = Filling(staging.room(max(bucket_bytes, tensor.nbytes)))
        filling.add(name, tensor, are_kept and can_stay(tensor))
        if tensor.nbytes >= bucket_bytes:  # full: not even an empty tensor may be added
            yield filling.close()
            filling = None
    if filling is not None:
        yield filling.close()


def aligned(start: int) -> int:
    """The first place at or after `start`, in bytes, where a tensor may start."""
    return -(-start // ALIGNMENT) * ALIGNMENT


__all__ = [
    "ALIGNMENT", "AS_IT_LIES", "EMPTY", "Bucket", "Entry", "Filling", "Staging", "aligned", "buckets", "can_stay",
]  # fmt: skip
