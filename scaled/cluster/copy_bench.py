"""The time of bare copies in memory, beside which push_bench.py puts its pushes.

A file of its own, as ranks find a function by its module's name, and a script's is `__main__`.
"""

from __future__ import annotations

import time

import torch

SHAPE = (2048, 4096)
"""One weight of 16 MiB: an expert's matrix of Qwen3-30B-A3B has 3 MiB, its attention's widest 16."""


def copy_seconds(num_bytes: int, rank: int) -> float:
    """Seconds in which this process copies so many bytes in memory that it has touched before."""
    pairs = [(torch.zeros(SHAPE).bfloat16(), torch.zeros(SHAPE).bfloat16()) for _ in range(16)]
    start = time.perf_counter()
    for i in range(num_bytes // pairs[0][0].nbytes):
        source, target = pairs[i % len(pairs)]
        target.copy_(source)
    return time.perf_counter() - start


__all__ = ["SHAPE", "copy_seconds"]
