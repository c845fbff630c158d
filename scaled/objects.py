"""The objects of Ray's store with the largest tensors of an answer of an engine or a rank: how many, and how large.

`cluster.storing` makes them, and the plan counts what machines fetch of them: an object travels whole.
"""

from __future__ import annotations

LEAST_BYTES = 2**20
"""Bytes of rows from which they are an object of their own, with whole responses: an object costs its maker about a
millisecond, as much as the copy of 4 MiB."""

OF_ENGINE = 256
"""The most objects of one answer of an engine; those that are not needed cost 0.01 ms each."""

OF_RANK = 512
"""The most objects of one answer of a rank."""

__all__ = ["LEAST_BYTES", "OF_ENGINE", "OF_RANK"]
