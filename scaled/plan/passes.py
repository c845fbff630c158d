r"""Positions, FLOPs and seconds of the training passes, arranged into micro-batches by the code that trains.

The lengths of a batch are not known before it is sampled: they are taken as the quantiles of the exponential law cut
off at the longest length, the law of largest entropy for that mean and that limit, and one response has the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import root_scalar

from lab.hf import ModelShape
from scaled.config import ScaledRun, TrainingBlock
from scaled.megatron_engine.micro_batches import Slot, arrange
from scaled.megatron_engine.parallel import stage_sizes
from scaled.plan import flops
from scaled.plan.hardware import Gpu

TRAINING_EFFICIENCY = 0.2
"""Share of the peak rate that Megatron reaches on experts of this width, communication included."""

STEEPEST = 600.0
"""Largest rate of the exponential law on [0, 1]: a mean of 1 / 600 of the longest length."""


@dataclass(frozen=True)
class Passes:
    """The old (and reference) pass and the updates of one global step; FLOPs of all ranks together.

    `score_flops` are of every pass without gradients: a router shift or a second-moment budget has one before each
    update but the first.
    `score_positions` and `update_positions` count padding; `num_micro` are the micro-batches of one update on a rank.
    """

    score_positions: int
    update_positions: int
    num_micro: int
    score_flops: float
    update_flops: float


def lengths(num: int, mean: int, longest: int) -> list[int]:
    """Tokens of `num` sequences, ascending: quantiles (i + 1/2) / num of the law of that mean cut off at `longest`.

    Density proportional to exp(-rate x) on [0, longest]; a mean above the half has a negative rate. The last one is
    `longest`. If the mean is `longest`, all are.
    """
    return [*quantiles((np.arange(num) + 0.5) / num, mean, longest)[:-1], longest]


def quantiles(u: Float[np.ndarray, " num"], mean: int, longest: int) -> list[int]:
    """The law's lengths at the probabilities u in [0, 1]: with uniform u, lengths drawn from it. At least 2 tokens."""
    share = mean / longest
    # At rate a the mean is about 1 / |a| from an end of [0, 1]: shares beyond leave the bracket of `_rate`.
    if share >= 1 - 1 / STEEPEST:
        return [longest] * len(u)
    rate = _rate(max(share, 1 / STEEPEST))
    # The inverse of the law's distribution function; expm1 and log1p keep its digits at small rates.
    x = u if rate == 0 else -np.log1p(u * math.expm1(-rate)) / rate
    # A response of one token has no row, and `_forward` would divide by a width of 0.
    return np.clip(np.rint(x * longest), 2, longest).astype(int).tolist()


def _rate(share: float) -> float:
    """The rate a of the law on [0, 1] with that mean: 1 / a - 1 / (exp(a) - 1) = share."""

    def off(a: float) -> float:
        # Near 0 the two terms cancel: the series serves there.
        return (0.5 - a / 12 if abs(a) < 1e-4 else 1 / a - 1 / math.expm1(a)) - share

    return float(root_scalar(off, bracket=(-STEEPEST, STEEPEST)).root)


def passes(config: ScaledRun, shape: ModelShape, mean: int, longest: int) -> Passes:
    """The passes of a global step whose sequences have those lengths; every mini-batch has a longest one."""
    algorithm = config.algorithm.build()
    num, N = algorithm.num_prompts * algorithm.num_responses, algorithm.num_minibatches
    return passes_of(config, shape, lengths(num, mean, longest), [lengths(num // N, mean, longest)] * N)


def passes_of(
    config: ScaledRun, shape: ModelShape, scored: Sequence[int], minibatches: Sequence[Sequence[int]]
) -> Passes:
    """The passes of a global step over sequences of these lengths: those of the old pass, and of each mini-batch."""
    training = config.training
    # Rows, not tokens: the last token of a sequence is only ever a target.
    scores = arrange([n - 1 for n in scored], training)
    updates = [arrange([n - 1 for n in one], training) for one in minibatches]
    algorithm = config.algorithm.build()
    num_scores = 2 if algorithm.objective.kl_coefficient > 0 else 1
    # A look ahead before every update; before the first one only if its scores are not those of the old pass.
    again = updates[algorithm.passes.old != "predicted" :] if algorithm.objective.looks_ahead else []
    return Passes(
        score_positions=_positions(scores),
        update_positions=sum(_positions(one) for one in updates),
        num_micro=max(len(one) for one in updates),
        score_flops=num_scores * sum(_forward(shape, slot) for slot in scores)
        + sum(_forward(shape, slot) for one in again for slot in one),
        update_flops=sum(
            _forward(shape, slot) * flops.update_factor(shape, training, slot.width) for one in updates for slot in one
        ),
    )


def _positions(slots: list[Slot]) -> int:
    return sum(slot.num_positions for slot in slots)


def _forward(shape: ModelShape, slot: Slot) -> float:
    # Padding costs what tokens cost: every response counts as a sequence of the padded width.
    return slot.num_positions // slot.width * flops.forward_flops(shape, slot.width)


def training_seconds(training: TrainingBlock, num_layers: int, gpu: Gpu, num_flops: float, num_micro: int) -> float:
    """Seconds of score and gradient passes: flops / (ranks x peak x efficiency), and the pipeline's bubble.

    The bubble is 1 + (PP - 1) / (M VPP) (Narayanan et al., arXiv 2104.04473, sec. 2.2). The stage with the most layers
    sets the pace of stages that are unequal: the factor is PP x its layers / all layers.
    """
    pp, vpp = training.pipeline_parallel, training.virtual_pipeline
    # For all passes that of an update: an upper bound, as with N > 1 the old pass has more micro-batches.
    bubble = 1 + (pp - 1) / (num_micro * vpp)
    pace = pp * max(stage_sizes(training, num_layers)) / num_layers
    return pace * bubble * num_flops / (training.num_ranks * peak_tflops(training, gpu) * 1e12 * TRAINING_EFFICIENCY)


def peak_tflops(training: TrainingBlock, gpu: Gpu) -> float:
    """Peak rate of the matrix products, 1e12 FLOP/s: bf16's, or half of it in fp32 (TF32)."""
    return gpu.bf16_tflops if training.precision == "bf16" else gpu.bf16_tflops / 2
