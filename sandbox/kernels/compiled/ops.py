"""The products, attention and experts of sandbox/kernels in C++, forward and backward.

Forward passes are batch-invariant by construction and use the row functions of whole passes
(sandbox/model/compiled_passes.py). float32 only. Letters as in sandbox/kernels/__init__.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from sandbox.kernels.compiled.build import library
from sandbox.kernels.compiled.elementwise import plain, swiglu
from sandbox.kernels.elementwise import apply
from sandbox.kernels.experts import ascending, grouped_experts_by
from sandbox.kernels.numerics import EXACT, Numerics
from sandbox.kernels.products import round_up

# Must equal the constants of the C++ sources.
LANES, PANEL, CHUNK = 8, 16, 96


def pack(weight: Tensor, *, transposed: bool) -> Float[Tensor, "E packed"]:
    """One or E weights (in, out), or (out, in) if `transposed`, packed in panels of PANEL columns."""
    weight = plain(weight.detach())
    weight = weight[None] if weight.dim() == 2 else weight
    count, rows, columns = weight.shape
    inner, num_out = (columns, rows) if transposed else (rows, columns)
    packed = weight.new_empty(count, round_up(num_out, PANEL) * inner)
    library()("fo_pack", weight, count, inner, num_out, transposed, packed)
    return packed


@functools.lru_cache(maxsize=1024)
def _end_of(num_rows: int) -> Tensor:
    """The end of one group of all rows; a pass asks for the same one several times, and the kernels only read it."""
    return torch.tensor([num_rows], dtype=torch.int32)


def product_of(x: Tensor, packed: Tensor, ends: Tensor | None, num_out: int) -> Tensor:
    """Rows times packed weights; group e ends at row ends[e]. Without `ends`, all rows times the one weight."""
    width = x.shape[-1]
    if ends is None:
        ends = _end_of(x.numel() // width)
    out = x.new_empty(*x.shape[:-1], num_out)
    library()("fo_product", x, ends, len(ends), packed, width, num_out, out)
    return out


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor) -> Tensor:
        x, weight_OD = plain(x), plain(weight_OD)
        ctx.save_for_backward(x, weight_OD)
        num_out, width = weight_OD.shape
        out = x.new_empty(*x.shape[:-1], num_out)
        library()("fo_linear", x, weight_OD, x.numel() // width, width, num_out, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight_OD = ctx.saved_tensors
        (num_out, width), grad = weight_OD.shape, grads[0].contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        # Zeros: the kernel adds to it, CHUNK rows at a time.
        grad_weight = torch.zeros_like(weight_OD) if ctx.needs_input_grad[1] else None
        sizes = x.numel() // width, num_out, width
        library()("fo_linear_backward", grad, x, *sizes, weight_OD, grad_x, grad_weight)
        return grad_x, grad_weight


def linear(x: Float[Tensor, "*rows D"], weight_OD: Float[Tensor, "O D"]) -> Float[Tensor, "*rows O"]:
    """x W^T; each element is one chain of fused multiply-adds over D."""
    return apply(_Linear, x, weight_OD)


class _GroupedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_EDO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EDO, ends_E)
        return product_of(plain(x_RD), pack(weight_EDO, transposed=False), ends_E, weight_EDO.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_RD, weight_EDO, ends_E = ctx.saved_tensors
        # Not zeros: for an expert without rows the product over 0 rows writes zeros.
        grad_x, grad_weight = torch.empty_like(x_RD), torch.empty_like(weight_EDO)
        start = 0
        # torch.mm: gradients need not be batch-invariant.
        for e, stop in enumerate(ends_E.tolist()):
            torch.mm(grads[0][start:stop], weight_EDO[e].t(), out=grad_x[start:stop])
            torch.mm(x_RD[start:stop].t(), grads[0][start:stop], out=grad_weight[e])
            start = stop
        return grad_x, grad_weight, None


def grouped_product(
    x_RD: Float[Tensor, "R D"], weight_EDO: Float[Tensor, "E D O"], ends_E: Int[Tensor, " E"]
) -> Float[Tensor, "R O"]:
    """x_r W_e for the rows of each expert, group e ending at ends_E[e]."""
    return apply(_GroupedProduct, x_RD, weight_EDO, ends_E)


def key_mask(num_seen_BS: Int[Tensor, "#B S"], num_slots: int, dtype: torch.dtype) -> Int[Tensor, "#B S"]:
    """The number of key slots that each query sees, as it is: the kernel leaves out the others by itself."""
    return num_seen_BS


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, num_seen_BS: Tensor, scale: float) -> Tensor:
        B, S, H, d = q.shape
        h, P = k.shape[1], k.shape[2]
        seen_BS, q = num_seen_BS.expand(B, S).contiguous(), plain(q)
        # Keys may be a view of a longer cache: contiguous rows suffice, so addresses and strides are passed.
        # One pair of strides is passed for both.
        if k.stride()[2:] != (d, 1) or k.stride() != v.stride():
            k, v = plain(k), plain(v)
        # Without autograd (`apply`) the context has no `needs_input_grad`.
        keeps = any(getattr(ctx, "needs_input_grad", ()))
        probs, out = q.new_empty(B, H, S, P) if keeps else None, torch.empty_like(q)
        sizes = B, S, H, h, P, d, k.stride(0), k.stride(1)
        library()("fo_attention", q, k.data_ptr(), v.data_ptr(), seen_BS, *sizes, scale, probs, out)
        if keeps:
            # Contiguous, as the gradient's kernel takes no strides.
            ctx.save_for_backward(q, plain(k), plain(v), seen_BS, probs)
            ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, seen_BS, probs = ctx.saved_tensors
        # Zeros where the kernel adds: the query heads of a group share one head of keys and values.
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        sizes = *q.shape[:3], *k.shape[1:]
        results = probs, grad_q, grad_k, grad_v
        grad = grads[0].contiguous()
        library()("fo_attention_backward", grad, q, k, v, seen_BS, *sizes, ctx.scale, *results)
        return grad_q, grad_k, grad_v, None, None


def attention(
    q_BSHd: Float[Tensor, "B S H d"],
    k_BhPd: Float[Tensor, "B h P d"],
    v_BhPd: Float[Tensor, "B h P d"],
    num_seen_BS: Int[Tensor, "#B S"],
) -> Float[Tensor, "B S H d"]:
    """softmax(q k^T / sqrt(d)) v over the first `num_seen_BS` keys of each query; P is a multiple of LANES.

    The H / h query heads of a group share one key head. The other key slots are in no sum, whatever they hold.
    """
    d = q_BSHd.shape[-1]
    assert k_BhPd.shape[2] % LANES == 0, f"{k_BhPd.shape[2]} key slots are no multiple of {LANES}"
    # Columns of zeros change no score, and the scale is that of the true d.
    q, k, v = (t if d % LANES == 0 else F.pad(t, (0, -d % LANES)) for t in (q_BSHd, k_BhPd, v_BhPd))
    return apply(_Attention, q, k, v, num_seen_BS, d**-0.5)[..., :d]


def check_ids(ids_NK: Tensor, num_experts: int) -> None:
    """Raises ValueError for an expert id out of range: the kernels would write beyond their memory."""
    if not ids_NK.numel():
        return
    low, high = (int(one) for one in ids_NK.aminmax())
    if low < 0 or high >= num_experts:
        raise ValueError(f"experts: expected ids from 0 to {num_experts - 1}, got {low} to {high}")


class _Experts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        (N, D), K, (E, F_, _) = x.shape, ids.shape[1], down.shape
        x, ids, weights, gate_up, down = plain(x), ids.contiguous(), plain(weights), plain(gate_up), plain(down)
        keeps = any(getattr(ctx, "needs_input_grad", ()))
        # Hidden rows in sorted order; without a gradient, one chunk of them at a time.
        rows = x.new_empty(N * K if keeps else CHUNK, 2 * F_)
        kept = torch.empty(E, dtype=torch.int32), torch.empty(N * K, dtype=torch.int64), rows
        out = torch.empty_like(x)
        library()("fo_experts", x, N, D, F_, E, K, ids, weights, gate_up, down, *kept, keeps, out)
        if keeps:
            ctx.save_for_backward(x, weights, gate_up, down, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weights, gate_up, down, *kept = ctx.saved_tensors
        (N, D), K, (E, F_, _) = x.shape, weights.shape[1], down.shape
        # Zeros for the parameters: the kernel adds to them, and never touches an expert without rows.
        results = torch.empty_like(x), torch.empty_like(weights), torch.zeros_like(gate_up), torch.zeros_like(down)
        grad = grads[0].contiguous()
        library()("fo_experts_backward", grad, x, N, D, F_, E, K, weights, gate_up, down, *kept, *results)
        grad_x, grad_weights, grad_gate_up, grad_down = results
        return grad_x, None, grad_weights, grad_gate_up, grad_down


def grouped_experts(
    x_ND: Float[Tensor, "N D"],
    experts_NK: Int[Tensor, "N K"],
    weights_NK: Float[Tensor, "N K"],
    gate_up_EDF: Float[Tensor, "E D F2"],
    down_EFD: Float[Tensor, "E F D"],
    numerics: Numerics = EXACT,
) -> Float[Tensor, "N D"]:
    """sum_k w_k down_k(silu(g_k) u_k), (g_k, u_k) = x gate_up_k, summed in ascending expert order.

    If `numerics` departs from the exact arithmetic, the steps run one by one, with these products.
    """
    check_ids(experts_NK, len(down_EFD))
    if numerics is not EXACT:
        return grouped_experts_by(
            grouped_product, swiglu, x_ND, experts_NK, weights_NK, gate_up_EDF, down_EFD, numerics
        )
    experts_NK, weights_NK = ascending(experts_NK, weights_NK)
    return apply(_Experts, x_ND, experts_NK, weights_NK, gate_up_EDF, down_EFD)
