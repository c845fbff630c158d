"""Weights on their way from ranks to engines: buckets in the object store, of which the driver has references.

The process that holds weights converts them to the receiver's format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from torch import Tensor

from scaled.cluster.buckets import Bucket, Staging, buckets
from theory.contracts import NamedTensors

Convert = Callable[[NamedTensors], NamedTensors]
"""Turns whole training weights into the tensors that an engine loads, one by one; it is pickled for the ranks."""


def unchanged(named_tensors: NamedTensors) -> NamedTensors:
    """The training weights themselves."""
    return named_tensors


@dataclass(frozen=True, eq=False)
class StoredTensors:
    """Named tensors that other processes put into the object store. Iterating yields views of their buckets.

    `stored(convert)` makes each process convert its own tensors, and yields a reference to each bucket and its size in
    bytes without fetching the bucket.
    """

    stored: Callable[[Convert], Iterator[tuple[Any, int]]]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for reference, _ in self.stored(unchanged):
            yield from tensors_of([reference])


def stored(named_tensors: NamedTensors, bucket_bytes: int, convert: Convert = unchanged) -> Iterator[tuple[Any, int]]:
    """References to buckets of the converted tensors, and their sizes in bytes; local tensors are stored first."""
    if isinstance(named_tensors, StoredTensors):  # in the store already: only references pass through this process
        yield from named_tensors.stored(convert)
        return
    for bucket in converted(named_tensors, bucket_bytes, convert):
        yield ray.put(bucket), bucket.num_bytes


def converted(
    named_tensors: NamedTensors, bucket_bytes: int, convert: Convert, staging: Staging | None = None
) -> Iterator[Bucket]:
    """The converted tensors in buckets, each valid until the next is asked for."""
    # Weights that nobody converts are their owner's, who keeps them.
    return buckets(convert(named_tensors), bucket_bytes, convert is unchanged, staging)


def tensors_of(references: Sequence[Any]) -> NamedTensors:
    """The tensors of these buckets, as views to read or copy; one bucket at a time is mapped into this process."""
    for reference in references:
        bucket: Any = ray.get(reference)
        yield from bucket.tensors()


__all__ = ["Convert", "StoredTensors", "converted", "stored", "tensors_of", "unchanged"]
