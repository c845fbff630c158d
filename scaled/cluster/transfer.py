"""The transport of values between processes: a parcel is a value whose tensors lie in a bucket.

A batch of thousands of responses is a few buffers, not thousands of pickled tensors. Every value survives bit for bit;
int64 tensors of small values travel as int32.
"""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from scaled.cluster.buckets import Bucket, Filling, aligned, can_stay

INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A value without its tensors, and the tensors. Only for processes of one run, since `head` is a pickle.

    widened: names of the tensors that travel as int32 and arrive as int64. references: the Ray references in the value;
    they lie outside of `head`, because Ray frees objects whose references it does not see. objects: the object of each
    tensor that lies apart (`storing.pack_apart`).
    """

    head: bytes
    bucket: Bucket
    widened: frozenset[str]
    references: tuple[Any, ...] = ()
    objects: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return len(self.head) + self.bucket.num_bytes


@dataclass(frozen=True)
class Hole:
    """A place in a parcel's value that the receiver fills with its `number`-th filling of this kind."""

    kind: str
    number: int


StandIn = Callable[[Any], Any]
"""Called with every object that is not of a built-in type; the object to pack in its place, or None to keep it."""


def _itself(value: Any) -> Any:
    return value


class _Packer(pickle.Pickler):
    """Pickles all but tensors and Ray's references, which it sets aside in `apart`; one that occurs twice, once."""

    def __init__(self, file: io.BytesIO, stand_in: StandIn):
        super().__init__(file, protocol=5)
        self.stand_in = stand_in
        self.apart: dict[str, list[Any]] = {"tensor": [], "reference": []}
        self.numbers: dict[int, tuple[str, int]] = {}

    def reducer_override(self, obj: Any) -> Any:
        other = self.stand_in(obj)
        # A reducer must return a call, so the stand-in is packed as _itself(stand-in).
        return NotImplemented if other is None else (_itself, (other,))

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if isinstance(obj, Hole):
            return obj.kind, obj.number
        kind = "tensor" if isinstance(obj, Tensor) else "reference" if isinstance(obj, ray.ObjectRef) else None
        if kind is None:
            return None
        # By identity, which is safe: the value being packed keeps its tensors alive, so no id is reused.
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = kind, len(self.apart[kind])
            self.apart[kind].append(obj)
        return self.numbers[id(obj)]


class _Opener(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, apart: Mapping[str, Sequence[Any]]):
        super().__init__(file)
        self.apart = apart

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        kind, number = pid
        return self.apart[kind][number]


def pack(value: Any, stand_in: StandIn = lambda met: None) -> Parcel:
    """The value as a parcel; `stand_in` may replace objects in it."""
    file = io.BytesIO()
    packer = _Packer(file, stand_in)
    packer.dump(value)
    tensors: list[Tensor] = packer.apart["tensor"]
    widened = {str(i) for i, tensor in enumerate(tensors) if _fits_int32(tensor)}
    sent = [tensor.to(torch.int32) if str(i) in widened else tensor for i, tensor in enumerate(tensors)]
    filling = Filling(np.empty(sum(aligned(one.nbytes) for one in sent if not can_stay(one)), dtype=np.uint8))
    for i, tensor in enumerate(sent):
        filling.add(str(i), tensor, can_stay(tensor))
    return Parcel(file.getvalue(), filling.close(), frozenset(widened), tuple(packer.apart["reference"]))


def unpack(parcel: Parcel, shared: bool = False, **fillings: Sequence[Any]) -> Any:
    """The value of a parcel, with tensors of its own, so that the shared memory in which it arrived can be freed.

    With `shared`, tensors are views of that memory, so that the processes of a machine share one copy of the batch:
    keep them for one call only, and do not write to them. `fillings` go where the value has a `Hole` of that kind.
    """
    views = parcel.bucket.tensors()
    named = ((name, tensor if shared else tensor.clone()) for name, tensor in views)
    tensors = [tensor.to(torch.int64) if name in parcel.widened else tensor for name, tensor in named]
    return _Opener(io.BytesIO(parcel.head), {"tensor": tensors, "reference": parcel.references, **fillings}).load()


def shares(count: int, parts: int) -> list[tuple[int, int]]:
    """[start, stop) of each part: contiguous, in order, with sizes that differ by at most one."""
    size, rest = divmod(count, parts)
    bounds = [0]
    for i in range(parts):
        bounds.append(bounds[-1] + size + (i < rest))
    return list(pairwise(bounds))


def _fits_int32(tensor: Tensor) -> bool:
    if tensor.dtype != torch.int64 or tensor.numel() == 0:
        return False
    low, high = torch.aminmax(tensor)
    return INT32.min <= int(low) and int(high) <= INT32.max


class Meter:
    """Sums of seconds and bytes by metric name, added from several threads; `take` returns and resets them."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Adds to the sum of that name."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0.0) + value

    @contextmanager
    def seconds(self, name: str) -> Iterator[None]:
        """Adds the wall-clock seconds of the block, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def take(self) -> Mapping[str, float]:
        """The sums since the last call."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return totals


__all__ = ["Hole", "Meter", "Parcel", "pack", "shares", "unpack"]
