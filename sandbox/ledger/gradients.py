"""Gradients at a state: of an arm's objective on single mini-batches, and the exact policy gradient for comparison.

The *reference* is grad J, J = E_pi[R], from responses of an exact engine: the objective `reinforce`, advantages R minus
their group's mean (which scales grad J by (G - 1) / G and keeps its direction).
Letters: K mini-batches, Q parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lab.tasks import TextTask
from sandbox.config import SandboxRun
from sandbox.model import MoE
from sandbox.run import build_learner
from sandbox.training.learner import Learner
from theory.collection import collect
from theory.loop import hand_over, learn
from theory.objectives import preset

PIECE = 512
"""Responses per global step of the reference."""


@dataclass(frozen=True)
class ReferenceGradient:
    """Two independent estimates of grad J, each the mean over half of the responses."""

    halves_2Q: Float[Tensor, "2 Q"]

    @property
    def mean_Q(self) -> Float[Tensor, " Q"]:
        """The estimate of all responses."""
        return self.halves_2Q.mean(0)

    @property
    def square(self) -> float:
        """An unbiased estimate of |grad J|^2: the product of the halves; it may be below 0 if noise dominates."""
        return float(self.halves_2Q[0].double() @ self.halves_2Q[1].double())

    @property
    def error(self) -> float:
        """Standard error of `mean_Q` over |grad J|: |first half - second half| / 2 / sqrt(square), nan if undefined."""
        difference = float((self.halves_2Q[0] - self.halves_2Q[1]).double().norm())
        return difference / 2 / math.sqrt(self.square) if self.square > 0 else math.nan


@dataclass(frozen=True)
class Gradients:
    """The gradients of K mini-batches (the ascent directions of the objective), and their global step's metrics.

    Parameters are in the order of `named_parameters`; entries of untrained parameters are 0.
    """

    of_KQ: Float[Tensor, "K Q"]
    metrics: dict[str, float]


def gradients(learner: Learner, step: int, num: int, after: int = 0) -> Gradients:
    """The unclipped gradients of `num` mini-batches of global step `step`, each at the weights after `after` updates.

    It is one global step on `after` + `num` mini-batches of the algorithm's own size, all sampled at its start: the
    first `after` are trained on as usual; for the others the gradient is kept and no step is taken. With `after` = 0
    the weights are those of the rollout engine, so pi = old.
    """
    algorithm, training, seed = learner.algorithm, learner.training_engine, learner.seed
    size = algorithm.num_prompts // algorithm.num_minibatches
    algorithm = replace(algorithm, num_prompts=(after + num) * size, num_minibatches=after + num)
    settings, take_step, first = training.settings, training.take_step, training.num_updates + after
    found: list[Tensor] = []

    def prepare(number: int) -> None:  # an update clips before it calls `step_or_keep`: no limit for kept gradients
        training.settings = settings if number < first else replace(settings, max_grad_norm=math.inf)

    def step_or_keep() -> None:
        if training.num_updates < first:
            take_step()
        else:
            found.append(_ascent(training.model))
        prepare(training.num_updates + 1)

    prepare(training.num_updates)
    training.take_step = step_or_keep
    try:
        collected = collect(step, algorithm, learner.rollout, learner.task, seed)
        metrics = learn(step, algorithm, training, collected, seed).metrics
    finally:
        # `update` has counted the kept mini-batches, too: the count goes back to that of the steps taken.
        training.settings, training.take_step, training.num_updates = settings, take_step, first
    return Gradients(torch.stack(found), metrics)


def _ascent(model: MoE) -> Float[Tensor, " Q"]:
    """The gradient of the objective: minus that of the loss."""
    parts = [torch.zeros_like(p) if p.grad is None else -p.grad for p in model.parameters()]
    return torch.cat([part.reshape(-1) for part in parts])


def reference(config: SandboxRun, task: TextTask, model: MoE, step: int, num_responses: int) -> ReferenceGradient:
    """grad J at the model's weights from `num_responses` of an exact engine, in pieces that alternate between halves.

    `config` determines sampling and arithmetic; its objective, replay mode and engine are not used. The pieces are
    global steps from `step` on. ValueError for fewer than two pieces.
    """
    algorithm = config.algorithm.build()
    per_piece = max(1, PIECE // algorithm.num_responses)
    num = num_responses // (per_piece * algorithm.num_responses)
    if num < 2:
        raise ValueError(f"num_responses: expected at least two pieces of {PIECE}, got {num_responses}")
    one = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"defects": ()}),
            # A whole piece per micro-batch, without which `keep_old_pass` has no effect.
            "training": config.training.model_copy(update={"micro_batch_size": PIECE}),
        }
    )
    learner = build_learner(one, task, model)
    learner.algorithm = replace(
        algorithm, objective=preset("reinforce"), mode="none", num_prompts=per_piece, num_minibatches=1,
        dynamic_sampling_rounds=1, freeze_router=False, label_noise=0.0, overlong_buffer=0, oversampling=None,
    )  # fmt: skip
    learner.training_engine.keep_old_pass = True
    hand_over(learner.algorithm, learner.rollout, learner.training_engine, version=0)
    halves: list[list[Tensor]] = [[], []]
    for piece in range(num - num % 2):  # halves of one size, so that their mean is that of all responses
        halves[piece % 2].append(gradients(learner, step + piece, 1).of_KQ[0])
    return ReferenceGradient(torch.stack([torch.stack(half).double().mean(0).float() for half in halves]))


def alignment(of_KQ: Float[Tensor, "K Q"], truth: ReferenceGradient) -> dict[str, float]:
    """Cosine, bias and variance of K independent mini-batches' gradients g_k, of mean m, against grad J = r; no unit.

    S = sum_k |g_k - m|^2 / (K - 1), the trace of the covariance of one mini-batch's gradient. |m|^2 and |r|^2 are
    corrected for noise: |m|^2 = |mean_k g_k|^2 - S / K, and `ReferenceGradient.square`. Objectives differ in scale: s =
    m.r / |r|^2 is the least-squares fit of m by s r, and the rest is in units of s |r|.

        cosine       m.r / (|m| |r|), corrected for noise, so it may exceed 1; nan if |m|^2 is not above 0
        raw_cosine   the same, uncorrected: more noise makes it smaller
        bias_square  |m / s - r|^2 / |r|^2 = (|m| / s |r|)^2 - 1 = tan^2 of their angle; its estimate may be negative
        bias         its root, with its sign
        variance     S / (s |r|)^2

    `_error`: standard errors by the jackknife over k; that of `variance` is of its logarithm. They leave out the error
    of the reference, which the arms of a state share. All but raw_cosine are nan if |r|^2 is not above 0.
    """
    # In float64: |m|^2 is what is left of sums that are mostly noise.
    gradients_KQ, r_Q = of_KQ.double(), truth.mean_Q.double()
    products_KK, along_K = gradients_KQ @ gradients_KQ.T, gradients_KQ @ r_Q
    found, K = _figures(products_KK, along_K, truth.square), len(of_KQ)
    kept = [[i for i in range(K) if i != k] for k in range(K)]
    without = [_figures(products_KK[rows][:, rows], along_K[rows], truth.square) for rows in kept]
    errors = {f"{name}_error": _jackknife([one[name] for one in without]) for name in ("cosine", "bias_square")}
    errors["variance_error"] = _jackknife(
        [math.log(one["variance"]) if one["variance"] > 0 else math.nan for one in without]
    )
    bias = math.copysign(math.sqrt(abs(found["bias_square"])), found["bias_square"])
    raw = products_KK.mean().sqrt() * r_Q.norm()
    return found | errors | {"bias": bias, "raw_cosine": float(along_K.mean() / raw)}


def _figures(products_KK: Tensor, along_K: Tensor, square: float) -> dict[str, float]:
    """cosine, bias_square and variance from the products of all pairs of gradients, those with r, and |r|^2."""
    K, along = len(along_K), float(along_K.mean())
    # Products of different mini-batches only: their mean is |m|^2 without the noise that the diagonal adds.
    mean_square = float((products_KK.sum() - products_KK.trace()) / (K * (K - 1)))
    spread = float(products_KK.trace()) / K - mean_square
    if square <= 0 or along == 0:
        return dict.fromkeys(("cosine", "bias_square", "variance"), math.nan)
    fitted = along**2 / square  # (s |r|)^2
    return {
        "cosine": along / math.sqrt(mean_square * square) if mean_square > 0 else math.nan,
        "bias_square": mean_square / fitted - 1.0,
        "variance": spread / fitted,
    }


def _jackknife(values: list[float]) -> float:
    """The standard error of an estimate from its K leave-one-out values: sqrt((K - 1) / K sum (v - mean)^2)."""
    K = len(values)
    mean = math.fsum(values) / K
    return math.sqrt((K - 1) / K * math.fsum((value - mean) ** 2 for value in values))


__all__ = ["PIECE", "Gradients", "ReferenceGradient", "alignment", "gradients", "reference"]
