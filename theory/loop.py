"""The one RL loop: roll out with mu, score with old, take N gradient passes with pi, hand the weights back.

It knows the contracts and nothing about any engine, so that the sandbox and the cluster run the same algorithm.
One global step is MiniRL sec. 4.2's (arXiv 2512.01374); `theory.routing.passes.PASSES` has the routing of each pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from theory.advantages import keep_mixed_groups
from theory.algorithm import Algorithm
from theory.contracts import (
    MiniBatch,
    RolloutEngine,
    Rollouts,
    Sampling,
    Task,
    TokenScores,
    TrainingEngine,
    UpdateStats,
)
from theory.drift import drift_metrics
from theory.oversampling import Backlog, first_complete
from theory.preparation import given_advantages, prepared
from theory.routing.features import RouterFeatures, draw_sampling_rows
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import learns
from theory.routing.record import RoutingRecord
from theory.step_metrics import (
    old_pass_metrics,
    rollout_metrics,
    token_lag_metrics,
    update_metrics,
    version_lag_metrics,
)
from theory.streams import derive_seed, stream
from theory.turns import roll_out


@dataclass(frozen=True)
class Collected:
    """The rollouts of one global step, their rewards, and how many draws they took (metrics).

    `predictor` is the W_p that mu's gates held, where it is no longer the learner's (one step off); None where it is.
    `backlog` has the responses in progress, which the next `collect` takes; None without over-sampling.
    """

    rollouts: Rollouts
    rewards_PG: Float[Tensor, "P G"]
    metrics: dict[str, float]
    predictor: dict[int, Float[Tensor, "D E"]] | None = None
    backlog: Backlog | None = None


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
    """

    result: StepResult | None = None


@dataclass(frozen=True)
class OldPass:
    """The result of the old pass, and the routing of the gradient passes that follow.

    `cached` holds the experts that count as this batch's cached route; `cached_logits` the router logits that chose
    them; `teacher` the features (h_old, p_old) from which the predictor learns, where the mode trains one.
    """

    scores: TokenScores
    logp_ref_BT: Float[Tensor, "B T"] | None
    cached: RoutingRecord | None
    cached_logits: RouterFeatures | None
    teacher: RouterFeatures | None
    gradient: RoutingPlan


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
    split = split_groups(step, algorithm, seed)
    for index, chosen in enumerate(split):
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
    order = [i for chosen in split for i in chosen]
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


def collect(
    step: int, algorithm: Algorithm, rollout: RolloutEngine, task: Task, seed: int, backlog: Backlog | None = None
) -> Collected:
    """P groups of G responses with their rewards, and how many draws they took.

    Dynamic sampling (DAPO, as in R3 sec. 5.1) draws further prompts until P groups have mixed rewards or the rounds are
    used up; then groups of equal rewards fill the batch. Rewards are the task's, before label noise and the length
    penalty, whichever the advantage (`theory.advantages.keep_mixed_groups` says when a dropped group has a gradient).
    Over-sampling continues `backlog` (None: nothing is in progress) and takes the first P groups that are complete.
    """
    if algorithm.oversampling is not None:
        backlog = Backlog.at(step, algorithm) if backlog is None else backlog
        rollouts, rewards_PG, metrics, left = first_complete(step, algorithm, rollout, task, seed, backlog)
        return Collected(rollouts, rewards_PG, metrics, backlog=left)
    P, G, rounds = algorithm.num_prompts, algorithm.num_responses, algorithm.dynamic_sampling_rounds
    batches: list[Rollouts] = []
    mixed: list[tuple[int, int, Tensor]] = []
    uniform: list[tuple[int, int, Tensor]] = []
    # Every round of every step has its own prompts and its own seed.
    for draw in range(step * rounds, (step + 1) * rounds):
        sampling = Sampling(
            max_tokens=algorithm.max_tokens,
            num_responses=G,
            temperature=algorithm.temperature,
            seed=derive_seed(seed, "rollout", draw),
            num_features=algorithm.predictor.num_positions if algorithm.passes.rollout == "predicted" else 0,
            num_top=algorithm.objective.num_top,
        )
        batch = roll_out(rollout, task, task.prompts(draw, P), sampling, algorithm.max_turns)
        rewards_PG = torch.tensor([task.reward(r.prompt, r) for r in batch.responses], dtype=torch.float32).view(P, G)
        for p, is_mixed in enumerate(keep_mixed_groups(rewards_PG).tolist()):
            # Without dynamic sampling every group is kept, in its own order.
            (mixed if is_mixed or rounds == 1 else uniform).append((len(batches), p, rewards_PG[p]))
        batches.append(batch)
        if len(mixed) >= P:
            break
    # Never fewer than P: every round draws P groups, mixed or not.
    groups = (mixed + uniform)[:P]
    kept = sum(int(keep_mixed_groups(rewards_G[None])[0]) for *_, rewards_G in groups)
    metrics = {"sampling/rounds": float(len(batches)), "sampling/kept_group_fraction": kept / P}
    # One select per stretch of one batch's groups, so that a batch whose groups are all kept is not copied.
    parts = [
        batches[n].select([p * G + g for _, p, _ in own for g in range(G)])
        for n, own in groupby(groups, key=lambda group: group[0])
    ]
    return Collected(Rollouts.concat(parts), torch.stack([rewards_G for *_, rewards_G in groups]), metrics)


def old_pass(step: int, algorithm: Algorithm, learner: TrainingEngine, collected: Collected, seed: int) -> OldPass:
    """The rollouts scored with `old`, and the routing of the gradient passes that follow.

    Raises ValueError where the mode or the objective needs what the engines did not record.
    """
    passes, rollouts, objective = algorithm.passes, collected.rollouts, algorithm.objective
    if passes.records_rollout and rollouts.experts is None:
        raise ValueError(f"replay mode {algorithm.mode} needs experts recorded by the rollout engine, got none")
    if objective.centering != "none" and rollouts.top is None:
        raise ValueError(
            f"centering {objective.centering} needs mu's likeliest tokens from the rollout engine, got none"
        )
    predictor = learner.predictor_weights()
    if passes.trains_predictor and not predictor:
        raise ValueError(f"replay mode {algorithm.mode} needs a training engine with a predictor, got none")
    rows = feature_rows(step, algorithm, rollouts, seed)
    has_features = passes.rollout == "predicted" and rollouts.features is not None
    if passes.old == "replay_rollout":
        # Under Pr3 h_old and p_old come from the rollout engine (App. C.2): this pass's own would go unused.
        plan = RoutingPlan("replay", record=rollouts.experts, feature_rows=None if has_features else rows)
    elif passes.old == "predicted":
        plan = RoutingPlan(
            "predicted", gates=algorithm.old_gates, predictor=predictor, feature_rows=rows, keep_hidden=True
        )
    else:
        plan = RoutingPlan("natural", feature_rows=rows)
    if objective.uses_router_shift:
        # RSPO compares the routers on the experts that this pass uses.
        plan = replace(plan, scored="used")
    scores = learner.score(rollouts, plan)
    if objective.uses_router_shift and (scores.router_scores is None or scores.experts is None):
        floor = f"router_shift_floor {objective.router_shift_floor:g}"
        raise ValueError(f"{floor} needs the old pass's router scores, got none (a dense model has no router)")

    cached = rollouts.experts if passes.gradient == "replay_rollout" else scores.experts
    if passes.records_old and cached is None:
        raise ValueError(f"replay mode {algorithm.mode} needs experts recorded by the old pass, got none")
    cached_logits, teacher = scores.features, None
    if has_features and rollouts.features is not None:
        # The engine's gate is folded: its logits are p_old + h W_p, with the W_p that it received.
        handed = predictor if collected.predictor is None else collected.predictor
        cached_logits, teacher = rollouts.features, rollouts.features.minus_bias(handed)
    elif passes.old == "predicted" and scores.features is not None:
        # The pass reports the live logits; its experts were chosen from the biased ones.
        cached_logits, teacher = scores.features.plus_bias(predictor), scores.features
    # On the same rows as the old pass: routers are compared row by row (RouterFeatures.compared).
    if passes.gradient == "natural":
        gradient = RoutingPlan("natural", feature_rows=rows)
    else:
        gradient = RoutingPlan("replay", record=cached, feature_rows=rows)
    logp_ref_BT = learner.score_reference(rollouts) if objective.kl_coefficient > 0 else None
    if cached_logits is not None:
        # Only its logits are compared later; the hidden states would keep memory.
        cached_logits = cached_logits.without_hidden()
    return OldPass(scores, logp_ref_BT, cached, cached_logits, teacher, gradient)


def feature_rows(step: int, algorithm: Algorithm, rollouts: Rollouts, seed: int) -> tuple[Tensor, ...]:
    """The rows whose router features are kept: the rollout engine's own draw where it made one, else a named draw."""
    if rollouts.features is not None:
        return rollouts.features.feature_rows
    return draw_sampling_rows(
        rollouts.padded().sampling_rows_B,
        algorithm.num_feature_rows(len(rollouts)),
        stream(seed, "features", step),
    )


def split_groups(step: int, algorithm: Algorithm, seed: int) -> list[list[int]]:
    """N lists of response indices: whole groups, in an order drawn from the step's stream; as they came if N = 1."""
    P, G, N = algorithm.num_prompts, algorithm.num_responses, algorithm.num_minibatches
    # `select` then returns the same responses: only on those can the sandbox train on the graph of its old pass
    # (sandbox/training/forward.py::Kept.serves).
    if N == 1:
        return [list(range(P * G))]
    order = torch.randperm(P, generator=stream(seed, "minibatches", step)).tolist()
    size = P // N
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
    top_BTK = old.scores.logp_top_BTK
    return MiniBatch(
        rollouts=selected,
        logp_old_BT=old.scores.logp_BT[chosen][:, :T],
        advantages_B=advantages_B[chosen],
        index=index,
        num_minibatches=num,
        features=None if teacher is None else teacher.select(chosen),
        logp_ref_BT=None if old.logp_ref_BT is None else old.logp_ref_BT[chosen][:, :T],
        logp_old_top_BTK=None if top_BTK is None else top_BTK[chosen][:, :T],
    )
