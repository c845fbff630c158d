"""The metrics of one global step, computed from its data alone; every name is in `theory.metrics.REGISTRY`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.contracts import MiniBatch, Rollouts, TokenScores, UpdateStats
from theory.divergences import discrepancy_metrics, k3_kl_mu_pi, masked_mean, saturated, staleness_metrics
from theory.routing.features import RouterFeatures
from theory.routing.measures import route_distances, routing_metrics
from theory.routing.passes import ModePlan
from theory.routing.record import RoutingRecord


def rollout_metrics(rollouts: Rollouts, rewards_B: Float[Tensor, " B"], max_turns: int) -> dict[str, float]:
    """Reward, length and turn statistics over the B responses; lengths count the tokens that mu sampled."""
    lengths = rollouts.padded().num_sampled_B
    metrics = {
        "reward/mean": rewards_B.mean().item(),
        "reward/std": rewards_B.std(correction=0).item(),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": sum(r.finish == "length" for r in rollouts.responses) / len(lengths),
        "progress/num_tokens": float(sum(lengths)),
        "progress/num_responses": float(len(lengths)),
    }
    if rollouts.top is not None:
        metrics["rollout/top_tokens_bytes"] = float(rollouts.top.num_bytes)
    if max_turns > 1:
        turns = [_num_stretches(r.is_response) for r in rollouts.responses]
        metrics["turns/mean"] = sum(turns) / len(turns)
    return metrics


def version_lag_metrics(rollouts: Rollouts, version: int) -> dict[str, float]:
    """Mean and maximum over responses of `version` - the version that sampled it, in weight versions (global steps)."""
    lags = [version - response.version for response in rollouts.responses]
    return {"staleness/version_lag_mean": sum(lags) / len(lags), "staleness/version_lag_max": float(max(lags))}


def token_lag_metrics(rollouts: Rollouts, version: int) -> dict[str, float]:
    """`version` - the version of each sampled token, in weight versions, and the share of responses of several."""
    lags = [(version - r.version_T)[r.is_response] for r in rollouts.responses]
    lag_A = torch.cat(lags)
    several = sum(len(lag_T.unique()) > 1 for lag_T in lags)
    return {
        "staleness/token_lag_mean": lag_A.double().mean().item(),
        "staleness/token_lag_max": float(lag_A.max()),
        "staleness/stale_token_fraction": (lag_A > 0).double().mean().item(),
        "staleness/mixed_response_fraction": several / len(lags),
    }


def _num_stretches(is_response_T: Bool[Tensor, " T"]) -> int:
    """Maximal runs of True."""
    return int((is_response_T[1:] & ~is_response_T[:-1]).sum() + is_response_T[:1].sum())


def old_pass_metrics(rollouts: Rollouts, scores: TokenScores, passes: ModePlan) -> dict[str, float]:
    """Training-inference discrepancy: mu against old on the sampled tokens, and their routers on every row.

    Routers are compared by the choice of the training engine's live logits; in a replayed pass these depend on hidden
    states computed with mu's experts.
    """
    batch = rollouts.padded()
    metrics = discrepancy_metrics(scores.logp_BT, batch.logp_mu_BT, batch.is_response_BT)
    metrics["actor/entropy"] = masked_mean(scores.entropy_BT, batch.is_response_BT).item()
    replayed = rollouts.experts if passes.gradient == "replay_rollout" else scores.experts
    if passes.gradient != "natural" and replayed is not None:
        metrics["routing/native_rows"] = float(replayed.num_missing_rows)
        metrics["routing/replayed_fraction"] = 1.0 - replayed.num_missing_rows / sum(replayed.num_rows_B)
    if rollouts.experts is None or scores.natural is None:
        return metrics
    routing = routing_metrics(rollouts.experts, scores.natural)
    metrics |= _some(routing, "router_disagreement", "token_disagreement", "sequence_mean_difference")
    # A maximum: 0 only where mu and old agree on every token, so that nothing had to be replayed.
    difference = metrics["rollout_corr/probs_diff_max"]
    # Of a nan nothing is known; the run itself reports it, with the tensors at fault (lab/recording.py).
    is_compared = "routing/router_disagreement" in routing and not math.isnan(difference)
    if passes.old == "replay_rollout" and is_compared:
        # Replay changed no route although the engines disagree: then it was probably not plugged in.
        metrics["routing/noop"] = float(routing["routing/router_disagreement"] == 0 and difference > 0)
    return metrics


def _some(routing: Mapping[str, float], *names: str) -> dict[str, float]:
    """Those of the named routing metrics that are present."""
    return {full: routing[full] for name in names if (full := f"routing/{name}") in routing}


def update_metrics(
    updates: Sequence[tuple[MiniBatch, UpdateStats]], cached: RoutingRecord | None, cached_logits: RouterFeatures | None
) -> dict[str, float]:
    """The metrics of the N updates: means, staleness of old against pi, and cached routes against pi's live ones.

    `cached` and `cached_logits` are in the order of the updates' responses.
    """
    # A metric may be absent from an update (the predictor's, of the first): its mean is over those that have it.
    names = {name for _, stats in updates for name in stats.metrics}
    metrics: dict[str, float] = {}
    for name in sorted(names):
        values = [stats.metrics[name] for _, stats in updates if name in stats.metrics]
        metrics[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    metrics["actor/num_updates"] = float(len(updates))

    batches = [m.rollouts.padded() for m, _ in updates]
    is_response = [batch.is_response_BT for batch in batches]
    # Packed by the masks, as mini-batches are padded to different widths.
    logp_mu = torch.cat([batch.logp_mu_BT[batch.is_response_BT] for batch in batches])
    logp_pi = torch.cat([stats.logp_pi_BT[mask] for (_, stats), mask in zip(updates, is_response, strict=True)])
    logp_old = torch.cat([m.logp_old_BT[mask] for (m, _), mask in zip(updates, is_response, strict=True)])
    metrics["actor/k3_kl_mu_pi"] = saturated(k3_kl_mu_pi(logp_pi, logp_mu)).mean().item()
    # All sampled tokens as one row of a (B, T) batch.
    metrics |= staleness_metrics(logp_pi[None], logp_old[None], torch.ones_like(logp_pi, dtype=torch.bool)[None])

    natural = [stats.natural for _, stats in updates if stats.natural is not None]
    # From all updates or not at all: `cached` has the rows of all, and two records are compared row by row.
    if cached is not None and len(natural) == len(updates):
        now = RoutingRecord.concat(natural)
        routing = routing_metrics(cached, now, has_sequences=False)
        metrics |= _some(routing, "topk_agreement", "zero_deviation", "one_deviation")
        if "routing/token_disagreement" in routing:
            # TV of two point masses is 1 where the route differs at any layer (Pr2 sec. 3.3).
            metrics["routing/staleness_tv"] = routing["routing/token_disagreement"]
    features = [stats.features for _, stats in updates if stats.features is not None]
    if cached_logits is not None and len(features) == len(updates):
        kl, tv = route_distances(RouterFeatures.concat(features), cached_logits)
        metrics |= {"routing/route_kl": kl, "routing/route_tv": tv}
    return metrics
