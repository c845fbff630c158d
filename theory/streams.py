"""Named random streams: every draw in the project comes from `stream(seed, *names)`, never from a global generator.

Two streams with different names are independent for all practical purposes, and adding a new one changes no other.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2^63) that depends on the root seed and every name: the first 63 bits of SHA-256 of their text."""
    # A name with a slash in it would be two names.
    text = "/".join([str(seed), *(str(name) for name in names)])
    # One bit is dropped so that the seed fits in an int64, in which tensors and vLLM's sampler keep it.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A fresh CPU generator for the stream of that name; the same arguments give the same draws."""
    # On the CPU whatever the device of the tensors: from the same seed a GPU's generator draws other numbers.
    return torch.Generator().manual_seed(derive_seed(seed, *names))
