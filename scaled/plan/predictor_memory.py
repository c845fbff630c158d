"""Memory of a predictor on one GPU of the training engine, in bytes.

Letters: D model width, E experts, L MoE layers of the stage, F feature rows of this rank.
"""

from __future__ import annotations

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan.parameters import ELEMENT_BYTES, stage_layers
from theory.routing.predictor import block_rows


def step_rows(config: ScaledRun) -> int:
    """F of a predictor's step: T_c rows of each response of a mini-batch, which the ranks of a stage share."""
    algorithm, training = config.algorithm.build(), config.training
    rows = min(algorithm.predictor.num_positions, config.rollout.max_model_len - 1)
    responses = algorithm.num_prompts // algorithm.num_minibatches * algorithm.num_responses
    return -(-rows * responses // (training.num_ranks // training.pipeline_parallel))


def predictor_step_bytes(config: ScaledRun, shape: ModelShape, stage: int) -> int:
    """Bytes of a predictor's step at its peak, besides W_p and its optimizer; 0 where it takes none.

    A step takes its rows in blocks, of which one is on the GPU. For each of its rows and layers: the cached input, D,
    and its copy in fp32 where it has less, and six tensors of E in fp32, that is the logits of old, pi and the guess,
    and three of their softmaxes. Later two of those are gone, and the KL of one layer takes 92 E bytes per row
    in float64. The first mini-batch trains no predictor.
    """
    algorithm, b = config.algorithm.build(), ELEMENT_BYTES[config.training.precision]
    if not algorithm.passes.trains_predictor or algorithm.num_minibatches == 1:
        return 0
    D, E = shape.hidden_size, shape.num_experts
    L = sum(number not in shape.dense_layers for number in stage_layers(shape, config.training, stage))
    if L == 0:
        return 0
    rows, most = step_rows(config), block_rows(L, D)
    hidden = (b + 4 * (b < 4)) * D * L
    # A second block's gradient is added to that of the first.
    added = 4 * L * D * E * (rows > most)
    return min(rows, most) * (hidden + E * max(24 * L, 16 * L + 92)) + added


__all__ = ["predictor_step_bytes", "step_rows"]
