"""The results of ranks, and pure functions that assemble those of all ranks into the values of theory's contract.

A rank reports only what it alone computed: log-probabilities come from the last pipeline stage's first tensor-parallel
rank, routes from every rank for its own responses, positions and layers. Nothing is sent twice.

Extra letters: B, T of the whole batch; b responses of a part; R rows, F feature rows of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from theory.contracts import TokenScores, UpdateStats
from theory.objectives import combine_metrics
from theory.routing.features import RouterFeatures
from theory.routing.record import RoutingRecord
from theory.routing.replay import ReplayContext
from theory.top_tokens import TokenRows


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the whole batch, which every rank knows: rows of each response, and T, the longest response."""

    num_rows_B: tuple[int, ...]
    num_positions: int


@dataclass(frozen=True, eq=False)
class TokenPart:
    """Log-probabilities in nats of the responses `indices` of the batch; scoring passes add entropies, sum_v p(v)^2 and
    log-probabilities of mu's likeliest tokens. T is their micro-batch's, which may be less than the batch's.
    """

    indices: tuple[int, ...]
    logp_bT: Float[Tensor, "b T"]
    entropy_bT: Float[Tensor, "b T"] | None = None
    sum_squares_bT: Float[Tensor, "b T"] | None = None
    logp_top: TokenRows | None = None


@dataclass(frozen=True, eq=False)
class RoutePart:
    """Routes of the responses `indices` at rows [start, start + num_rows_b) of each, and at some of the layers.

    `used` is None if only the natural experts are needed, and `natural` is None if they are the used ones.
    """

    indices: tuple[int, ...]
    start: int
    layer_numbers: tuple[int, ...]
    used: RoutingRecord | None
    natural: RoutingRecord | None
    features: RouterFeatures | None = None
    scores: RouterFeatures | None = None


@dataclass(frozen=True, eq=False)
class PredictorPart:
    """One stage's predictor step on one rank's feature rows: loss summed over its layers, and squared norm of W_p."""

    stage: int
    num_rows: int
    loss: Float[Tensor, ""]
    squared_norm: Float[Tensor, ""]


@dataclass(frozen=True, eq=False)
class ScorePart:
    """One rank's share of an old or reference pass."""

    sizes: BatchSizes
    tokens: tuple[TokenPart, ...]
    routes: tuple[RoutePart, ...]


@dataclass(frozen=True, eq=False)
class UpdatePart:
    """One rank's share of an update. `micro_metrics` has each micro-batch's number of response tokens and metrics,
    `objectives` the objective's values; `step_metrics` (gradient norm, learning rate) are the same on all ranks.
    """

    sizes: BatchSizes
    tokens: tuple[TokenPart, ...]
    routes: tuple[RoutePart, ...]
    micro_metrics: tuple[tuple[int, dict[str, Tensor]], ...] = ()
    objectives: tuple[Float[Tensor, ""], ...] = ()
    step_metrics: dict[str, float] = field(default_factory=dict)
    predictor: PredictorPart | None = None


def route_parts(
    context: ReplayContext, indices: Sequence[int], runs: Sequence[range], for_update: bool
) -> list[RoutePart]:
    """The routes of a pass over the rows `runs` of the responses `indices`, a part per run, without padding responses.

    On the CPU, like every part: assembly is bookkeeping, and should take no GPU memory.
    """
    used, natural, features, scores = context.used, context.natural, context.features, context.scores
    assert used is not None and natural is not None, "only chunks with a router have a pass"
    num = len(indices)
    is_natural = context.plan.source == "natural"
    whole = RoutePart(
        indices=tuple(indices),
        start=0,
        layer_numbers=used.layer_numbers,
        # An update reports natural routes alone: gradient passes use these or the plan's record, which the caller has.
        used=None if for_update else _first(used, num),
        # The same record twice would be sent twice.
        natural=None if is_natural and not for_update else _first(natural, num),
        features=None if features is None else _first_features(features, num),
        scores=None if for_update or scores is None else _first_features(scores, num),
    )
    # A context-parallel rank has two runs of positions, which lie side by side in its rows.
    firsts = accumulate(map(len, runs[:-1]), initial=0)
    parts = (
        [whole] if len(runs) == 1 else [_rows(whole, first, len(run)) for first, run in zip(firsts, runs, strict=True)]
    )
    return [_shifted(part, run.start) for part, run in zip(parts, runs, strict=True)]


def _first(record: RoutingRecord, num: int) -> RoutingRecord:
    """The first `num` responses, on the CPU; the others are padding and have no rows."""
    offsets = record.offsets[: num + 1].cpu()
    return RoutingRecord(record.experts.cpu(), offsets, record.layer_numbers, record.num_experts)


def _first_features(features: RouterFeatures, num: int) -> RouterFeatures:
    """Those of the first `num` responses, on the CPU."""
    hidden = None if features.hidden is None else features.hidden.cpu()
    rows, offsets = features.rows.cpu(), features.offsets[: num + 1].cpu()
    return RouterFeatures(rows, offsets, hidden, features.logits.cpu(), features.layer_numbers)


def _rows(part: RoutePart, first: int, num: int) -> RoutePart:
    """Rows [first, first + num) of each response of a part, counted from `first` on."""
    window = first, first + num
    return replace(
        part,
        used=None if part.used is None else part.used.part(rows=window),
        natural=None if part.natural is None else part.natural.part(rows=window),
        features=_feature_rows(part.features, first, num),
        scores=_feature_rows(part.scores, first, num),
    )


def _feature_rows(features: RouterFeatures | None, first: int, num: int) -> RouterFeatures | None:
    """Those at rows [first, first + num) of each response, counted from `first` on."""
    if features is None:
        return None
    is_here_F = (features.rows >= first) & (features.rows < first + num)
    # The number of kept rows before each response: their running count, read at the old offsets.
    offsets = torch.cat([is_here_F.new_zeros(1), is_here_F]).cumsum(0)[features.offsets]
    here = features.at(is_here_F.nonzero()[:, 0], offsets)
    return replace(here, rows=here.rows - first)


def _shifted(part: RoutePart, start: int) -> RoutePart:
    """The same rows, counted from `start` on."""
    features, scores = (
        None if one is None else replace(one, rows=one.rows + start) for one in (part.features, part.scores)
    )
    return replace(part, start=start, features=features, scores=scores)


def assemble_logp(parts: Sequence[ScorePart]) -> Float[Tensor, "B T"]:
    """log p of every response token of the batch, 0 after a response's end. ValueError if a response is missing."""
    return _tokens(parts)["logp_bT"]


def assemble_scores(parts: Sequence[ScorePart]) -> TokenScores:
    """The old pass of the whole batch. Raises ValueError where the parts leave a response, row or layer out."""
    tokens, logp_top = _tokens(parts), _top(parts)
    logp_BT, entropy_BT, squares_BT = (tokens[name] for name in ("logp_bT", "entropy_bT", "sum_squares_bT"))
    routes = [route for part in parts for route in part.routes]
    if not routes:
        return TokenScores(logp_BT, entropy_BT, logp_top=logp_top, sum_squares_BT=squares_BT)
    sizes = parts[0].sizes
    used = _record(sizes, routes, [route.used for route in routes])
    if all(route.natural is None for route in routes):
        natural = used
    else:
        natural = _record(sizes, routes, [route.natural for route in routes])
    features = local_features(sizes, routes)
    router_scores = _features(sizes, routes, [route.scores for route in routes])
    return TokenScores(logp_BT, entropy_BT, used, natural, features, logp_top, router_scores, squares_BT)


def assemble_stats(parts: Sequence[UpdatePart]) -> UpdateStats:
    """The result of the update, over the whole mini-batch: token means of metrics, values of pi, natural routes.

    Raises ValueError where the parts leave a response, row or layer out.
    """
    logp_pi_BT = _tokens(parts)["logp_bT"]
    # A micro-batch without a token has no means.
    micro = [(count, metrics) for part in parts for count, metrics in part.micro_metrics if count > 0]
    metrics = combine_metrics(micro)
    metrics["actor/objective"] = torch.stack([value for part in parts for value in part.objectives]).sum().item()
    metrics |= parts[0].step_metrics
    metrics |= _predictor_metrics([part.predictor for part in parts if part.predictor is not None])
    routes = [route for part in parts for route in part.routes]
    if not routes:
        return UpdateStats(metrics, logp_pi_BT)
    sizes = parts[0].sizes
    natural = _record(sizes, routes, [route.natural for route in routes])
    return UpdateStats(metrics, logp_pi_BT, natural, local_features(sizes, routes))


def _tokens(parts: Sequence[ScorePart] | Sequence[UpdatePart]) -> dict[str, Tensor]:
    """The fields of TokenPart that all parts have, for the whole batch: 0 after a response's end."""
    sizes = parts[0].sizes
    tokens = [token for part in parts for token in part.tokens]
    seen = sorted(i for token in tokens for i in token.indices)
    B = len(sizes.num_rows_B)
    # Twice is as wrong as never: such a response would count twice in the gradient, too.
    if seen != list(range(B)):
        raise ValueError(f"expected each of {B} responses from exactly one rank, got responses {seen}")
    whole: dict[str, Tensor] = {}
    for name in ("logp_bT", "entropy_bT", "sum_squares_bT"):
        values = [getattr(token, name) for token in tokens]
        if any(value is None for value in values):
            continue
        whole[name] = torch.zeros(B, sizes.num_positions)
        for token, value_bT in zip(tokens, values, strict=True):
            whole[name][list(token.indices), : value_bT.shape[1]] = value_bT
    return whole


def _top(parts: Sequence[ScorePart]) -> TokenRows | None:
    """log p of mu's likeliest tokens; None if the rollouts have none."""
    tokens = [token for part in parts for token in part.tokens]
    found = [token.logp_top for token in tokens if token.logp_top is not None]
    if not found:
        return None
    assert len(found) == len(tokens), "all parts belong to one batch"
    # Each response is in one part (`_tokens`): the places of 0, 1, .. among them.
    order = torch.tensor([i for token in tokens for i in token.indices]).argsort()
    return TokenRows.concat(found).select(order.tolist())


def _record(sizes: BatchSizes, routes: Sequence[RoutePart], records: Sequence[RoutingRecord | None]) -> RoutingRecord:
    placed = []
    for route, record in zip(routes, records, strict=True):
        if record is None:
            raise ValueError(f"expected routes of responses {route.indices} at layers {route.layer_numbers}, got none")
        placed.append((record, route.indices, route.start))
    return RoutingRecord.assembled(placed, sizes.num_rows_B)


def local_features(sizes: BatchSizes, routes: Sequence[RoutePart]) -> RouterFeatures | None:
    """The feature rows of all parts, in the order of responses and rows; None if none were requested."""
    return _features(sizes, routes, [route.features for route in routes])


def _features(
    sizes: BatchSizes, routes: Sequence[RoutePart], features: Sequence[RouterFeatures | None]
) -> RouterFeatures | None:
    parts = [(one, route.indices) for route, one in zip(routes, features, strict=True) if one is not None]
    if not parts or len(parts) < len(routes):
        return None
    return RouterFeatures.assembled(parts, len(sizes.num_rows_B))


def _predictor_metrics(parts: Sequence[PredictorPart]) -> dict[str, float]:
    """Loss: mean over the rows of a stage's ranks, summed over stages. Norm: over all stages, each counted once."""
    if not parts:
        return {}
    stages = {part.stage: [p for p in parts if p.stage == part.stage] for part in parts}
    # No stage has 0 rows in all: `StagePredictor.step` raises on every rank of such a stage.
    loss = sum(
        sum(p.num_rows * p.loss.item() for p in ranks) / sum(p.num_rows for p in ranks) for ranks in stages.values()
    )
    squares = torch.stack([ranks[0].squared_norm.double() for ranks in stages.values()])
    return {"predictor/loss": loss, "predictor/weight_norm": squares.sum().sqrt().item()}


__all__ = [
    "BatchSizes", "PredictorPart", "RoutePart", "ScorePart", "TokenPart", "UpdatePart", "assemble_logp",
    "assemble_scores", "assemble_stats", "local_features", "route_parts",
]  # fmt: skip
