"""Context parallelism: the ranks of a group share the positions of each response (`parallel.context_runs`).

All but attention works on each position by itself. Transformer Engine's attention exchanges keys and values between the
ranks; where it is missing, each rank gathers them here and computes its own queries, as Llama 3 does (arXiv 2407.21783,
sec. 3.3.2). Scores of tokens are gathered too, since an objective may need whole responses.

Extra letters: C context-parallel ranks; Q positions of one, S of all; H heads, G of keys and values, d and v their
widths; n response tokens of a micro-batch, m of them this rank's; X numbers of each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from scaled.megatron_engine.parallel import context_positions


class GatheredAttention(DotProductAttention):
    """Megatron's local attention, of this rank's queries over the keys and values of all context-parallel ranks."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        cp_size = config.context_parallel_size
        if cp_size > 1:
            # Megatron's class refuses more than one rank, as it would attend to this rank's keys alone.
            # A copy, as other modules read the real size from the same object.
            config = copy.copy(config)
            config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)
        self.cp_size = cp_size

    def forward(
        self,
        query: Float[Tensor, "Q B H d"],
        key: Float[Tensor, "Q B G d"],
        value: Float[Tensor, "Q B G v"],
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Float[Tensor, "Q B Hv"]:
        """Causal attention; under context parallelism the mask follows from the positions, and none may be given."""
        if self.cp_size == 1:
            return super().forward(query, key, value, attention_mask, *args, **kwargs)
        assert attention_mask is None, "a mask from the caller would cover this rank's keys alone"
        group: Any = parallel_state.get_context_parallel_group()
        positions_CQ = context_positions(len(query) * self.cp_size, self.cp_size).to(query.device)
        # In the order of positions, so that each softmax sums in the same order as on one rank.
        order_S = positions_CQ.flatten().argsort()
        # Backward is a reduce-scatter: a key's gradient is the sum over all ranks whose queries saw it.
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=group).index_select(0, order_S)
            for x in (key, value)
        )
        # Megatron's own triangle, which it makes where no mask is given, wants as many queries as keys.
        is_future_QS = torch.arange(len(key), device=key.device) > positions_CQ[dist.get_rank(group)][:, None]
        return super().forward(query, key, value, is_future_QS[None, None], *args, **kwargs)


class _FromRanks(torch.autograd.Function):
    """Every rank computes the same loss of the gathered scores, so a rank's gradient is its own rows', not a sum."""

    @staticmethod
    def forward(ctx: Any, scores_mX: Tensor, rank_n: Tensor, group: ProcessGroup) -> Tensor:
        ctx.is_own_n = rank_n == dist.get_rank(group)
        counts = torch.bincount(rank_n, minlength=dist.get_world_size(group)).tolist()
        own = scores_mX.new_zeros((max(counts), scores_mX.shape[1]))  # ranks have different numbers of tokens
        own[: len(scores_mX)] = scores_mX
        found = [torch.empty_like(own) for _ in counts]
        dist.all_gather(found, own, group=group)
        scores_nX = scores_mX.new_empty((len(rank_n), scores_mX.shape[1]))
        # A rank's tokens keep their order, so a mask finds their places.
        for rank, (scores_rX, count) in enumerate(zip(found, counts, strict=True)):
            scores_nX[rank_n == rank] = scores_rX[:count]
        return scores_nX

    @staticmethod
    def backward(ctx: Any, grad_nX: Tensor) -> tuple[Tensor, None, None]:
        return grad_nX[ctx.is_own_n], None, None


def from_ranks(scores_mX: Float[Tensor, "m X"], rank_n: Int[Tensor, " n"]) -> Float[Tensor, "n X"]:
    """The scores of all tokens from the ranks that computed them, `rank_n`; each rank gives its own in their order.

    The gradient assumes that every rank computes the same loss of the result.
    """
    if parallel_state.get_context_parallel_world_size() == 1 or len(rank_n) == 0:
        return scores_mX
    return _FromRanks.apply(scores_mX, rank_n, parallel_state.get_context_parallel_group())  # type: ignore[return-value]


__all__ = ["GatheredAttention", "from_ranks"]
