"""Checks that kernels are batch-invariant on the machine at hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sandbox.kernels.eager import EAGER
from sandbox.kernels.interface import Kernels
from sandbox.kernels.products import MIN_KEYS, round_up


def probe(kernels: Kernels = EAGER) -> list[str]:
    """One line for each check that fails on this machine; empty if none does. Takes some milliseconds."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        return _probe_rows(kernels, draw) + _probe_attention(kernels, draw) + _probe_experts(kernels, draw)


def _probe_rows(kernels: Kernels, draw: Callable[..., Tensor]) -> list[str]:
    # 1031 rows are no multiple of a vector's width, so that a ragged end is checked too.
    x_ND, weight_OD, wide_OD = draw(1031, 64), draw(136, 64), draw(24, 512)
    row_wise: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: kernels.linear(x, weight_OD),
        # 512 terms: beyond WIDE, where a product needs more rows.
        "linear over a wide row": lambda x: kernels.linear(x.repeat(1, 8), wide_OD),
        # 20 numbers per half: a ragged end for 8 lanes and for 16.
        "swiglu": lambda x: kernels.swiglu(x[:, :40].contiguous()),
        "sigmoid": lambda x: kernels.sigmoid(x[:, :7]),
        "linear to one column": lambda x: kernels.linear(x, weight_OD[:1]),
        "rms_norm": lambda x: kernels.rms_norm(x, weight_OD[0], 1e-6),
        "log_softmax": lambda x: x[:, :41].log_softmax(dim=-1),
    }
    broken = []
    for name, function in row_wise.items():
        whole = function(x_ND)
        bad = [m for m in (1, 2, 3, 5, 9, 33, 130, 517) if not torch.equal(function(x_ND[:m]), whole[:m])]
        if bad:
            broken.append(f"{name}: the first m of 1031 rows differ from the same rows alone for m = {bad}")
    return broken


def _probe_attention(kernels: Kernels, draw: Callable[..., Tensor]) -> list[str]:
    S = 300
    P = round_up(S, MIN_KEYS)
    q, k, v = draw(2, S, 4, 16), draw(2, 2, P, 16), draw(2, 2, P, 16)
    seen_1S = torch.arange(1, S + 1)[None]
    whole = kernels.attention(q, k, v, kernels.key_mask(seen_1S, P, q.dtype))
    prefill, decode = [], []
    # Lengths around MIN_KEYS and KEY_BLOCK: from 129 keys on, the sum over them has several blocks.
    for s in (1, 2, 9, 48, 129, 211, 299):
        n = round_up(s, MIN_KEYS)
        alone = kernels.attention(q[:1, :s], k[:1, :, :n], v[:1, :, :n], kernels.key_mask(seen_1S[:, :s], n, q.dtype))
        if not torch.equal(alone, whole[:1, :s]):
            prefill.append(s)
        last = kernels.attention(
            q[:, s - 1 : s], k[:, :, :n], v[:, :, :n], kernels.key_mask(seen_1S[:, s - 1 : s], n, q.dtype)
        )
        if not torch.equal(last, whole[:, s - 1 : s]):
            decode.append(s)
    broken = [f"attention: a sequence alone differs from itself in a batch at lengths {prefill}"] if prefill else []
    return broken + ([f"attention: prefill differs from decode at positions {decode}"] if decode else [])


def _probe_experts(kernels: Kernels, draw: Callable[..., Tensor]) -> list[str]:
    x_ND, gate_up_EDF, down_EFD = draw(257, 32), draw(4, 32, 48), draw(4, 24, 32)
    experts_NK = draw(257, 4).topk(2).indices.sort(dim=-1).values
    weights_NK = draw(257, 2).softmax(dim=-1)
    whole = kernels.grouped_experts(x_ND, experts_NK, weights_NK, gate_up_EDF, down_EFD)
    bad = [
        m
        for m in (1, 2, 3, 5, 8, 17, 64, 150)
        if not torch.equal(
            kernels.grouped_experts(x_ND[:m], experts_NK[:m], weights_NK[:m], gate_up_EDF, down_EFD), whole[:m]
        )
    ]
    return [f"grouped_experts: rows depend on the size of their expert's group, seen at {bad} tokens"] if bad else []
