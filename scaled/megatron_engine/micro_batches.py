"""Micro-batches of one rank: its share of the responses, padded to one width, the same number on every rank.

Every rank of a pipeline and of an expert-parallel group must run micro-batches of the same sizes, so a share that does
not divide is filled up with empty responses: no rows, no tokens, no gradient.

Extra letters: b responses of a micro-batch, filling included; n its response tokens, packed; J tokens scored at each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import Layout
from theory.contracts import TokenBatch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Responses `indices` of the batch, then `num_filling` empty ones; `tokens_bS` are inputs, one width for all ranks.

    Response token n stands at (response_n, position_n) of the (b, T) tensors, is the first of `targets_nJ`, before mu's
    likeliest tokens there where the rollouts have them, and is predicted by row `rows_n` of the flattened (S, b) hidden
    states. `num_rows_b` are the routing rows, without padding. Logits are divided by `temperature`.
    """

    indices: tuple[int, ...]
    num_filling: int
    tokens_bS: Int[Tensor, "b S"]
    num_rows_b: tuple[int, ...]
    rows_n: Int[Tensor, " n"]
    targets_nJ: Int[Tensor, "n J"]
    response_n: Int[Tensor, " n"]
    position_n: Int[Tensor, " n"]
    temperature: float


def split(batch: TokenBatch, layout: Layout, training: TrainingBlock, device: torch.device) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches, in order: adjacent responses, equal shares up to filling."""
    B, size = len(batch.num_tokens_B), training.micro_batch_size
    share = -(-B // layout.dp_size)
    num_micro = -(-share // size)
    if layout.num_chunks > 1:  # interleaved 1F1B takes micro-batches in groups of the pipeline's stages
        num_micro = -(-num_micro // layout.pp_size) * layout.pp_size
    mine = range(min(B, layout.dp_rank * share), min(B, (layout.dp_rank + 1) * share))
    width = int(batch.num_tokens_B.max()) - 1
    width = -(-width // layout.tp_size) * layout.tp_size
    return [_micro_batch(batch, mine[m * size : (m + 1) * size], size, width, device) for m in range(num_micro)]


def _micro_batch(batch: TokenBatch, mine: range, size: int, width: int, device: torch.device) -> MicroBatch:
    indices = list(mine)
    tokens_bS = torch.zeros(size, width, dtype=torch.int64)
    inputs = batch.tokens_BS[indices, :-1]
    tokens_bS[: len(indices), : inputs.shape[1]] = inputs
    num_prompt_b, num_tokens_b = batch.num_prompt_B[indices], batch.num_tokens_B[indices]
    T = batch.is_response_BT.shape[1]
    exists_bT = torch.arange(T) < (num_tokens_b - num_prompt_b)[:, None]
    response_n, position_n = exists_bT.nonzero(as_tuple=True)
    row_n = num_prompt_b[response_n] + position_n - 1
    targets_nJ = batch.tokens_BS[indices][response_n, row_n + 1][:, None]
    if batch.top_ids_BTK is not None:
        targets_nJ = torch.cat([targets_nJ, batch.top_ids_BTK[indices][response_n, position_n]], dim=1)
    num_filling = size - len(indices)
    return MicroBatch(
        indices=tuple(indices),
        num_filling=num_filling,
        tokens_bS=tokens_bS.to(device),
        num_rows_b=(*(num_tokens_b - 1).tolist(), *[0] * num_filling),
        rows_n=(row_n * size + response_n).to(device),
        targets_nJ=targets_nJ.to(device),
        response_n=response_n.to(device),
        position_n=position_n.to(device),
        temperature=batch.temperature,
    )


__all__ = ["MicroBatch", "split"]
