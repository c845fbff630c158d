"""A layer up to its MLP as one operator for training: norms, products, attention and the router's logits.

It has the bits of the separate operators of ops.py and elementwise.py. Letters as in sandbox/kernels/__init__.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from sandbox.kernels.compiled.build import library, pointer
from sandbox.kernels.compiled.elementwise import plain
from sandbox.kernels.compiled.gates import SizesStruct
from sandbox.kernels.compiled.ops import LANES
from sandbox.kernels.elementwise import apply
from sandbox.kernels.interface import AttentionWeights, Heads
from sandbox.kernels.products import round_up

QK_NORMS = ("none", "head", "projection")
"""In the order of `Sizes::qk_norm` in pass.hpp."""

_INPUTS = ("x", "norm", "qkv_weight", "q_norm", "k_norm", "o", "mlp_norm", "router", "cos", "sin")
_KEPT = (
    "normed", "scale_x", "qkv", "q", "k", "v", "probs", "heads", "scale_out", "out", "hidden", "logits",
)  # fmt: skip


class _LayerStruct(ctypes.Structure):
    """`AttentionLayer` of self_attention.hpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_INPUTS, *_KEPT)),
        *((name, ctypes.c_int64) for name in ("B", "S", "P", "num_tables")),
    )


def _structs(config: Heads, tensors: Sequence[Tensor | None]) -> tuple[SizesStruct, _LayerStruct]:
    """The sizes and the layer as the kernels read them, from its inputs and what is kept; they hold bare addresses."""
    x, router, cos = (tensors[_INPUTS.index(name)] for name in ("x", "router", "cos"))
    assert x is not None and cos is not None
    (B, S, D), H, h, d = x.shape, config.num_heads, config.num_kv_heads, config.head_dim
    # The other sizes stay 0: a layer up to its MLP reads none of them.
    sizes = SizesStruct(
        D=D, H=H, h=h, d=d, E=0 if router is None else len(router), qk_norm=QK_NORMS.index(config.qk_norm),
        eps=config.norm_eps, scale=d**-0.5,
    )  # fmt: skip
    pointers = (None if tensor is None else pointer(tensor) for tensor in tensors)
    return sizes, _LayerStruct(*pointers, B, S, round_up(S, LANES), cos.numel() // ((H + h) * d))


class _AttentionLayer(Function):
    @staticmethod
    def forward(ctx: Any, config: Heads, x: Tensor, *others: Tensor | None) -> Any:
        given = [None if tensor is None else plain(tensor) for tensor in (x, *others)]
        router, (B, S, D), H, h, d = others[6], x.shape, config.num_heads, config.num_kv_heads, config.head_dim
        P = round_up(S, LANES)
        # Uninitialised: keys from S to P are read, but their scores are overwritten (attention.hpp).
        shapes = (
            (B, S, D), (B, S), (B, S, (H + 2 * h) * d), (B, S, H, d), (B, h, P, d), (B, h, P, d), (B, H, S, P),
            (B, S, H * d), (B, S), (B, S, D), (B * S, D), (B * S, 0 if router is None else len(router)),
        )  # fmt: skip
        kept = [x.new_empty(shape) for shape in shapes]
        sizes, layer = _structs(config, [*given, *kept])
        library()("fo_attention_layer", ctypes.addressof(sizes), ctypes.addressof(layer))
        ctx.save_for_backward(*given, *kept)
        ctx.config = config
        return tuple(kept[-3:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sizes, layer = _structs(ctx.config, ctx.saved_tensors)
        x, norm, qkv, q_norm, k_norm, o, mlp_norm, router, *_ = ctx.saved_tensors
        *_, needs_router, _, _ = ctx.needs_input_grad
        # Every row of it is written; to the others, which are zeros, the kernels add.
        of_x = torch.empty_like(x)
        of_norm, of_qkv, of_o, of_mlp_norm = (torch.zeros_like(weight) for weight in (norm, qkv, o, mlp_norm))
        of_router = torch.zeros_like(router) if needs_router else None
        of_qk_norms = x.new_zeros(0 if q_norm is None else q_norm.numel() + k_norm.numel())
        results = of_x, of_norm, of_qkv, of_qk_norms, of_o, of_mlp_norm, of_router
        given = ctypes.addressof(sizes), ctypes.addressof(layer), *(grad.contiguous() for grad in grads)
        library()("fo_attention_layer_backward", *given, *results)
        of_q, of_k = (None, None) if q_norm is None else of_qk_norms.split([q_norm.numel(), k_norm.numel()])
        return None, of_x, of_norm, of_qkv, of_q, of_k, of_o, of_mlp_norm, of_router, None, None


def attention_layer(
    config: Heads,
    weights: AttentionWeights,
    x_BSD: Float[Tensor, "B S D"],
    cos_BSHd: Float[Tensor, "#B S H d"],
    sin_BSHd: Float[Tensor, "#B S H d"],
) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "N D"], Float[Tensor, "N E"]] | None:
    """x + attention(norm x), its norm, and the router's logits (N, 0 without one); token s sees tokens 0 to s.

    None if the head width is not a multiple of LANES; the separate operators are used then.
    """
    if config.head_dim % LANES:
        return None
    return apply(_AttentionLayer, config, x_BSD, *weights, cos_BSHd, sin_BSHd)
