"""The peak memory of a piece of work, counted allocation by allocation."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The largest number of bytes of tensors that `call` holds at any time, beyond those held before it; at least 0.

    Its result counts; older tensors that it frees do not. Only torch's CPU allocator is measured; freed memory that the
    process keeps does not count, so that the figure is the same in every process.
    """
    held, peak = 0, 0
    for num_bytes in _changes(call):
        held += num_bytes
        peak = max(peak, held)
    return peak


def largest_allocation(call: Callable[[], object]) -> int:
    """The bytes of the largest tensor that `call` allocates."""
    return max(_changes(call), default=0)


def _changes(call: Callable[[], object]) -> Iterator[int]:
    """Bytes allocated (positive) and freed (negative) during the call, in time order."""
    with _no_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = call()  # held until the profile ends
    del result
    # The profiler's own averages attribute memory to operators and miss what one holds only while it runs.
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = (event for event in events if event.name() == "[memory]")
    changes = sorted((event.start_ns(), event.nbytes()) for event in memory)  # type: ignore[attr-defined]
    yield from (num_bytes for _, num_bytes in changes)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Drops writes to stderr below Python, where the profiler reports every start and stop."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
