"""The one RL loop: roll out with mu, score with old, take N gradient passes with pi, hand the weights back.

It knows the contracts and nothing about any engine, so that the sandbox and the cluster run the same algorithm.
One global step is MiniRL sec. 4.2's (arXiv 2512.01374); `theory.routing.passes.PASSES` has the routing of each pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from theory.algorithm import Algorithm
from theory.collection import Collected, collect
from theory.contracts import (
    MiniBatch,
    RolloutEngine,
    Rollouts,
    Task,
    TokenScores,
    TrainingEngine,
    UpdateStats,
)
from theory.drift import drift_metrics
from theory.old_pass import OldPass, old_pass
from theory.oversampling import Backlog
from theory.preparation import given_advantages, prepared
from theory.routing.predictor import learns
from theory.step_metrics import (
    old_pass_metrics,
    rollout_metrics,
    token_lag_metrics,
    update_metrics,
    version_lag_metrics,
)
from theory.streams import stream


@dataclass(frozen=True)
class StepResult:
    """The result of one global step: registered metrics, the data behind them (for traces), the next step's backlog."""

    metrics: dict[str, float]
    rollouts: Rollouts
    rewards_B: Float[Tensor, " B"]
    scores: TokenScores
    backlog: Backlog | None = None


class NonFiniteError(ArithmeticError):
    """A metric, a log-probability or a gradient that is NaN or infinite; the message names it.

    `result` is that of the global step whose update raised it, with the metrics up to then; None for other errors.
    `metric` is the one that the step's row has in its place.
    """

    result: StepResult | None = None
    metric: str = "actor/grad_norm"


def global_step(
    step: int,
    algorithm: Algorithm,
    rollout: RolloutEngine,
    learner: TrainingEngine,
    task: Task,
    seed: int,
    backlog: Backlog | None = None,
) -> StepResult:
    """One global step; afterwards the rollout engine holds the updated weights as version step + 1.

    `backlog` is the result's of the step before, where the algorithm over-samples.
    Raises ValueError where the mode replays, or learns from, what the engines did not record.
    """
    result = learn(step, algorithm, learner, collect(step, algorithm, rollout, task, seed, backlog), seed)
    hand_over(algorithm, rollout, learner, version=step + 1)
    return result


def learn(step: int, algorithm: Algorithm, learner: TrainingEngine, collected: Collected, seed: int) -> StepResult:
    """The part of a global step that trains: old pass, then N gradient passes; the engines keep their weights.

    A NonFiniteError of an update carries the step's result as far as it got.
    """
    rollouts, rewards_PG, objective = collected.rollouts, collected.rewards_PG, algorithm.objective
    old = old_pass(step, algorithm, learner, collected, seed)
    if algorithm.passes.rollout == "predicted" and old.teacher is None:
        raise ValueError(f"replay mode {algorithm.mode} learns from the rollout engine's router features, got none")
    rewards_B = rewards_PG.reshape(-1)
    metrics = collected.metrics | rollout_metrics(rollouts, rewards_B, algorithm.max_turns)
    if algorithm.oversampling is not None:
        # The trainer's version is the number of the global step.
        metrics |= version_lag_metrics(rollouts, step) | token_lag_metrics(rollouts, step)
    metrics |= old_pass_metrics(rollouts, old.scores, algorithm.passes)
    # Only advantages see label noise and the length penalty; metrics above have the true rewards.
    noise = stream(seed, "label_noise", step)
    advantages_B, advantages_BT = given_advantages(algorithm, rollouts, rewards_PG, old.scores, noise)

    updates: list[tuple[MiniBatch, UpdateStats]] = []
    parts = split(step, algorithm, seed)
    for index, chosen in enumerate(parts):
        minibatch = take(rollouts, old, advantages_B, chosen, index, algorithm.num_minibatches)
        plan = old.gradient.select(chosen)
        if advantages_BT is not None:
            # Cut to the mini-batch's own width, as `take` cuts the rest.
            minibatch = replace(minibatch, advantages_BT=advantages_BT[chosen][:, : minibatch.logp_old_BT.shape[1]])
        # Inside the loop: these facts are about pi, which every update moves.
        minibatch, bounded = prepared(objective, algorithm.passes, learner, minibatch, old.scores, plan, chosen)
        try:
            updates.append((minibatch, learner.update(minibatch, bounded, plan)))
        except NonFiniteError as error:
            error.result = StepResult(metrics, rollouts, rewards_B, old.scores, collected.backlog)
            raise
    # The cached routes in the order in which the updates took the responses.
    order = [i for chosen in parts for i in chosen]
    metrics |= update_metrics(
        updates,
        None if old.cached is None else old.cached.select(order),
        None if old.cached_logits is None else old.cached_logits.select(order),
    )
    metrics |= drift_metrics(objective, updates)
    return StepResult(metrics, rollouts, rewards_B, old.scores, collected.backlog)


def hand_over(algorithm: Algorithm, rollout: RolloutEngine, learner: TrainingEngine, version: int) -> None:
    """Gives the learner's weights to the rollout engine, with the predictor in the gates where mu predicts (Pr3)."""
    tensors = learner.named_tensors(folded=algorithm.passes.rollout == "predicted")
    rollout.load_weights(tensors, version)


def split(step: int, algorithm: Algorithm, seed: int) -> list[list[int]]:
    """N lists of response indices, in an order drawn from the step's stream; as they came if N = 1.

    Whole groups are drawn, or under `shuffle: responses` single responses. The advantages of a whole group sum to 0, so
    that in its mini-batch the part of grad log pi that its responses share cancels.
    """
    P, G, N = algorithm.num_prompts, algorithm.num_responses, algorithm.num_minibatches
    # `select` then returns the same responses: only on those can the sandbox train on the graph of its old pass
    # (sandbox/training/forward.py::Kept.serves).
    if N == 1:
        return [list(range(P * G))]
    draws, size = stream(seed, "minibatches", step), P // N
    if algorithm.shuffle == "responses":
        return torch.randperm(P * G, generator=draws).view(N, size * G).tolist()
    order = torch.randperm(P, generator=draws).tolist()
    return [[p * G + g for p in order[n * size : (n + 1) * size] for g in range(G)] for n in range(N)]


def take(
    rollouts: Rollouts, old: OldPass, advantages_B: Float[Tensor, " B"], chosen: list[int], index: int, num: int
) -> MiniBatch:
    """The chosen responses as mini-batch `index` of `num`.

    Features go with it only where the predictor learns from them: not on the first (Pr2 Alg. 3).
    """
    # Routes are in the pass's plan and features in the teacher, so the rollouts carry neither.
    selected = rollouts.without_records().select(chosen)
    # A mini-batch is padded to its own longest response, not the batch's.
    T = selected.padded().is_response_BT.shape[1]
    teacher = old.teacher if learns(index) else None
    logp_top = old.scores.logp_top
    return MiniBatch(
        rollouts=selected,
        logp_old_BT=old.scores.logp_BT[chosen][:, :T],
        advantages_B=advantages_B[chosen],
        index=index,
        num_minibatches=num,
        features=None if teacher is None else teacher.select(chosen),
        logp_ref_BT=None if old.logp_ref_BT is None else old.logp_ref_BT[chosen][:, :T],
        logp_old_top=None if logp_top is None else logp_top.select(chosen),
    )
