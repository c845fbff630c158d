"""Matrix products whose rows do not depend on the batch, and attention built from them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from sandbox.kernels.numerics import EXACT, Numerics, Site

# Measured failures: 1 to 3 rows (AVX2), 1 row (AVX512). Twice the margin costs little.
MIN_ROWS = 8
# Measured failures (AVX512 with AMX): up to 8 rows at an inner width of 192, rising to 15 from 384 on; none at 160.
WIDE, WIDE_ROWS = 128, 16
# Rows of queries of one sequence: no failure from 4 rows on, and a decoded token pays for every row.
MIN_QUERIES = 4
# Numbers of keys are rounded up to a multiple of this: a vectorised softmax sums at most 16 lanes.
MIN_KEYS = 16
# Measured failures: sums over 193 to 383 keys, which one library splits in halves.
KEY_BLOCK = 128
# Measured failures: rows, and matrices of a batch, that do not start at a multiple of 16 bytes.
ALIGNMENT = 8


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def linear(x: Float[Tensor, "*rows D"], weight_OD: Float[Tensor, "O D"]) -> Float[Tensor, "*rows O"]:
    """x W^T, with at least MIN_ROWS rows and columns in the product (one column is a matrix-vector product).

    Sums over more than WIDE terms have at least WIDE_ROWS rows.
    """
    num_out, width = weight_OD.shape
    num_rows = MIN_ROWS if width <= WIDE else WIDE_ROWS
    if num_out >= MIN_ROWS and width % ALIGNMENT == 0 and x.numel() >= num_rows * width:
        # The usual case, without views and padding: a decoding step calls this often, for little work.
        return F.linear(x.contiguous(), weight_OD)
    x_ND, weight_OD = aligned(x.reshape(-1, width), -1), aligned(weight_OD, -1)
    N = x_ND.shape[0]
    # Below these sizes a library picks another kernel, which sums in another order than for a large batch.
    if num_out < MIN_ROWS:
        weight_OD = F.pad(weight_OD, (0, 0, 0, MIN_ROWS - num_out))
    if num_rows > N:
        x_ND = F.pad(x_ND, (0, 0, 0, num_rows - N))
    return F.linear(x_ND, weight_OD)[:N, :num_out].reshape(*x.shape[:-1], num_out)


def product(
    multiply: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    num_rows: int,
    site: Site,
    numerics: Numerics,
) -> Tensor:
    """multiply(x, weight), summed over the inner axis (the last of x, axis 1 of the weight) in the numerics' order.

    `num_rows` is the number of tokens in the batch; a kernel may choose its order of summation by it.
    """
    if numerics is EXACT:
        return multiply(x, weight)
    return numerics.product(functools.partial(_part, multiply, x, weight), x.shape[-1], num_rows, site)


def _part(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, start: int, stop: int) -> Tensor:
    # Not nested inside `product`: the tests' shape checks would instrument a new function on every call.
    if stop - start == x.shape[-1]:
        return multiply(x, weight)
    return multiply(x[..., start:stop].contiguous(), weight.narrow(1, start, stop - start).contiguous())


def key_mask(num_seen_BS: Int[Tensor, "#B S"], num_slots: int, dtype: torch.dtype) -> Float[Tensor, "#B S P"]:
    """The mask that `attention` adds to scores: 0 for a query's first `num_seen_BS` key slots, -inf for the others."""
    slot_P = torch.arange(num_slots)
    # -inf, so that softmax gives exactly 0: such a key adds 0 times its value, which must be finite.
    return torch.where(slot_P >= num_seen_BS[:, :, None], float("-inf"), 0.0).to(dtype)


def attention(
    q_BSHd: Float[Tensor, "B S H d"],
    k_BhPd: Float[Tensor, "B h P d"],
    v_BhPd: Float[Tensor, "B h P d"],
    bias_BSP: Float[Tensor, "#B S P"],
) -> Float[Tensor, "B S H d"]:
    """softmax(q k^T / sqrt(d) + bias) v, where the H / h query heads of a group share one key head.

    P is a multiple of MIN_KEYS; `bias_BSP` is 0 where query s sees key slot p and -inf elsewhere (padding included).
    The heads of a group are rows of one product: a decoded token has G rows, padded to MIN_QUERIES.
    """
    B, S, H, d = q_BSHd.shape
    h, P = k_BhPd.shape[1], k_BhPd.shape[2]
    G = H // h
    assert P % MIN_KEYS == 0, f"{P} key slots are no multiple of {MIN_KEYS}"
    q = q_BSHd.view(B, S, h, G, d).permute(0, 2, 3, 1, 4).reshape(B * h, G * S, d) * d**-0.5
    # After the scale, which is that of the true d; columns of zeros change no score.
    q, k, v = (aligned(t, -1) for t in (q, k_BhPd.flatten(0, 1), v_BhPd.flatten(0, 1)))
    scores = torch.bmm(_repeated(q), k.transpose(1, 2))[:, : G * S].view(B, h, G, S, P)
    # In place, except where padding rows were sliced off: the copy made here saves the softmax from making one.
    add = scores.add_ if scores.is_contiguous() else scores.add
    # Repeated again: the slice above dropped the added rows, and the product with v has as few.
    probs = _repeated(add(bias_BSP[:, None, None]).softmax(dim=-1).view(B * h, G * S, P))
    # Blocks of fixed size, added in order: a row's split does not depend on how many keys its neighbours have.
    if P <= KEY_BLOCK:
        out = torch.bmm(probs, v)
    else:
        blocks = zip(probs.split(KEY_BLOCK, 2), v.split(KEY_BLOCK, 1), strict=True)
        out = functools.reduce(torch.add, (torch.bmm(probs_block, v_block) for probs_block, v_block in blocks))
    return out[:, : G * S, :d].view(B, h, G, S, d).permute(0, 3, 1, 2, 4).reshape(B, S, H, d)


def aligned(x: Tensor, axis: int) -> Tensor:
    """x with this axis, -1 or -2, padded with zeros to a multiple of ALIGNMENT; x itself if it needs no padding."""
    missing = -x.shape[axis] % ALIGNMENT
    if missing == 0:
        return x
    return F.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing))


def _repeated(x_MRD: Tensor) -> Tensor:
    """The rows of every matrix, repeated until there are at least MIN_QUERIES; cheaper than padding with zeros."""
    rows = x_MRD.shape[1]
    return x_MRD if rows >= MIN_QUERIES else torch.cat([x_MRD] * -(-MIN_QUERIES // rows), dim=1)
