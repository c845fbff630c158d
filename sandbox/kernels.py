"""Batch-invariant arithmetic: a row's result has the same bits alone or in any batch, in prefill, decode and training.

Matrix libraries choose another order of summation for one to three rows, for long inner axes and for the ragged end of
an elementwise pass; so no product here has fewer than MIN_ROWS rows, no sum over keys is longer than KEY_BLOCK at once,
and every sum over experts runs in ascending expert order. Forward passes are invariant, gradients only deterministic.
All of it was measured with one thread (more may split rows off); `probe` checks it on the machine at hand.

Letters beyond theory/contracts.py: N rows, O output width, M token-expert pairs, R pairs sorted by expert (padded), F
expert hidden width, H query heads, h key heads, P keys with padding, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from sandbox.numerics import EXACT, Numerics, Site

# Measured at fault: 1 to 3 rows (AVX2), 1 row (AVX512). Twice the margin costs little.
MIN_ROWS = 8
# Queries of one sequence in a product: never at fault from 4 rows on, and a decoded token pays for every row.
MIN_QUERIES = 4
# Key lengths are rounded up to a multiple of this: a vector unit's softmax sums 16 lanes at most.
MIN_KEYS = 16
# Measured at fault: sums over 193 to 383 keys, which one library splits in halves.
KEY_BLOCK = 128
# Measured at fault: rows and matrices inside a batch that start at no multiple of 16 bytes.
ALIGNMENT = 8


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def linear(x: Float[Tensor, "*rows D"], weight_OD: Float[Tensor, "O D"]) -> Float[Tensor, "*rows O"]:
    """x W^T, with at least MIN_ROWS rows and columns in the product (one column is a matrix-vector product)."""
    num_out, width = weight_OD.shape
    if num_out >= MIN_ROWS and width % ALIGNMENT == 0 and x.numel() >= MIN_ROWS * width:
        # The usual case, without the views of the other: a decoding step calls this often, for little work.
        return F.linear(x.contiguous(), weight_OD)
    x_ND, weight_OD = _aligned(x.reshape(-1, width), -1), _aligned(weight_OD, -1)
    N = x_ND.shape[0]
    if num_out < MIN_ROWS:
        weight_OD = F.pad(weight_OD, (0, 0, 0, MIN_ROWS - num_out))
    if N < MIN_ROWS:
        x_ND = F.pad(x_ND, (0, 0, 0, MIN_ROWS - N))
    return F.linear(x_ND, weight_OD)[:N, :num_out].reshape(*x.shape[:-1], num_out)


def product(
    multiply: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    num_rows: int,
    site: Site,
    numerics: Numerics,
) -> Tensor:
    """multiply(x, weight), summed over the inner axis (the last of x, axis 1 of the weight) as the numerics want it.

    `num_rows` is the number of tokens in the batch, by which a kernel may choose its order of summation.
    """
    if numerics is EXACT:
        return multiply(x, weight)

    def part(start: int, stop: int) -> Tensor:
        if stop - start == x.shape[-1]:
            return multiply(x, weight)
        return multiply(x[..., start:stop].contiguous(), weight.narrow(1, start, stop - start).contiguous())

    return numerics.product(part, x.shape[-1], num_rows, site)


def sigmoid(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """1 / (1 + exp(-x)), as a softmax over {x, 0}: that works row by row, sigmoid's last lanes depend on the batch."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1).softmax(dim=-1)[..., 0]


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    """The function without autograd's bookkeeping where no gradient is taken: it costs more than a small operator."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)  # type: ignore[return-value]
    return function.forward(_NO_CONTEXT, *arguments)  # type: ignore[return-value]


class _NoContext:
    """Takes what a forward saves for its backward, and keeps none of it."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


_NO_CONTEXT = _NoContext()


class _RMSNorm(Function):
    """x w / rms(x), with 1 / rms kept and both gradients from one product of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return torch.mul(x, rstd).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        normed = torch.mul(x, rstd)
        product = torch.mul(grads[0], normed)
        grad_weight = product.flatten(0, -1 - weight.dim()).sum(0)
        # d rms: along the row itself, by the mean of grad * weight * normed.
        along = product.mul_(weight).sum(dim=-1, keepdim=True).div_(x.shape[-1])
        grad_x = torch.mul(grads[0], weight).sub_(normed.mul_(along)).mul_(rstd)
        return grad_x, grad_weight, None


def rms_norm(x: Float[Tensor, "*rows D"], weight: Float[Tensor, "*heads D"], eps: float) -> Float[Tensor, "*rows D"]:
    """x w / sqrt(mean(x^2) + eps) over the last axis; `weight` may differ by head, its axes are the last ones of x."""
    return _apply(_RMSNorm, x, weight, eps)


class _SwiGLU(Function):
    """silu(g) u with its gradient written into one buffer of both halves."""

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
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grads[0], silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def swiglu(gate_up: Float[Tensor, "*rows F2"]) -> Float[Tensor, "*rows F"]:
    """silu(g) u of rows that hold g and u side by side.

    As a strided half, g is worked on row by row, so that silu's ragged end falls on the same columns in every batch.
    """
    return _apply(_SwiGLU, gate_up)


class _Rotate(Function):
    """The rotation by +angle; its gradient is the rotation by -angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _swapped(x).mul_(sin).add_(x * cos)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return (grads[0] * cos).sub_(_swapped(grads[0]).mul_(sin)), None, None


def _swapped(x: Tensor) -> Tensor:
    """The second half before the first."""
    return x.roll(x.shape[-1] // 2, -1)


def rotation(
    cos_BSd: Float[Tensor, "B S half"], sin_BSd: Float[Tensor, "B S half"], num_heads: int
) -> tuple[Float[Tensor, "B S H d"], Float[Tensor, "B S H d"]]:
    """The tables of `rotate`, made once a pass: for every head and both halves, and the sine with its sign.

    Written out, since an operator that broadcasts over heads, or works on half a head, runs in steps of that width.
    """
    tables = torch.cat([cos_BSd, cos_BSd], -1), torch.cat([-sin_BSd, sin_BSd], -1)
    cos, sin = (t[:, :, None].expand(-1, -1, num_heads, -1).contiguous() for t in tables)
    return cos, sin


def rotate(
    x_BSHd: Float[Tensor, "B S H d"], cos_BSHd: Float[Tensor, "#B S H d"], sin_BSHd: Float[Tensor, "#B S H d"]
) -> Float[Tensor, "B S H d"]:
    """Rotary position embedding in the half convention: dimension i pairs with i + d/2; tables from `rotation`."""
    return _apply(_Rotate, x_BSHd, cos_BSHd, sin_BSHd)


def attention(
    q_BSHd: Float[Tensor, "B S H d"],
    k_BhPd: Float[Tensor, "B h P d"],
    v_BhPd: Float[Tensor, "B h P d"],
    bias_BSP: Float[Tensor, "#B S P"],
) -> Float[Tensor, "B S H d"]:
    """softmax(q k^T / sqrt(d) + bias) v, where the H / h query heads of a group share one key head.

    P is a multiple of MIN_KEYS; `bias_BSP` is 0 where query s sees key slot p and -inf elsewhere (padding included). A
    group's heads are rows of one product, so that one decoded token is G rows, padded to MIN_QUERIES.
    """
    B, S, H, d = q_BSHd.shape
    h, P = k_BhPd.shape[1], k_BhPd.shape[2]
    G = H // h
    assert P % MIN_KEYS == 0, f"{P} key slots are no multiple of {MIN_KEYS}"
    q = q_BSHd.view(B, S, h, G, d).permute(0, 2, 3, 1, 4).reshape(B * h, G * S, d) * d**-0.5
    q, k, v = (_aligned(t, -1) for t in (q, k_BhPd.flatten(0, 1), v_BhPd.flatten(0, 1)))
    scores = _bmm(q, k.transpose(1, 2)).view(B, h, G, S, P).add_(bias_BSP[:, None, None])
    probs = scores.softmax(dim=-1).view(B * h, G * S, P)
    out = _bmm(probs[:, :, :KEY_BLOCK], v[:, :KEY_BLOCK])
    for start in range(KEY_BLOCK, P, KEY_BLOCK):
        out = out + _bmm(probs[:, :, start : start + KEY_BLOCK], v[:, start : start + KEY_BLOCK])
    return out[:, :, :d].view(B, h, G, S, d).permute(0, 3, 1, 2, 4).reshape(B, S, H, d)


def _aligned(x: Tensor, axis: int) -> Tensor:
    """x with this axis, -1 or -2, padded with zeros to a multiple of ALIGNMENT; x itself where it is one already."""
    missing = -x.shape[axis] % ALIGNMENT
    if missing == 0:
        return x
    return F.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing))


def _bmm(x_MRD: Tensor, y_MDO: Tensor) -> Tensor:
    rows = x_MRD.shape[1]
    if rows < MIN_QUERIES:
        return torch.bmm(F.pad(x_MRD, (0, 0, 0, MIN_QUERIES - rows)), y_MDO)[:, :rows]
    return torch.bmm(x_MRD, y_MDO)


class _Plan(NamedTuple):
    """Sorted by expert: row r holds token token_R[r], slot (n, k) is row row_KN[k, n], group e ends at ends_E[e]."""

    token_R: Tensor
    row_KN: Tensor
    ends_E: Tensor


def _plan(experts_NK: Tensor, num_experts: int) -> _Plan:
    """Sorts token-expert pairs by expert; a small group that is not empty is filled up to MIN_ROWS with token 0."""
    # In numpy: a dozen operators on a few hundred integers, which cost torch ten times as much to start as to run.
    N, K = experts_NK.shape
    expert_M = experts_NK.numpy().astype(np.int16).T.reshape(K * N)
    order_M = expert_M.argsort(kind="stable")
    count_E = np.bincount(expert_M, minlength=num_experts)
    size_E = np.maximum(count_E, MIN_ROWS) * (count_E > 0)
    end_E = size_E.cumsum()
    row_M = np.arange(K * N) + (end_E - size_E - count_E.cumsum() + count_E).repeat(count_E)
    token_R = np.zeros(end_E[-1], dtype=np.int64)
    token_R[row_M] = order_M % N
    row_KN = np.empty(K * N, dtype=np.int64)
    row_KN[order_M] = row_M
    return _Plan(*(torch.from_numpy(a) for a in (token_R, row_KN.reshape(K, N), end_E.astype(np.int32))))


def _gather_sum(x_RD: Tensor, row_KN: Tensor) -> Tensor:
    """sum_k x[row_k], in slot order."""
    out_ND = x_RD.index_select(0, row_KN[0])
    for row_N in row_KN[1:]:
        out_ND += x_RD.index_select(0, row_N)
    return out_ND


class _Dispatch(Function):
    """Tokens to sorted rows. Its gradient gathers a token's K rows: no scattered additions in either direction."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, row_KN: Tensor) -> Tensor:
        ctx.save_for_backward(row_KN)
        return x_ND.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (row_KN,) = ctx.saved_tensors
        return _gather_sum(grads[0], row_KN), None, None


class _Combine(Function):
    """Sorted rows back to tokens: sum_k w_k y_k, in slot order. Padding rows are in no slot: they get no gradient."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_NK: Tensor, token_R: Tensor, row_KN: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, token_R, row_KN)
        out_ND = y_RD.index_select(0, row_KN[0]).mul_(weights_NK[:, :1])
        for k in range(1, row_KN.shape[0]):
            # Product and sum are rounded apart: a fused multiply-add is used for some lanes only.
            out_ND += y_RD.index_select(0, row_KN[k]).mul_(weights_NK[:, k : k + 1])
        return out_ND

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y_RD, weights_NK, token_R, row_KN = ctx.saved_tensors
        weight_R = weights_NK.new_zeros(y_RD.shape[0]).index_copy_(0, row_KN.flatten(), weights_NK.t().flatten())
        grad_rows_RD = grads[0].index_select(0, token_R)
        dot_R = (grad_rows_RD * y_RD).sum(dim=-1)
        return grad_rows_RD.mul_(weight_R[:, None]), dot_R[row_KN].t(), None, None


def _loop_mm(x_RD: Tensor, weight_EDO: Tensor, ends_E: Tensor) -> Tensor:
    """The definition of `grouped_mm`, and its stand-in where the operator or the dtype is missing."""
    ends = ends_E.tolist()
    return torch.cat(
        [x_RD[start:end] @ weight_EDO[e] for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    )


_fused_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _grouped_mm(x_RD: Tensor, weight_EDO: Tensor, ends_E: Tensor) -> Tensor:
    if _fused_mm is None or x_RD.dtype == torch.float64:  # the operator takes float32 and narrower
        return _loop_mm(x_RD, weight_EDO, ends_E)
    _, width, num_out = weight_EDO.shape
    if width % ALIGNMENT == 0 and num_out % ALIGNMENT == 0:
        return _fused_mm(x_RD, weight_EDO, offs=ends_E)
    return _fused_mm(_aligned(x_RD, -1), _aligned(_aligned(weight_EDO, -1), -2), offs=ends_E)[:, :num_out]


def grouped_experts(
    x_ND: Float[Tensor, "N D"],
    experts_NK: Int[Tensor, "N K"],
    weights_NK: Float[Tensor, "N K"],
    gate_up_EDF: Float[Tensor, "E D F2"],
    down_EFD: Float[Tensor, "E F D"],
    numerics: Numerics = EXACT,
) -> Float[Tensor, "N D"]:
    """sum_k w_k down_k(silu(g_k) u_k), (g_k, u_k) = x gate_up_k: the SwiGLU experts of each row, weighed and summed.

    The sum runs in ascending expert order, whatever the order of the slots. The gradient reaches x, the weights and
    both parameters; an expert that no row chose gets a zero gradient.
    """
    if not bool((experts_NK[:, 1:] > experts_NK[:, :-1]).all()):
        experts_NK, slot_NK = experts_NK.sort(dim=1, stable=True)
        weights_NK = weights_NK.gather(1, slot_NK)
    plan = _plan(experts_NK, gate_up_EDF.shape[0])
    x_RD = _apply(_Dispatch, numerics.activation(x_ND, "gate_up"), plan.token_R, plan.row_KN)
    gate_up_RF = _expert_product(x_RD, gate_up_EDF, plan, len(x_ND), "gate_up", numerics)
    hidden_RF = numerics.activation(swiglu(gate_up_RF), "down")
    y_RD = _expert_product(hidden_RF, down_EFD, plan, len(x_ND), "down", numerics)
    return _apply(_Combine, y_RD, weights_NK, plan.token_R, plan.row_KN)


def _expert_product(
    x_RD: Tensor, weight_EDO: Tensor, plan: _Plan, num_tokens: int, site: Site, numerics: Numerics
) -> Tensor:
    if numerics is EXACT:
        return _grouped_mm(x_RD, weight_EDO, plan.ends_E)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return _grouped_mm(x, weight, plan.ends_E)

    weight_EDO = numerics.weight(weight_EDO, site)
    return numerics.output(product(multiply, x_RD, weight_EDO, num_tokens, site, numerics), site)


def probe() -> list[str]:
    """The links that do not hold on this machine, one line each; empty where all hold. Takes some milliseconds."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        return _probe_rows(draw) + _probe_attention(draw) + _probe_experts(draw)


def _probe_rows(draw: Callable[..., Tensor]) -> list[str]:
    x_ND, weight_OD = draw(1031, 64), draw(136, 64)
    row_wise: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: linear(x, weight_OD),
        "swiglu": lambda x: swiglu(x[:, :40].contiguous()),
        "sigmoid": lambda x: sigmoid(x[:, :7]),
        "linear to one column": lambda x: linear(x, weight_OD[:1]),
        "rms_norm": lambda x: rms_norm(x, weight_OD[0], 1e-6),
        "log_softmax": lambda x: x[:, :41].log_softmax(dim=-1),
    }
    broken = []
    for name, function in row_wise.items():
        whole = function(x_ND)
        bad = [m for m in (1, 2, 3, 5, 9, 33, 130, 517) if not torch.equal(function(x_ND[:m]), whole[:m])]
        if bad:
            broken.append(f"{name}: the first m of 1031 rows differ from the same rows alone for m = {bad}")
    return broken


def _probe_attention(draw: Callable[..., Tensor]) -> list[str]:
    S = 300
    P = round_up(S, MIN_KEYS)
    q, k, v = draw(2, S, 4, 16), draw(2, 2, P, 16), draw(2, 2, P, 16)
    slot_P = torch.arange(P)
    bias_SP = torch.zeros(S, P).masked_fill(slot_P > torch.arange(S)[:, None], float("-inf"))
    whole = attention(q, k, v, bias_SP[None])
    prefill, decode = [], []
    for s in (1, 2, 9, 48, 129, 211, 299):
        n = round_up(s, MIN_KEYS)
        alone = attention(q[:1, :s], k[:1, :, :n], v[:1, :, :n], bias_SP[None, :s, :n])
        if not torch.equal(alone, whole[:1, :s]):
            prefill.append(s)
        last = attention(q[:, s - 1 : s], k[:, :, :n], v[:, :, :n], bias_SP[None, s - 1 : s, :n])
        if not torch.equal(last, whole[:, s - 1 : s]):
            decode.append(s)
    broken = [f"attention: a sequence alone differs from the same in a batch at lengths {prefill}"] if prefill else []
    return broken + ([f"attention: prefill differs from decode at positions {decode}"] if decode else [])


def _probe_experts(draw: Callable[..., Tensor]) -> list[str]:
    x_ND, gate_up_EDF, down_EFD = draw(257, 32), draw(4, 32, 48), draw(4, 24, 32)
    experts_NK = draw(257, 4).topk(2).indices.sort(dim=-1).values
    weights_NK = draw(257, 2).softmax(dim=-1)
    whole = grouped_experts(x_ND, experts_NK, weights_NK, gate_up_EDF, down_EFD)
    bad = [
        m
        for m in (1, 2, 3, 5, 8, 17, 64, 150)
        if not torch.equal(grouped_experts(x_ND[:m], experts_NK[:m], weights_NK[:m], gate_up_EDF, down_EFD), whole[:m])
    ]
    return [f"grouped_experts: rows depend on the size of their expert's group, seen at {bad} tokens"] if bad else []
