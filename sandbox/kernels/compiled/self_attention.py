"""Causal attention over whole sequences, norms and rotations included, as one operator for training.

It has the bits of the separate operators of ops.py. Letters as in sandbox/kernels/__init__.py.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from sandbox.kernels.compiled.build import library
from sandbox.kernels.compiled.elementwise import plain
from sandbox.kernels.compiled.ops import LANES
from sandbox.kernels.elementwise import apply
from sandbox.kernels.interface import Heads
from sandbox.kernels.products import round_up

QK_NORMS = ("none", "head", "projection")
"""In the order of `Sizes::qk_norm` in pass.hpp."""


class _SelfAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        config: Heads,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        (B, S, _), qkv = qkv.shape, plain(qkv)
        H, h, d = config.num_heads, config.num_kv_heads, config.head_dim
        P = round_up(S, LANES)
        sizes = B, S, H, h, d, P, QK_NORMS.index(config.qk_norm), cos.numel() // ((H + h) * d), config.norm_eps, d**-0.5
        inputs = qkv, *(None if t is None else plain(t) for t in (q_norm, k_norm)), plain(cos), plain(sin)
        # Uninitialised: keys from S to P are read, but their scores are overwritten (attention.hpp).
        kept = (
            qkv.new_empty(B, S, H, d),
            qkv.new_empty(B, h, P, d),
            qkv.new_empty(B, h, P, d),
            qkv.new_empty(B, H, S, P),
        )
        out = qkv.new_empty(B, S, H * d)
        library()("fo_self_attention", *inputs, *sizes, *kept, out)
        ctx.save_for_backward(*inputs, *kept)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The others: cosines and sines, then the rows that the forward pass kept.
        qkv, q_norm, k_norm, *others = ctx.saved_tensors
        # Not zeros: the kernel writes every row of it, and adds to `grad_norms`.
        grad_qkv = torch.empty_like(qkv)
        num_norms = 0 if q_norm is None else q_norm.numel() + k_norm.numel()
        grad_norms = qkv.new_zeros(num_norms)
        at = grads[0].contiguous(), qkv, q_norm, k_norm, *others[:2]
        library()("fo_self_attention_backward", *at, *ctx.sizes, *others[2:], grad_qkv, grad_norms)
        if q_norm is None:
            return None, grad_qkv, None, None, None, None
        return None, grad_qkv, None, None, *grad_norms.split([q_norm.numel(), k_norm.numel()])


def self_attention(
    config: Heads,
    qkv_BSO: Float[Tensor, "B S O"],
    cos_BSHd: Float[Tensor, "#B S H d"],
    sin_BSHd: Float[Tensor, "#B S H d"],
    q_norm: Float[Tensor, " Q"] | None,
    k_norm: Float[Tensor, " K"] | None,
) -> Float[Tensor, "B S D"] | None:
    """The heads' outputs for projected queries, keys and values; token s sees tokens 0 to s of its sequence.

    None if the head width is not a multiple of LANES; the separate operators are used then.
    """
    if config.head_dim % LANES:
        return None
    return apply(_SelfAttention, config, qkv_BSO, cos_BSHd, sin_BSHd, q_norm, k_norm)
