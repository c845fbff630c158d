r"""The responses in progress in a rollout, and how long it lasts, with over-sampling or without.

Over-sampling (`algorithm.oversampling`) has P + extra_prompts groups of G responses in progress, and ends the call once
P groups are complete. Lengths follow the law of `passes`; what `max_staleness` gives up is not counted.
Decision 13 (docs/decisions/0013-partial-rollouts.md) has the design.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from scaled.config import ScaledRun
from scaled.plan.passes import quantiles

POINTS = 1024
"""Quantiles that stand for the law of lengths."""

MOMENTS = 512
"""Parts of the longest length, at whose ends contexts are counted."""

DEVIATIONS = 2.0
"""Standard deviations above the mean that a normal variable exceeds with a probability of 2%."""


@dataclass(frozen=True)
class Load:
    """The rollout of one global step, all engines together.

    `responses` are in progress at its start. The tokens that it samples are those of `sampled` responses of mean
    length, each of which attends to `context` earlier ones on average. It lasts at least `least_steps` decoding steps,
    those of the last response that it waits for.
    """

    responses: int
    sampled: int | float
    least_steps: int
    context: float


def responses_in_progress(config: ScaledRun) -> int:
    """Responses in progress at the start of a rollout: (P + extra_prompts) G."""
    batch, over = config.algorithm.batch, config.algorithm.oversampling
    return (batch.num_prompts + (0 if over is None else over.extra_prompts)) * batch.num_responses


def rollout_load(config: ScaledRun, mean_tokens: int, longest: int) -> Load:
    """The rollout of sequences of `mean_tokens` tokens on average and at most `longest`.

    With E = P + extra_prompts groups from the start, the P-th is complete at about the P / E quantile of the longest
    of G lengths. Kept groups come with a head start: by Little's law P groups leave per M P / (mean number in
    progress) decoding steps, M the mean of the longest of G, where the number falls from E to extra_prompts in a call.
    All kept tokens are trained on in the end; dropped ones are sampled besides.
    """
    batch, over = config.algorithm.batch, config.algorithm.oversampling
    P, G, T = batch.num_prompts, batch.num_responses, min(config.algorithm.sampling.max_tokens, longest)
    u = (np.arange(POINTS) + 0.5) / POINTS
    lengths = np.array(quantiles(u, mean_tokens, longest))
    if over is None:
        return Load(P * G, P * G, T, mean_context(lengths))
    E = P + over.extra_prompts
    # The longest of G lengths is below x with the G-th power of one length's probability.
    (cut,) = quantiles(np.array([(P / E) ** (1 / G)]), mean_tokens, longest)
    if over.unfinished == "drop":
        # Responses are cut off where the call ends; those of complete groups have ended by then.
        kept = np.minimum(lengths, cut)
        # At least P, as `summary` gives what is sampled beyond the trained responses as a share of dropped tokens.
        return Load(E * G, max(P, E * kept.mean() / mean_tokens) * G, min(T, cut), mean_context(kept))
    of_group = np.mean(quantiles(u ** (1 / G), mean_tokens, longest))
    # E falls to extra_prompts in a call: extra_prompts + P / 2 are in progress on average.
    steady = round(of_group * P / (over.extra_prompts + P / 2))
    return Load(E * G, P * G, min(T, cut, steady), mean_context(lengths))


def mean_context(lengths: Int[np.ndarray, " num"]) -> float:
    """Earlier tokens that a token of sequences of these lengths attends to on average: sum L^2 / (2 sum L).

    More than half the mean length unless all are equal, as long sequences have most of the tokens.
    """
    return float((lengths.astype(float) ** 2).sum() / (2 * lengths.sum()))


def cached_tokens(num_seqs: int, mean_tokens: int, longest: int, max_model_len: int) -> int:
    """Tokens in an engine's cache that `num_seqs` sequences in progress exceed with a probability of about 2%.

    That is at the worst moment of a rollout, whose places all begin empty and are taken again when they are free; the
    sum of their contexts is about normal. At least one sequence of `max_model_len`, without which vLLM does not start;
    at most all of them.
    """
    mean_M, deviation_M = _contexts(mean_tokens, longest)
    most = float((num_seqs * mean_M + DEVIATIONS * math.sqrt(num_seqs) * deviation_M).max())
    return min(max(math.ceil(most), max_model_len), num_seqs * max_model_len)


@lru_cache(maxsize=64)
def _contexts(mean_tokens: int, longest: int) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """Mean and standard deviation of one place's context, in tokens, at moments of a rollout: a renewal process."""
    width = longest / MOMENTS
    u = (np.arange(POINTS) + 0.5) / POINTS
    bins = np.ceil(np.array(quantiles(u, mean_tokens, longest)) / width).astype(int)
    ends_J = np.bincount(bins, minlength=MOMENTS + 1) / POINTS  # of a length of j moments
    goes_on_J = 1 - np.cumsum(ends_J)
    # A sequence begins at moment k if one that began j moments before has a length of j. Twice the longest length is
    # time enough for the mean to settle.
    begins_M = np.zeros(2 * MOMENTS)
    begins_M[0] = 1.0
    for k in range(1, len(begins_M)):
        before = min(k, MOMENTS)
        begins_M[k] = ends_J[1 : before + 1] @ begins_M[k - before : k][::-1]
    context_J = np.arange(MOMENTS + 1) * width
    mean_M, square_M = (
        np.convolve(begins_M, goes_on_J * power_J)[: len(begins_M)] for power_J in (context_J, context_J**2)
    )
    return mean_M, np.sqrt(np.maximum(0.0, square_M - mean_M**2))


__all__ = ["cached_tokens", "Load", "mean_context", "responses_in_progress", "rollout_load"]
