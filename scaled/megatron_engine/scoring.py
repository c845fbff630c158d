"""Log-probabilities and entropies of tokens from hidden states, the vocabulary split over tensor-parallel ranks.

Logits are computed only for the rows that predict response tokens, a chunk at a time, and again in backward: the logits
of a whole response would take more memory than anything else in training. Every tensor-parallel rank gets the
same numbers. Megatron's own fused head and loss gives neither entropies nor values on a CPU.

Extra letters: n, the response tokens of a micro-batch, packed; c of a chunk; W, the vocabulary rows of one rank; J, the
tokens scored at a position: the sampled one, and mu's likeliest where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from scaled.megatron_engine.context_parallel import from_ranks
from theory.temperature import tempered

ROWS = 1024
"""Vocabulary rows of the head's bf16 gradient per matrix product."""


class ResponseHead:
    """Replaces a GPTModel's output layer: instead of logits, the entropy and log p of the chosen tokens.

    `expect` must be called before each forward.
    """

    def __init__(self, output_layer: Any, sequence_parallel: bool, vocab_size: int, chunk: int) -> None:
        self._asked: tuple[Tensor, Tensor, Tensor, float] | None = None
        self._layer = output_layer
        self._sequence_parallel = sequence_parallel
        self._vocab_size, self._chunk = vocab_size, chunk
        output_layer.forward = self.forward  # type: ignore[method-assign]
        output_layer._forward_hooks.clear()  # model.py's hook masks padding in logits; `_Slice.logits` does it here

    def expect(
        self, rank_n: Int[Tensor, " n"], rows_n: Int[Tensor, " n"], tokens_nJ: Int[Tensor, "n J"], temperature: float
    ) -> None:
        """The next forward scores `tokens_nJ`, predicted by rows s * B + b of the flattened (S, B) hidden states of
        context-parallel ranks `rank_n`.
        """
        self._asked = rank_n, rows_n, tokens_nJ, temperature

    def forward(
        self,
        hidden_SBD: Float[Tensor, "S B D"],
        weight: Float[Tensor, "W D"] | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Float[Tensor, "n 1 _"], None]:
        """The entropy and sum_v p(v)^2 of each row, then log p of its J tokens, in float32; the hidden states' gradient
        is summed over ranks.
        """
        assert not runtime_gather_output, "the vocabulary stays split"
        assert self._asked is not None, "a forward without the tokens to score"
        (rank_n, rows_n, tokens_nJ, temperature), self._asked = self._asked, None
        # In backward both sum the gradient over ranks, as each has only its own slice of the vocabulary.
        if self._sequence_parallel:
            hidden_SBD = gather_from_sequence_parallel_region(hidden_SBD)
        else:
            hidden_SBD = copy_to_tensor_model_parallel_region(hidden_SBD)
        is_own_n = rank_n == parallel_state.get_context_parallel_rank()
        hidden_mD = hidden_SBD.flatten(0, 1)[rows_n[is_own_n]]
        weight_WD = self._layer.weight if weight is None else weight
        group: Any = parallel_state.get_tensor_model_parallel_group()
        logp_mJ, entropy_m, squares_m = token_scores(
            hidden_mD, weight_WD, tokens_nJ[is_own_n], self._vocab_size, group, self._chunk, temperature
        )
        scores_mX = torch.cat([entropy_m[:, None], squares_m[:, None], logp_mJ], dim=-1)
        return from_ranks(scores_mX, rank_n)[:, None], None


@dataclass(frozen=True)
class _Slice:
    """This rank's part of the vocabulary: its first token, how many of its rows are tokens, all ranks; and T."""

    first: int
    num_valid: int
    group: ProcessGroup
    temperature: float

    def columns(self, tokens_cJ: Tensor) -> tuple[Tensor, Tensor]:
        """A mask of the tokens that are this rank's, and their columns (0 for the others)."""
        is_mine_cJ = (tokens_cJ >= self.first) & (tokens_cJ < self.first + self.num_valid)
        return is_mine_cJ, torch.where(is_mine_cJ, tokens_cJ - self.first, 0)

    def logits(self, hidden_cD: Tensor, weight_WD: Tensor) -> Tensor:
        """(c, W) over T in float32, -inf for the rows that only pad the vocabulary to a multiple of TP."""
        # float32 before exp and log: in bf16 a log-probability has 3 digits.
        logits_cW = tempered(torch.nn.functional.linear(hidden_cD, weight_WD).float(), self.temperature)
        logits_cW[:, self.num_valid :] = float("-inf")
        return logits_cW

    def scores(self, logits_cW: Tensor, tokens_cJ: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """log p (c, J); entropy, sum of p^2, largest logit and sum of exp(logit - largest), each (c,); overwrites the
        logits.
        """
        largest_c = logits_cW.amax(dim=-1)
        # The largest of all ranks, so that no exp overflows and all ranks share one scale.
        dist.all_reduce(largest_c, op=dist.ReduceOp.MAX, group=self.group)
        logits_cW -= largest_c[:, None]
        is_mine_cJ, column_cJ = self.columns(tokens_cJ)
        # Before `mul_` below overwrites the logits. One rank has a token's logit, so the sum over ranks is that logit.
        logit_cJ = torch.where(is_mine_cJ, logits_cW.gather(1, column_cJ), 0.0)
        weights_cW = logits_cW.exp()
        # Without the padding rows: they have no probability, and 0 * -inf is NaN.
        valid = slice(0, self.num_valid)
        moment_c = logits_cW[:, valid].mul_(weights_cW[:, valid]).sum(-1)
        square_c = torch.linalg.vector_norm(weights_cW, dim=-1).square()  # without a second (c, W)
        # One all-reduce for all sums.
        sums_c = torch.cat([weights_cW.sum(-1, keepdim=True), moment_c[:, None], square_c[:, None], logit_cJ], dim=1)
        dist.all_reduce(sums_c, group=self.group)
        total_c, moment_c, square_c, logit_cJ = sums_c[:, 0], sums_c[:, 1], sums_c[:, 2], sums_c[:, 3:]
        log_total_c = total_c.log()
        entropy_c = log_total_c - moment_c / total_c
        return logit_cJ - log_total_c[:, None], entropy_c, square_c / total_c.square(), largest_c, total_c


def _chunks(n: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, n)) for start in range(0, n, chunk))


class _TokenScores(torch.autograd.Function):
    """d logp_j / d z_v = ([v is token j] - softmax(z / T)_v) / T; entropy and sum of squares have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_nD: Tensor, weight_WD: Tensor, tokens_nJ: Tensor, own: _Slice, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logp_nJ = hidden_nD.new_empty(tokens_nJ.shape, dtype=torch.float32)
        entropy_n, squares_n, largest_n, total_n = (logp_nJ.new_empty(len(tokens_nJ)) for _ in range(4))
        for part in _chunks(len(tokens_nJ), chunk):
            found = own.scores(own.logits(hidden_nD[part], weight_WD), tokens_nJ[part])
            for whole, scores_c in zip((logp_nJ, entropy_n, squares_n, largest_n, total_n), found, strict=True):
                whole[part] = scores_c
        ctx.own, ctx.chunk = own, chunk
        ctx.save_for_backward(hidden_nD, weight_WD, tokens_nJ, largest_n, total_n)
        ctx.mark_non_differentiable(entropy_n, squares_n)
        return logp_nJ, entropy_n, squares_n

    @staticmethod
    def backward(ctx: Any, grad_nJ: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_nD, weight_WD, tokens_nJ, largest_n, total_n = ctx.saved_tensors
        # The J tokens of a row share its softmax term, which takes the sum of their gradients.
        grad_n = grad_nJ.sum(1)
        grad_hidden_nD, grad_WD = torch.empty_like(hidden_nD), None
        for part in _chunks(len(tokens_nJ), ctx.chunk):
            grad_cW = ctx.own.logits(hidden_nD[part], weight_WD)
            # The softmax from its saved maximum and sum: backward needs no collective.
            grad_cW.sub_(largest_n[part, None]).exp_().div_(total_n[part, None]).mul_(-grad_n[part, None])
            is_mine_cJ, column_cJ = ctx.own.columns(tokens_nJ[part])
            # Added, as mu's likeliest tokens may include the sampled one; other ranks' tokens add 0 to column 0.
            grad_cW.scatter_add_(1, column_cJ, torch.where(is_mine_cJ, grad_nJ[part], 0.0))
            grad_cW = tempered(grad_cW, ctx.own.temperature).to(weight_WD.dtype)  # d (z / T) / d z = 1 / T
            torch.mm(grad_cW, weight_WD, out=grad_hidden_nD[part])
            if ctx.needs_input_grad[1]:
                grad_WD = _added(grad_WD, grad_cW, hidden_nD[part], is_alone=len(tokens_nJ) <= ctx.chunk)
            del grad_cW
        if ctx.needs_input_grad[1]:
            grad_WD = torch.zeros_like(weight_WD) if grad_WD is None else grad_WD.to(weight_WD.dtype)
        return grad_hidden_nD, grad_WD, None, None, None


def _added(sum_WD: Tensor | None, grad_cW: Tensor, hidden_cD: Tensor, is_alone: bool) -> Tensor:
    """The weight's gradient with one more chunk's, summed in float32 where there are several."""
    if is_alone:
        return grad_cW.t() @ hidden_cD
    if sum_WD is None:
        sum_WD = hidden_cD.new_zeros((grad_cW.shape[1], hidden_cD.shape[1]), dtype=torch.float32)
    if hidden_cD.dtype == torch.float32:
        return sum_WD.addmm_(grad_cW.t(), hidden_cD)
    for rows in _chunks(len(sum_WD), ROWS):  # in strips: a whole product would be one more tensor of the head's size
        sum_WD[rows] += grad_cW[:, rows].t() @ hidden_cD
    return sum_WD


def token_scores(
    hidden_nD: Float[Tensor, "n D"],
    weight_WD: Float[Tensor, "W D"],
    tokens_nJ: Int[Tensor, "n J"],
    vocab_size: int,
    group: ProcessGroup,
    chunk: int,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "n J"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """log p of J tokens of each row (nats, at most 0), the entropy of its distribution (nats, at least 0) and
    sum_v p(v)^2 (in (0, 1]), in float32.

    Of softmax(z / T), z = hidden weight^T, for at most `chunk` rows at a time. Rank r of `group` has the weights of
    tokens [r W, (r + 1) W); rows from `vocab_size` on pad the vocabulary and have probability 0. The gradient is
    that of log p, each rank's from its own slice of the vocabulary; backward computes the logits again.
    Raises ValueError for a token outside [0, vocab_size).
    """
    if bool(((tokens_nJ < 0) | (tokens_nJ >= vocab_size)).any()):
        bad = tokens_nJ[(tokens_nJ < 0) | (tokens_nJ >= vocab_size)][0].item()
        raise ValueError(f"expected tokens in [0, {vocab_size}), got {bad}")
    W = len(weight_WD)
    first = dist.get_rank(group) * W
    own = _Slice(first, min(max(vocab_size - first, 0), W), group, temperature)
    return _TokenScores.apply(hidden_nD, weight_WD, tokens_nJ, own, chunk)  # type: ignore[return-value]
