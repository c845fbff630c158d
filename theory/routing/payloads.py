"""The routing record of an engine's payloads, which may differ from it in rows, layers and integer types.

They are cut to the rows and layers of the record, checked, narrowed and sorted; nothing is filled in.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from theory.routing.packed_rows import offsets_of
from theory.routing.record import MISSING, RoutingRecord, check_layer_numbers, index_dtype


def pack_record(
    rows_per_response: Sequence[Tensor],
    num_tokens: Sequence[int],
    layer_numbers: Sequence[int],
    num_experts: int,
    *,
    num_decoder_layers: int | None = None,
) -> RoutingRecord:
    """The record of engine payloads, one (rows, L, K) integer tensor per response of `num_tokens[b]` tokens.

    `layer_numbers` names the payload's L columns. A payload of `num_decoder_layers` columns is over all decoder layers
    and is cut to those. Exactly one row too many (an engine that ran the last token) is dropped with a warning; any
    other number of rows than S - 1 is an error: a caller that lost rows must mark them by -1. A layer whose recorded
    ids are all 0 looks like an unfilled buffer: an error, or a warning where K = 1, where every row may have chosen
    expert 0. Slots are sorted into ascending order.
    """
    if len(rows_per_response) != len(num_tokens) or not rows_per_response:
        raise ValueError(
            f"expected a payload for each of {len(num_tokens)} responses, got {len(rows_per_response)} payloads"
        )
    # Columns come in any order, and `_columns` finds them by name.
    kept = tuple(sorted(layer_numbers))
    check_layer_numbers(kept)
    payloads = _drop_trailing_rows(rows_per_response, num_tokens)
    K = payloads[0].shape[2]
    packed = []
    for b, payload in enumerate(payloads):
        if payload.shape[2] != K:
            raise ValueError(f"response {b}: expected {K} slots as in response 0, got {payload.shape[2]}")
        columns = _columns(payload.shape[1], tuple(layer_numbers), kept, num_decoder_layers, b)
        packed.append(_narrow(payload, columns, num_experts, kept, b))
    experts = torch.cat(packed)
    # Before the record's own check, which could only say that ids repeat.
    _check_all_zero(experts, kept, num_experts)
    return RoutingRecord(experts, offsets_of([len(p) for p in packed]).to(experts.device), kept, num_experts)


def _drop_trailing_rows(payloads: Sequence[Tensor], num_tokens: Sequence[int]) -> list[Tensor]:
    kept, surplus = [], []
    for b, (payload, S) in enumerate(zip(payloads, num_tokens, strict=True)):
        if payload.is_floating_point() or payload.is_complex() or payload.dtype == torch.bool:
            raise ValueError(f"response {b}: expected integer expert ids, got {payload.dtype}")
        if payload.dim() != 3:
            raise ValueError(f"response {b}: expected ids of shape (rows, layers, slots), got {tuple(payload.shape)}")
        if S < 1 or len(payload) not in (S - 1, S):
            raise ValueError(f"response {b}: expected {S - 1} rows for {S} tokens, got {len(payload)}")
        if len(payload) == S:
            surplus.append(b)
        kept.append(payload[: S - 1])
    if surplus:
        warnings.warn(
            f"dropped one trailing row of {len(surplus)} responses: the last token was never an input "
            f"(response {surplus[0]}: {num_tokens[surplus[0]]} rows for {num_tokens[surplus[0]]} tokens)",
            stacklevel=3,
        )
    return kept


def _columns(
    L: int, layer_numbers: tuple[int, ...], kept: tuple[int, ...], num_decoder_layers: int | None, b: int
) -> list[int]:
    # Names come first: where they are as many as the decoder layers, they may still be in another order.
    if len(layer_numbers) == L:
        names: Sequence[int] = layer_numbers
    elif num_decoder_layers == L:
        names = range(L)
    else:
        depth = "" if num_decoder_layers is None else f", or all {num_decoder_layers} decoder layers"
        raise ValueError(f"response {b}: expected {len(layer_numbers)} layers {list(layer_numbers)}{depth}, got {L}")
    absent = [n for n in kept if n not in names]
    if absent:
        raise ValueError(f"response {b}: expected layers {list(kept)}, got a payload of {list(names)} without {absent}")
    return [names.index(n) for n in kept]


_COMPARABLE = {
    torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
}  # fmt: skip
"""The signed type in which ids of an unsigned type are compared."""


def _narrow(payload: Tensor, columns: list[int], num_experts: int, kept: tuple[int, ...], b: int) -> Tensor:
    # The range is checked before narrowing, which would wrap an id of 300 into a valid one; and in the payload's own
    # width, as at 32K tokens int64 ids of one response alone take 100 MB. torch compares no unsigned type but uint8.
    wide = payload.to(_COMPARABLE.get(payload.dtype, payload.dtype))[:, columns]
    top = num_experts - 1
    # torch wraps `top` to the ids' type before it compares: where it does not fit, no id is too large.
    too_large = wide > top if top <= torch.iinfo(wide.dtype).max else torch.zeros_like(wide).bool()
    outside = ((wide < MISSING) | too_large).any(dim=-1)
    if bool(outside.any()):
        row, layer = (int(i) for i in outside.nonzero()[0])
        raise ValueError(
            f"response {b}, row {row}, layer {kept[layer]}: expected expert ids in [0, {num_experts}) or -1, "
            f"got {wide[row, layer].tolist()}"
        )
    return wide.to(index_dtype(num_experts)).sort(dim=-1).values


def _check_all_zero(experts: Int[Tensor, "R L K"], kept: tuple[int, ...], num_experts: int) -> None:
    # With a single expert every id is 0.
    if num_experts == 1 or len(experts) == 0:
        return
    is_zero = (experts == 0).all(dim=-1)
    is_missing = (experts == MISSING).all(dim=-1)
    # A layer that is missing throughout is allowed: only a recorded 0 tells of an unfilled buffer.
    dead = (is_zero | is_missing).all(dim=0) & is_zero.any(dim=0)
    if bool(dead.any()):
        layer = int(dead.nonzero()[0])
        words = (
            f"layer {kept[layer]}: expected routed experts, got id 0 in every slot of all "
            f"{int(is_zero[:, layer].sum())} recorded rows (a buffer that was never filled?)"
        )
        if experts.shape[2] > 1:
            raise ValueError(words)
        warnings.warn(words, stacklevel=3)
