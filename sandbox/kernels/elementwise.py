"""Row-wise operations: norms, activations and rotations, with gradients that take few passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


def sigmoid(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """1 / (1 + exp(-x)), batch-invariant."""
    # A softmax over {x, 0} works row by row; the last SIMD lanes of torch.sigmoid depend on the batch.
    return torch.stack([x, torch.zeros_like(x)], dim=-1).softmax(dim=-1)[..., 0]


def apply(function: type[Function], *arguments: Any) -> Any:
    """The function's result; without gradients, autograd is bypassed: it costs more than a small operator."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NO_CONTEXT, *arguments)


class _NoContext:
    """Accepts the tensors that a forward saves for its backward, and keeps none of them."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


# One for all calls: a tensor that a forward set on it as an attribute would never be freed.
_NO_CONTEXT = _NoContext()


class _RMSNorm(Function):
    """x w / rms(x); 1 / rms is kept, and both gradients come from one product of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # By the norm: x.square().mean() would write a tensor as large as x.
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return torch.mul(x, rstd).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        # Computed again: kept from the forward pass, it would be a second tensor as large as x.
        normed = torch.mul(x, rstd)
        product = torch.mul(grads[0], normed)
        # Before `product` is overwritten below. The sum is over the axes in front of the weight's own.
        grad_weight = product.flatten(0, -1 - weight.dim()).sum(0)
        # The gradient through rms points along the row; its size is the mean of grad * weight * normed.
        along = product.mul_(weight).sum(dim=-1, keepdim=True).div_(x.shape[-1])
        grad_x = torch.mul(grads[0], weight).sub_(normed.mul_(along)).mul_(rstd)
        return grad_x, grad_weight, None


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, "*heads D"], eps: float) -> Float[Tensor, "*rows D"]:
    """x w / sqrt(mean(x^2) + eps) over the last axis; `weight` may differ by head: its axes are the last axes of x."""
    return apply(_RMSNorm, x, weight, eps)


class _SwiGLU(Function):
    """silu(g) u; the gradients of both halves share one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        ctx.save_for_backward(gate_up, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate_up, silu = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        # Not zeros: its two views below are written whole.
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grads[0], silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def swiglu(gate_up: Float[Tensor, "*rows F2"]) -> Float[Tensor, "*rows F"]:
    """silu(g) u of rows that hold g and u side by side.

    g is a strided view, so silu runs row by row and its ragged end falls on the same columns in every batch.
    """
    return apply(_SwiGLU, gate_up)


class _Rotate(Function):
    """The rotation by +angle; its gradient is the rotation by -angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        # (x1 cos - x2 sin, x2 cos + x1 sin): the table of sines has the minus sign.
        return _swapped(x).mul_(sin).add_(x * cos)  # in place: `roll` has made a copy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        # The transpose of x -> x cos + swapped(x) sin: swapping the halves of this table changes its sign.
        # `grads[0]` itself is left alone: autograd may hand the same tensor to another function.
        return (grads[0] * cos).sub_(_swapped(grads[0]).mul_(sin)), None, None


def _swapped(x: Tensor) -> Tensor:
    """x with the halves of its last axis swapped."""
    return x.roll(x.shape[-1] // 2, -1)


def rotation_tables(angle_Pd: Float[Tensor, "P half"]) -> tuple[Float[Tensor, "P d"], Float[Tensor, "P d"]]:
    """Cosines and sines at every position, for both halves of a head; the sines of the first half are negated."""
    cos_Pd, sin_Pd = angle_Pd.cos(), angle_Pd.sin()
    return torch.cat([cos_Pd, cos_Pd], -1), torch.cat([-sin_Pd, sin_Pd], -1)


def rotation(
    table_Pd: Float[Tensor, "P d"], positions_BS: Int[Tensor, "B S"], num_heads: int
) -> Float[Tensor, "B S H d"]:
    """The rows of a table of `rotate` at these positions, repeated for every head; made once per pass.

    The repetition is written to memory: an operator that broadcasts over heads vectorises over one head's width only.
    """
    rows = table_Pd.index_select(0, positions_BS.flatten())
    return rows[:, None].expand(-1, num_heads, -1).reshape(*positions_BS.shape, num_heads, -1)


def rotate(
    x_BSHd: Float[Tensor, "B S H d"], cos_BSHd: Float[Tensor, "#B S H d"], sin_BSHd: Float[Tensor, "#B S H d"]
) -> Float[Tensor, "B S H d"]:
    """Rotary position embedding in the half convention: dimension i pairs with i + d/2; tables from `rotation`."""
    return apply(_Rotate, x_BSHd, cos_BSHd, sin_BSHd)
