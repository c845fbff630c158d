"""The old pass of a global step: rollouts are scored with `old`, which fixes the routing of the gradient passes.

`theory.routing.passes.PASSES` has the routing of each pass by replay mode: R2 and R3 of MiniRL sec. 3.2 (arXiv
2512.01374) and R3 (2510.11370), Pr2 and Pr3 of Pr2 (2606.00395).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from theory.algorithm import Algorithm
from theory.collection import Collected
from theory.contracts import Rollouts, TokenScores, TrainingEngine
from theory.routing.features import RouterFeatures, draw_sampling_rows
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord
from theory.streams import stream


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


def old_pass(step: int, algorithm: Algorithm, learner: TrainingEngine, collected: Collected, seed: int) -> OldPass:
    """The rollouts scored with `old`, and the routing of the gradient passes that follow.

    Raises ValueError where the mode or the objective needs what the engines did not record.
    """
    passes, rollouts, objective = algorithm.passes, collected.rollouts, algorithm.objective
    predictor = learner.predictor_weights()
    _require_inputs(algorithm, rollouts, predictor)
    rows = feature_rows(step, algorithm, rollouts, seed)
    scores = learner.score(rollouts, _routing(algorithm, rollouts, rows, predictor))
    if objective.uses_router_shift and (scores.router_scores is None or scores.experts is None):
        floor = f"router_shift_floor {objective.router_shift_floor:g}"
        raise ValueError(f"{floor} needs the old pass's router scores, got none (a dense model has no router)")

    cached = rollouts.experts if passes.gradient == "replay_rollout" else scores.experts
    if passes.records_old and cached is None:
        raise ValueError(f"replay mode {algorithm.mode} needs experts recorded by the old pass, got none")
    # On the same rows as the old pass: routers are compared row by row (RouterFeatures.compared).
    if passes.gradient == "natural":
        gradient = RoutingPlan("natural", feature_rows=rows)
    else:
        gradient = RoutingPlan("replay", record=cached, feature_rows=rows)
    # Under Pr3 the W_p that mu's gates held, which one step off is no longer the learner's.
    handed = predictor if collected.predictor is None else collected.predictor
    cached_logits, teacher = _features(algorithm, rollouts, scores, predictor, handed)
    logp_ref_BT = learner.score_reference(rollouts) if objective.kl_coefficient > 0 else None
    return OldPass(scores, logp_ref_BT, cached, cached_logits, teacher, gradient)


def _require_inputs(algorithm: Algorithm, rollouts: Rollouts, predictor: Mapping[int, Tensor]) -> None:
    passes, objective = algorithm.passes, algorithm.objective
    if passes.records_rollout and rollouts.experts is None:
        raise ValueError(f"replay mode {algorithm.mode} needs experts recorded by the rollout engine, got none")
    if objective.centering != "none" and rollouts.top is None:
        raise ValueError(
            f"centering {objective.centering} needs mu's likeliest tokens from the rollout engine, got none"
        )
    if passes.trains_predictor and not predictor:
        raise ValueError(f"replay mode {algorithm.mode} needs a training engine with a predictor, got none")


def _routing(
    algorithm: Algorithm, rollouts: Rollouts, rows: tuple[Tensor, ...], predictor: dict[int, Tensor]
) -> RoutingPlan:
    """The routing of the old pass itself."""
    passes = algorithm.passes
    if passes.old == "replay_rollout":
        # Under Pr3 h_old and p_old come from the rollout engine (App. C.2): this pass's own would go unused.
        has_features = passes.rollout == "predicted" and rollouts.features is not None
        plan = RoutingPlan("replay", record=rollouts.experts, feature_rows=None if has_features else rows)
    elif passes.old == "predicted":
        plan = RoutingPlan(
            "predicted", gates=algorithm.old_gates, predictor=predictor, feature_rows=rows, keep_hidden=True
        )
    else:
        plan = RoutingPlan("natural", feature_rows=rows)
    # RSPO compares the routers on the experts that this pass uses.
    return replace(plan, scored="used") if algorithm.objective.uses_router_shift else plan


def _features(
    algorithm: Algorithm,
    rollouts: Rollouts,
    scores: TokenScores,
    predictor: dict[int, Tensor],
    handed: dict[int, Tensor],
) -> tuple[RouterFeatures | None, RouterFeatures | None]:
    """The logits that chose the cached route, without hidden states, and the predictor's teacher."""
    cached_logits, teacher = scores.features, None
    if algorithm.passes.rollout == "predicted" and rollouts.features is not None:
        # The engine's gate is folded: its logits are p_old + h W_p, with the W_p that it received.
        cached_logits, teacher = rollouts.features, rollouts.features.minus_bias(handed)
    elif algorithm.passes.old == "predicted" and scores.features is not None:
        # The pass reports the live logits; its experts were chosen from the biased ones.
        cached_logits, teacher = scores.features.plus_bias(predictor), scores.features
    # Only the logits are compared later; the hidden states would keep memory.
    return None if cached_logits is None else cached_logits.without_hidden(), teacher


def feature_rows(step: int, algorithm: Algorithm, rollouts: Rollouts, seed: int) -> tuple[Tensor, ...]:
    """The rows whose router features are kept: the rollout engine's own draw where it made one, else a named draw."""
    if rollouts.features is not None:
        return rollouts.features.feature_rows
    return draw_sampling_rows(
        rollouts.padded().sampling_rows_B,
        algorithm.num_feature_rows(len(rollouts)),
        stream(seed, "features", step),
    )
