"""The experts of a layer: tokens sorted by expert, one grouped product, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from sandbox.kernels.elementwise import apply, swiglu
from sandbox.kernels.numerics import EXACT, Numerics, Site
from sandbox.kernels.products import ALIGNMENT, MIN_ROWS, aligned, product


class _Plan(NamedTuple):
    """Pairs by expert: row r holds token token_R[r], slot (n, k) is row row_KN[k, n], group e ends at ends_E[e]."""

    token_R: Tensor
    row_KN: Tensor
    ends_E: Tensor


def _plan(experts_NK: Tensor, num_experts: int) -> _Plan:
    """Sorts token-expert pairs by expert; a non-empty group is padded to MIN_ROWS with token 0."""
    # In numpy: torch would take ten times as long to launch a dozen operators on a few hundred integers.
    N, K = experts_NK.shape
    # int16 holds every id, and numpy's stable sort of 16-bit integers is a radix sort.
    expert_M = experts_NK.numpy().astype(np.int16).T.reshape(K * N)
    order_M = expert_M.argsort(kind="stable")
    count_E = np.bincount(expert_M, minlength=num_experts)
    # A group without tokens gets no padding: no row of it would be read.
    size_E = np.maximum(count_E, MIN_ROWS) * (count_E > 0)
    end_E = size_E.cumsum()
    # A pair's row: its rank among the sorted pairs plus the padding of the groups before its own.
    row_M = np.arange(K * N) + (end_E - size_E - count_E.cumsum() + count_E).repeat(count_E)
    token_R = np.zeros(end_E[-1], dtype=np.int64)
    token_R[row_M] = order_M % N  # pairs are numbered slot by slot: pair k * N + n is token n
    row_KN = np.empty(K * N, dtype=np.int64)
    row_KN[order_M] = row_M
    # The ends in int32, the only type of offsets that `grouped_mm` takes.
    return _Plan(*(torch.from_numpy(a) for a in (token_R, row_KN.reshape(K, N), end_E.astype(np.int32))))


def _gather_sum(x_RD: Tensor, row_KN: Tensor) -> Tensor:
    """sum_k x[row_k], in slot order."""
    out_ND = x_RD.index_select(0, row_KN[0])
    for row_N in row_KN[1:]:
        out_ND += x_RD.index_select(0, row_N)
    return out_ND


class _Dispatch(Function):
    """Tokens to sorted rows. The gradient gathers a token's K rows, so that neither direction scatters additions."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, row_KN: Tensor) -> Tensor:
        ctx.save_for_backward(row_KN)
        return x_ND.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (row_KN,) = ctx.saved_tensors
        # Padding rows are in no slot, so that their gradient reaches no token.
        return _gather_sum(grads[0], row_KN), None, None


class _Combine(Function):
    """Sorted rows back to tokens: sum_k w_k y_k, in slot order. Padding rows belong to no slot and get no gradient."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_NK: Tensor, token_R: Tensor, row_KN: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, token_R, row_KN)
        out_ND = y_RD.index_select(0, row_KN[0]).mul_(weights_NK[:, :1])
        for k in range(1, row_KN.shape[0]):
            # Product and sum round separately: torch fuses a multiply-add in some SIMD lanes only.
            out_ND += y_RD.index_select(0, row_KN[k]).mul_(weights_NK[:, k : k + 1])
        return out_ND

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y_RD, weights_NK, token_R, row_KN = ctx.saved_tensors
        # Padding rows keep the weight 0: they are copies of token 0, which must not learn from them.
        weight_R = weights_NK.new_zeros(y_RD.shape[0]).index_copy_(0, row_KN.flatten(), weights_NK.t().flatten())
        grad_rows_RD = grads[0].index_select(0, token_R)
        # The dot products first: the next line scales the gradient's rows in place.
        dot_R = (grad_rows_RD * y_RD).sum(dim=-1)
        return grad_rows_RD.mul_(weight_R[:, None]), dot_R[row_KN].t(), None, None


def _loop_mm(x_RD: Tensor, weight_EDO: Tensor, ends_E: Tensor) -> Tensor:
    """The definition of `grouped_mm`, and the fallback where torch lacks the operator or the dtype."""
    ends = ends_E.tolist()
    return torch.cat(
        [x_RD[start:end] @ weight_EDO[e] for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    )


# Older versions of torch have it under a private name only.
_fused_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _grouped_mm(x_RD: Tensor, weight_EDO: Tensor, ends_E: Tensor) -> Tensor:
    if _fused_mm is None or x_RD.dtype == torch.float64:  # the operator takes float32 and narrower
        return _loop_mm(x_RD, weight_EDO, ends_E)
    _, width, num_out = weight_EDO.shape
    if width % ALIGNMENT == 0 and num_out % ALIGNMENT == 0:
        return _fused_mm(x_RD, weight_EDO, offs=ends_E)
    # The operator refuses strides that are no multiple of 16 bytes; the zeros add nothing to a sum.
    return _fused_mm(aligned(x_RD, -1), aligned(aligned(weight_EDO, -1), -2), offs=ends_E)[:, :num_out]


def grouped_experts(
    x_ND: Float[Tensor, "N D"],
    experts_NK: Int[Tensor, "N K"],
    weights_NK: Float[Tensor, "N K"],
    gate_up_EDF: Float[Tensor, "E D F2"],
    down_EFD: Float[Tensor, "E F D"],
    numerics: Numerics = EXACT,
) -> Float[Tensor, "N D"]:
    """sum_k w_k down_k(silu(g_k) u_k), (g_k, u_k) = x gate_up_k: the weighted sum of each row's SwiGLU experts.

    The sum runs in ascending expert order, whatever the order of the slots. The gradient reaches x, the weights and
    both parameters; an expert that no row chose gets a zero gradient.
    """
    return grouped_experts_by(_grouped_mm, swiglu, x_ND, experts_NK, weights_NK, gate_up_EDF, down_EFD, numerics)


def ascending(experts_NK: Tensor, weights_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights with their slots in ascending expert order."""
    ids = experts_NK.numpy()
    if (ids[:, 1:] > ids[:, :-1]).all():
        return experts_NK, weights_NK
    # A floating-point sum depends on its order, and a replayed record may list experts in another order than top-k.
    experts_NK, slot_NK = experts_NK.sort(dim=1, stable=True)
    return experts_NK, weights_NK.gather(1, slot_NK)


GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_experts_by(
    grouped: GroupedProduct,
    activate: Callable[[Tensor], Tensor],
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_EDF: Tensor,
    down_EFD: Tensor,
    numerics: Numerics,
) -> Float[Tensor, "N D"]:
    """`grouped_experts` with the given grouped product and SwiGLU."""
    experts_NK, weights_NK = ascending(experts_NK, weights_NK)
    plan = _plan(experts_NK, gate_up_EDF.shape[0])
    # Rounded before dispatch: each token once instead of K times, and a scale per tensor sees no padding.
    x_RD = apply(_Dispatch, numerics.activation(x_ND, "gate_up"), plan.token_R, plan.row_KN)
    gate_up_RF = _expert_product(grouped, x_RD, gate_up_EDF, plan, len(x_ND), "gate_up", numerics)
    # Here a scale per tensor does see padding: copies of token 0, at experts that it may not have chosen.
    hidden_RF = numerics.activation(activate(gate_up_RF), "down")
    y_RD = _expert_product(grouped, hidden_RF, down_EFD, plan, len(x_ND), "down", numerics)
    return apply(_Combine, y_RD, weights_NK, plan.token_R, plan.row_KN)


def _by_ends(grouped: GroupedProduct, ends_E: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return grouped(x, weight, ends_E)


def _expert_product(
    grouped: GroupedProduct,
    x_RD: Tensor,
    weight_EDO: Tensor,
    plan: _Plan,
    num_tokens: int,
    site: Site,
    numerics: Numerics,
) -> Tensor:
    if numerics is EXACT:
        return grouped(x_RD, weight_EDO, plan.ends_E)
    multiply = partial(_by_ends, grouped, plan.ends_E)
    weight_EDO = numerics.weight(weight_EDO, site)
    return numerics.output(product(multiply, x_RD, weight_EDO, num_tokens, site, numerics), site)
