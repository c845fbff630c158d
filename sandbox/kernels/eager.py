"""The kernels made of torch's operators."""

from __future__ import annotations

import torch

from sandbox.kernels import elementwise, experts, products
from sandbox.kernels.interface import Kernels, check_threads


def set_threads(number: int) -> None:
    """Sets the number of torch's threads. ValueError for too many."""
    check_threads(number)
    torch.set_num_threads(number)


EAGER = Kernels(
    name="eager",
    linear=products.linear,
    rms_norm=elementwise.rms_norm,
    rotate=elementwise.rotate,
    swiglu=elementwise.swiglu,
    sigmoid=elementwise.sigmoid,
    key_mask=products.key_mask,
    attention=products.attention,
    grouped_experts=experts.grouped_experts,
    gate=lambda gate: gate,
    set_threads=set_threads,
)
