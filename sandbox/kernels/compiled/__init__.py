"""The kernels of sandbox/kernels in our own C++, built at first use: `compiled_kernels()`.

They keep the promise of sandbox/kernels: a row has the same bits alone and in any batch, in prefill, decode and
training. Those bits differ from the eager kernels' (docs/decisions/0002-batch-invariant-kernels.md).
"""

from __future__ import annotations

import torch

from sandbox.kernels.compiled import elementwise, ops
from sandbox.kernels.compiled.attention_layer import attention_layer
from sandbox.kernels.compiled.build import library
from sandbox.kernels.compiled.gates import compiled_gate
from sandbox.kernels.interface import Kernels, check_threads


def set_threads(number: int) -> None:
    """Sets the number of threads of the kernels; torch gets one. ValueError for too many."""
    check_threads(number)
    # Little is left to torch, and its idle threads would spin on the cores that ours need.
    library().threads = number
    torch.set_num_threads(1)


COMPILED = Kernels(
    name="compiled",
    linear=ops.linear,
    rms_norm=elementwise.rms_norm,
    rotate=elementwise.rotate,
    swiglu=elementwise.swiglu,
    sigmoid=elementwise.sigmoid,
    key_mask=ops.key_mask,
    attention=ops.attention,
    grouped_experts=ops.grouped_experts,
    gate=compiled_gate,
    set_threads=set_threads,
    attention_layer=attention_layer,
    has_passes=True,
)


def compiled_kernels() -> Kernels:
    """The compiled set, built now if it was not before; ConfigError, naming `compile`, if the build fails."""
    library()
    return COMPILED
