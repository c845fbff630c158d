"""The model's head on some rows: log-probs of tokens, and entropies, without the logits of all rows at a time.

Letters: n rows, V the vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sandbox.kernels.numerics import EXACT, Numerics
from sandbox.model import MoE
from theory.temperature import tempered

BLOCK_BYTES = 2**28
"""Bytes of logits from which rows go through the head in blocks, and with gradients once more in the backward pass.

Sandbox vocabularies never have as many; one of 152,000 tokens, as Qwen3's, has with 442 rows.
"""


class HeadScores(NamedTuple):
    """Log-probs of each row's token and of its K ids; entropy, in nats, and sum of squares of its distribution."""

    logp_n: Float[Tensor, " n"]
    entropy_n: Float[Tensor, " n"] | None
    sum_squares_n: Float[Tensor, " n"] | None
    logp_nK: Float[Tensor, "n K"] | None


def head_scores(
    model: MoE,
    hidden_nD: Float[Tensor, "n D"],
    tokens_n: Int[Tensor, " n"],
    ids_nK: Int[Tensor, "n K"] | None = None,
    *,
    numerics: Numerics = EXACT,
    temperature: float = 1.0,
    has_entropy: bool = False,
) -> HeadScores:
    """The scores of these rows at a temperature; log-probs carry the graph if gradients are on, the others never."""
    score = partial(_scores, model, numerics, temperature, has_entropy)
    size = max(1, BLOCK_BYTES // (hidden_nD.element_size() * model.config.vocab_size))
    if len(hidden_nD) <= size:
        return score(hidden_nD, tokens_n, ids_nK)
    # The backward pass computes a block's logits again: kept, those of all blocks would be there at a time.
    score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    no_ids = [None] * -(-len(hidden_nD) // size)
    ids = no_ids if ids_nK is None else ids_nK.split(size)
    parts = [score(*block) for block in zip(hidden_nD.split(size), tokens_n.split(size), ids, strict=True)]
    logp, entropy, squares, others = zip(*parts, strict=True)
    return HeadScores(torch.cat(logp), _joined(entropy), _joined(squares), _joined(others))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The blocks' rows one after the other; all blocks have some, or none has."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _scores(
    model: MoE,
    numerics: Numerics,
    temperature: float,
    has_entropy: bool,
    hidden_nD: Tensor,
    tokens_n: Tensor,
    ids_nK: Tensor | None,
) -> HeadScores:
    logits_nV = tempered(model.logits(hidden_nD, numerics=numerics), temperature)
    all_logp_nV = torch.log_softmax(logits_nV, dim=-1)
    logp_n = all_logp_nV.gather(-1, tokens_n[:, None])[:, 0]
    logp_nK = None if ids_nK is None else all_logp_nV.gather(-1, ids_nK)
    entropy_n = sum_squares_n = None
    if has_entropy:
        # Metrics and baselines only read these: a graph would keep two more tensors of n x V.
        with torch.no_grad():
            all_pi_nV = all_logp_nV.exp()
            entropy_n = -(all_pi_nV * all_logp_nV).sum(-1)
            sum_squares_n = all_pi_nV.square().sum(-1)
    return HeadScores(logp_n, entropy_n, sum_squares_n, logp_nK)


__all__ = ["BLOCK_BYTES", "HeadScores", "head_scores"]
