"""Log-probabilities and entropies of tokens from logits whose vocabulary is split over tensor-parallel ranks.

Logits are made for the rows that predict response tokens alone, and every tensor-parallel rank gets the same numbers.

Extra letters: n, the response tokens of a micro-batch, packed; W, the vocabulary rows of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup


class ResponseHead:
    """Stands before a GPTModel's output layer and hands it the chosen rows of the hidden states alone.

    `rows_n` must be set before each forward: rows of the flattened (S, B) hidden states, s * B + b.
    """

    def __init__(self, output_layer: Any, sequence_parallel: bool) -> None:
        self.rows_n: Int[Tensor, " n"] | None = None
        self._layer = output_layer
        self._sequence_parallel = sequence_parallel
        output_layer.forward = self.forward  # type: ignore[method-assign]

    def forward(
        self,
        hidden_SBD: Float[Tensor, "S B D"],
        weight: Float[Tensor, "W D"] | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Float[Tensor, "n 1 W"], None]:
        """This rank's slice of the logits of the chosen rows; the hidden states' gradient is summed over ranks."""
        assert not runtime_gather_output, "the vocabulary stays split"
        assert self.rows_n is not None, "a forward without the rows to score"
        rows_n, self.rows_n = self.rows_n, None
        if self._sequence_parallel:
            hidden_SBD = gather_from_sequence_parallel_region(hidden_SBD)
        else:
            hidden_SBD = copy_to_tensor_model_parallel_region(hidden_SBD)
        hidden_nD = hidden_SBD.flatten(0, 1)[rows_n]
        logits_nW = torch.nn.functional.linear(hidden_nD, self._layer.weight if weight is None else weight)
        return logits_nW[:, None], None


class _TokenScores(torch.autograd.Function):
    """d logp / d z_v = [v is the token] - softmax(z)_v; the entropy is a number without gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits_nW: Tensor, tokens_n: Tensor, first: int, num_valid: int, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        logits_nW = logits_nW.float().clone()
        logits_nW[:, num_valid:] = float("-inf")  # rows that only fill up the vocabulary to a multiple of TP
        largest_n = logits_nW.amax(dim=-1)
        dist.all_reduce(largest_n, op=dist.ReduceOp.MAX, group=group)
        logits_nW -= largest_n[:, None]
        is_mine_n = (tokens_n >= first) & (tokens_n < first + num_valid)
        column_n = torch.where(is_mine_n, tokens_n - first, 0)
        logit_n = torch.where(is_mine_n, logits_nW.gather(1, column_n[:, None])[:, 0], 0.0)
        weights_nW = logits_nW.exp()
        # 0 * -inf of the filling rows is left out: they carry no probability.
        moment_n = (weights_nW[:, :num_valid] * logits_nW[:, :num_valid]).sum(-1)
        sums_3n = torch.stack([weights_nW.sum(-1), logit_n, moment_n])
        dist.all_reduce(sums_3n, group=group)
        total_n, logit_n, moment_n = sums_3n
        log_total_n = total_n.log()
        probs_nW = weights_nW.div_(total_n[:, None])
        ctx.save_for_backward(probs_nW, is_mine_n, column_n)
        logp_n, entropy_n = logit_n - log_total_n, log_total_n - moment_n / total_n
        ctx.mark_non_differentiable(entropy_n)
        return logp_n, entropy_n

    @staticmethod
    def backward(ctx: Any, grad_n: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        probs_nW, is_mine_n, column_n = ctx.saved_tensors
        grad_nW = probs_nW * -grad_n[:, None]
        grad_nW.scatter_add_(1, column_n[:, None], torch.where(is_mine_n, grad_n, 0.0)[:, None])
        return grad_nW, None, None, None, None


def token_scores(
    logits_nW: Float[Tensor, "n W"], tokens_n: Int[Tensor, " n"], vocab_size: int, group: ProcessGroup
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """log p of the given tokens (nats, at most 0) and the entropy of each distribution (nats, at least 0), in float32.

    Rank r of `group` holds the logits of tokens [r W, (r + 1) W); rows from `vocab_size` on fill the vocabulary up and
    have probability 0. The gradient reaches the logits through log p; each rank's is that of its own slice.
    Raises ValueError for a token outside [0, vocab_size).
    """
    if bool(((tokens_n < 0) | (tokens_n >= vocab_size)).any()):
        bad = tokens_n[(tokens_n < 0) | (tokens_n >= vocab_size)][0].item()
        raise ValueError(f"expected tokens in [0, {vocab_size}), got {bad}")
    W = logits_nW.shape[1]
    first = dist.get_rank(group) * W
    num_valid = min(max(vocab_size - first, 0), W)
    return _TokenScores.apply(logits_nW, tokens_n, first, num_valid, group)  # type: ignore[return-value]
