"""Micro-batches of one rank: its share of the responses, padded to one width, the same sizes on every rank.

Every rank of a pipeline and of an expert-parallel group must run micro-batches of the same sizes, so a share that does
not divide is filled up with empty responses: no rows, no tokens, no gradient. Either every micro-batch has
`training.micro_batch_size` responses and the width of the longest of the batch, or, with
`training.max_tokens_per_micro_batch`, as many as that budget holds, of similar lengths, at the width of its longest.

Extra letters: U responses of a rank, the longest first; b responses of a micro-batch, filling included; n its response
tokens, packed; J tokens scored at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import Layout, context_positions
from theory.contracts import TokenBatch

SLOT_SHARE = 1 / 16
"""The fixed cost of a micro-batch of any size, in positions, as a share of the token budget."""


@dataclass(frozen=True)
class Slot:
    """The micro-batches that the data-parallel ranks run at the same time: `shares` are their responses, by rank.

    Each is filled up to `size` responses of `width` positions.
    """

    shares: tuple[tuple[int, ...], ...]
    size: int
    width: int

    @property
    def num_positions(self) -> int:
        """Positions that all ranks together compute, filling included."""
        return len(self.shares) * self.size * self.width


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Responses `indices` of the batch, then `num_filling` empty ones; `tokens_bS` are inputs, one width for all ranks.

    Response token n is at (response_n, position_n) of the (b, T) tensors and is predicted by row `rows_n` of the
    flattened (S, b) hidden states of context-parallel rank `rank_n`, S being that rank's positions, of `width` in all.
    It is the first of `targets_nJ`; on the last stage mu's likeliest tokens follow where the rollouts have them. T is
    `num_positions`: the longest response of the batch, or, under a token budget, of these, as b T would exceed the
    budget otherwise. `num_rows_b` are the routing rows without padding; logits are divided by `temperature`.
    """

    indices: tuple[int, ...]
    num_filling: int
    width: int
    tokens_bS: Int[Tensor, "b S"]
    num_rows_b: tuple[int, ...]
    num_positions: int
    rank_n: Int[Tensor, " n"]
    rows_n: Int[Tensor, " n"]
    targets_nJ: Int[Tensor, "n J"]
    response_n: Int[Tensor, " n"]
    position_n: Int[Tensor, " n"]
    temperature: float


def arrange(num_rows_B: Sequence[int], training: TrainingBlock) -> list[Slot]:
    """The schedule of responses of every data-parallel rank, from the rows (input tokens) of each response.

    Without a token budget: adjacent responses in equal shares. With one: responses from the longest to the shortest,
    cut into slots of equal micro-batches for all ranks, so that ranks do equal work and a response is padded to its
    neighbours' length. The cut has the fewest positions of all within the budget, where each micro-batch counts as
    SLOT_SHARE of the budget more. A response longer than the budget is computed alone.
    """
    if training.max_tokens_per_micro_batch is None:
        return _adjacent(num_rows_B, training)
    dp, B = training.data_parallel, len(num_rows_B)
    # Every rank computes the slots of all ranks by itself, and they must agree: nothing here depends on the rank.
    order = sorted(range(B), key=lambda b: -num_rows_B[b])
    # Every dp-th: the longest of the dp responses that the ranks compute side by side.
    widths = np.array([_multiple(num_rows_B[b], training.width_multiple) for b in order[::dp]])
    slots, start = [], 0
    for size in _sizes(widths, training.max_tokens_per_micro_batch):
        now = order[start * dp : (start + size) * dp]
        # Dealt in turn, so that ranks get responses of about the same lengths.
        slots.append(Slot(tuple(tuple(now[rank::dp]) for rank in range(dp)), size, int(widths[start])))
        start += size
    return slots


def _sizes(widths: Int[np.ndarray, " U"], budget: int) -> list[int]:
    """Responses per rank of each slot, from U descending widths of which each slot is as wide as its first.

    cost(u) = min over k of  k widths[u] + budget SLOT_SHARE + cost(u + k),  where k widths[u] <= budget or k = 1
    """
    num = len(widths)
    cost, best = np.zeros(num + 1), np.ones(num, dtype=np.int64)
    # Backwards: cost[u] is the least cost of responses from u on.
    for u in range(num - 1, -1, -1):
        most = min(num - u, max(1, budget // int(widths[u])))
        sizes = np.arange(1, most + 1)
        costs = sizes * widths[u] + cost[u + 1 : u + 1 + most]
        best[u] = sizes[costs.argmin()]
        # The fixed cost is the same for every size, so the choice above can leave it out.
        cost[u] = costs.min() + budget * SLOT_SHARE
    found, u = [], 0
    while u < num:
        found.append(int(best[u]))
        u += found[-1]
    return found


def _adjacent(num_rows_B: Sequence[int], training: TrainingBlock) -> list[Slot]:
    B, size, dp = len(num_rows_B), training.micro_batch_size, training.data_parallel
    share = -(-B // dp)
    num_micro = -(-share // size)
    if training.virtual_pipeline > 1:  # interleaved 1F1B takes micro-batches in groups of the pipeline's stages
        num_micro = _multiple(num_micro, training.pipeline_parallel)
    width = _multiple(max(num_rows_B), training.width_multiple)
    shares = [range(min(B, rank * share), min(B, (rank + 1) * share)) for rank in range(dp)]
    return [Slot(tuple(tuple(own[m * size : (m + 1) * size]) for own in shares), size, width) for m in range(num_micro)]


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def split(batch: TokenBatch, layout: Layout, training: TrainingBlock, device: torch.device) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches, in order."""
    slots = arrange((batch.num_tokens_B - 1).tolist(), training)
    is_budgeted = training.max_tokens_per_micro_batch is not None
    return [_micro_batch(batch, slot, layout, is_budgeted, device) for slot in slots]


def _micro_batch(batch: TokenBatch, slot: Slot, layout: Layout, is_budgeted: bool, device: torch.device) -> MicroBatch:
    mine, size, width = slot.shares[layout.dp_rank], slot.size, slot.width
    indices = list(mine)
    # Token 0 fills up: attention is causal, so no real position sees it, and none of its rows is scored.
    tokens_bS = torch.zeros(size, width, dtype=torch.int64)
    # The last token is only ever a target.
    inputs = batch.tokens_BS[indices, :-1][:, :width]
    tokens_bS[: len(indices), : inputs.shape[1]] = inputs
    num_prompt_b, num_tokens_b = batch.num_prompt_B[indices], batch.num_tokens_B[indices]
    num_response_b = num_tokens_b - num_prompt_b
    T = int(num_response_b.max()) if is_budgeted and indices else batch.is_response_BT.shape[1]
    exists_bT = torch.arange(T) < num_response_b[:, None]
    response_n, position_n = exists_bT.nonzero(as_tuple=True)
    # Row s reads token s and predicts token s + 1.
    row_n = num_prompt_b[response_n] + position_n - 1
    targets_nJ = batch.tokens_BS[indices][response_n, row_n + 1][:, None]
    if batch.top is not None and layout.is_last_stage:  # no other stage scores, or fetches them
        # The rows of these responses, packed, are those of `exists_bT`.
        targets_nJ = torch.cat([targets_nJ, batch.top.id_rows.select(indices).values.long()], dim=1)
    positions_CQ = context_positions(width, layout.cp_size)
    # argsort inverts the permutation: the place of each position when ranks' positions stand one after the other.
    place_n = positions_CQ.flatten().argsort()[row_n]
    num_filling = size - len(indices)
    return MicroBatch(
        indices=tuple(indices),
        num_filling=num_filling,
        width=width,
        tokens_bS=tokens_bS[:, positions_CQ[layout.cp_rank]].to(device),
        num_rows_b=(*(num_tokens_b - 1).tolist(), *[0] * num_filling),
        num_positions=T,
        rank_n=(place_n // positions_CQ.shape[1]).to(device),
        # Hidden states are (S, b): the position is the outer index.
        rows_n=(place_n % positions_CQ.shape[1] * size + response_n).to(device),
        targets_nJ=targets_nJ.to(device),
        response_n=response_n.to(device),
        position_n=position_n.to(device),
        temperature=batch.temperature,
    )


__all__ = ["MicroBatch", "Slot", "arrange", "split"]
