"""The row-wise operations of sandbox/kernels in C++, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from sandbox.kernels.compiled.build import library
from sandbox.kernels.elementwise import apply


def plain(x: Tensor) -> Tensor:
    """x as the kernels take it: contiguous float32. Raises ValueError for another dtype."""
    if x.dtype != torch.float32:
        raise ValueError(f"compile: expected float32 tensors with compile: true, got {x.dtype}")
    return x.contiguous()


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = plain(x), plain(weight)
        width = x.shape[-1]
        out, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
        library()("fo_rms_norm", x, weight, scale.numel(), weight.numel() // width, width, eps, out, scale)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        width, grad = x.shape[-1], grads[0].contiguous()
        # Every row of grad_x is written; to grad_weight the kernel adds block after block.
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        sizes = scale.numel(), weight.numel() // width, width
        library()("fo_rms_norm_backward", grad, x, weight, scale, *sizes, grad_x, grad_weight)
        return grad_x, grad_weight, None


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, "*heads D"], eps: float) -> Float[Tensor, "*rows D"]:
    """x w / sqrt(mean(x^2) + eps) over the last axis; `weight` may differ by head: its axes are the last axes of x."""
    return apply(_RMSNorm, x, weight, eps)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = plain(cos), plain(sin)
        ctx.save_for_backward(cos, sin)
        return _rotated(plain(x), cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        # The transpose: swapping the halves of the table of sines changes its sign.
        return _rotated(grads[0].contiguous(), cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width, out = x.shape[-1], torch.empty_like(x)
    library()("fo_rotate", x, cos, sin, x.numel() // width, cos.numel() // width, width, out)
    return out


def rotate(
    x_BSHd: Float[Tensor, "B S H d"], cos_BSHd: Float[Tensor, "#B S H d"], sin_BSHd: Float[Tensor, "#B S H d"]
) -> Float[Tensor, "B S H d"]:
    """Rotary position embedding in the half convention; its gradient is the rotation by the opposite angle."""
    return apply(_Rotate, x_BSHd, cos_BSHd, sin_BSHd)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = plain(gate_up)
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        library()("fo_swiglu", gate_up, out.numel() // out.shape[-1], out.shape[-1], out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate_up,) = ctx.saved_tensors
        grad, width = torch.empty_like(gate_up), gate_up.shape[-1] // 2
        library()("fo_swiglu_backward", grads[0].contiguous(), gate_up, gate_up.numel() // (2 * width), width, grad)
        return grad


def swiglu(gate_up: Float[Tensor, "*rows F2"]) -> Float[Tensor, "*rows F"]:
    """silu(g) u of rows that hold g and u side by side."""
    return apply(_SwiGLU, gate_up)


class _Sigmoid(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = plain(x)
        out = torch.empty_like(x)
        library()("fo_sigmoid", x, x.numel(), out)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,) = ctx.saved_tensors
        return grads[0] * out * (1 - out)


def sigmoid(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """1 / (1 + exp(-x))."""
    return apply(_Sigmoid, x)
