"""The registry of metrics: every name that a run may record, with its formula, unit, source and good direction.

A metric without data is absent from a record, never 0. Names are `group/quantity[_statistic]`, verl's where verl has
one. A metric of an update (`actor/`, the correction's weights, the predictor) is its mean over the step's N
mini-batches, a maximum their largest. Means over tokens are over response tokens (`is_response_BT`) unless the formula
says otherwise.
Papers: MiniRL (arXiv 2512.01374), R3 (2510.11370), Pr2 (2606.00395), DAPO (2503.14476).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from theory.names import unknown_name


@dataclass(frozen=True)
class Metric:
    """One recorded quantity. `good` is the direction of a healthy run; None where neither is good in itself."""

    name: str
    formula: str
    unit: str
    source: str
    good: Literal["up", "down", "flat"] | None = None


_METRICS = (
    # -- learning
    Metric("reward/mean", "mean of R(x, y) over the responses that the global step trains on", "reward",
           "MiniRL sec. 4.2", "up"),
    Metric("reward/std", "population standard deviation of R(x, y) over the same responses", "reward", "here"),
    Metric("eval/accuracy", "mean reward over the held-out prompts and their k responses (avg@k)", "fraction",
           "MiniRL sec. 4.2", "up"),
    Metric("eval/response_length", "mean number of response tokens on the held-out prompts", "tokens", "here"),
    Metric("eval/stop_fraction", "held-out responses that ended by themselves / all held-out responses", "fraction",
           "here", "up"),
    # -- mu against old: the engine gap. rho = old/mu of a sampled token, token ~ mu
    Metric("rollout_corr/kl", "k1 of KL(mu || old): mean over tokens of log mu - log old", "nats/token",
           "MiniRL sec. 4.2; verl", "down"),
    Metric("rollout_corr/k3_kl", "k3 of KL(mu || old): mean over tokens of rho - 1 - log rho, rho = old/mu",
           "nats/token", "R3 Eq. 2; verl", "down"),
    Metric("rollout_corr/chi2_token", "mean over tokens of rho^2 - 1, rho = old/mu", "1", "verl", "down"),
    Metric("rollout_corr/chi2_seq", "mean over responses of (prod_t rho_t)^2 - 1 (square at most e^75), rho = old/mu",
           "1", "verl", "down"),
    Metric("rollout_corr/eff_sample_size", "1 / mean over tokens of (rho / mean rho)^2, rho = old/mu untruncated",
           "fraction", "verl", "up"),
    Metric("rollout_corr/extreme_frac_tau2", "F(2): fraction of tokens with max(old/mu, mu/old) > 2", "fraction",
           "R3 Eq. 3", "down"),
    Metric("rollout_corr/probs_diff_mean", "mean over tokens of |old - mu|, as probabilities", "probability", "verl",
           "down"),
    Metric("rollout_corr/probs_diff_max", "max over tokens of |old - mu|, as probabilities", "probability", "verl",
           "down"),
    Metric("rollout_corr/log_ppl_diff",
           "mean over responses of (mean_t log mu - mean_t log old) = log(ppl_old / ppl_mu) of each response",
           "nats/token", "verl", "flat"),
    Metric("rollout_corr/weight_mean", "mean over tokens of the correction's weight, 0 on rejected responses", "1",
           "here; verl's rollout_is_mean", "flat"),
    Metric("rollout_corr/weight_max", "max over tokens of the correction's weight, 0 on rejected responses", "1",
           "here; verl's rollout_is_max"),
    Metric("rollout_corr/truncated_fraction", "tokens whose weight was cut at the cap (IcePop: zeroed) / all tokens",
           "fraction", "here", "down"),
    Metric("rollout_corr/rejected_fraction", "tokens of rejected responses / all tokens", "fraction", "here", "down"),
    Metric("rollout_corr/drift",
           "sqrt of the mean over kept tokens of mu (c - A pi/mu)^2, c = d term / d log pi (A without a weight): the "
           "length that centering takes off a token, in its logits; 0 where c = A pi/mu, absent where c depends on "
           "other tokens", "advantage", "here; drift: score centering (arXiv 2609.20807)", "down"),
    Metric("rollout_corr/drift_se", "standard error of rollout_corr/drift over the step's responses (delta method)",
           "advantage", "here"),
    # -- old against pi: policy staleness
    Metric("staleness/k3_kl", "k3 of KL(old || pi): mean over tokens of r - 1 - log r, r = pi/old, each at most e^75",
           "nats/token", "MiniRL Eq. 5", "down"),
    Metric("staleness/extreme_frac_tau2", "fraction of tokens with max(pi/old, old/pi) > 2", "fraction",
           "R3 Eq. 3, for old against pi", "down"),
    Metric("staleness/version_lag_mean",
           "mean over responses of (weight version that the trainer has when it scores them - version of mu)",
           "versions", "here; MiniRL counts it as staleness, here it is a part of old/mu", "down"),
    Metric("staleness/version_lag_max", "max over responses of the same difference", "versions", "here", "down"),
    Metric("staleness/token_lag_mean",
           "mean over tokens of (weight version that the trainer has when it scores them - version that sampled the "
           "token); with over-sampling only, as the next three", "versions", "here; partial rollouts: Kimi k1.5 "
           "(arXiv 2501.12599)", "down"),
    Metric("staleness/token_lag_max", "max over tokens of the same difference", "versions", "here", "down"),
    Metric("staleness/stale_token_fraction", "tokens whose difference is above 0 / all tokens", "fraction", "here",
           "down"),
    Metric("staleness/mixed_response_fraction", "responses sampled by several weight versions / all responses",
           "fraction", "here", "down"),
    # -- the update
    Metric("actor/entropy", "mean over tokens of -sum_v old log old, in the old pass, on its routes", "nats/token",
           "MiniRL sec. 4.2, of pi before the updates"),
    Metric("actor/grad_norm", "Euclidean norm of the gradient before clipping", "1", "here", "flat"),
    Metric("actor/pg_clipfrac_high", "tokens whose ratio is above the upper bound and clipped by it / all tokens",
           "fraction", "MiniRL Eq. 7"),
    Metric("actor/pg_clipfrac_low",
           "tokens whose ratio is below the lower bound and clipped by it, or that another bound stops where A < 0: a "
           "dual clip's c (verl's pg_clipfrac_lower), DeepSeek's mask of a response / all tokens", "fraction",
           "MiniRL Eq. 7; dual-clip PPO (arXiv 1912.09729)"),
    Metric("actor/pg_clipfrac", "pg_clipfrac_high + pg_clipfrac_low; absent without a trust region", "fraction",
           "verl"),
    Metric("actor/ratio_mean", "mean over tokens of the objective's ratio, each at most e^75; absent where it has none",
           "1", "here", "flat"),
    Metric("actor/negative_ratio_max",
           "max over tokens with A < 0 of the objective's ratio, each at most e^75; absent where it has no ratio or no "
           "token has A < 0. GRPO's clip does not bound it; a dual clip bounds its term, not this number", "1",
           "here; the ratio of dual-clip PPO (arXiv 1912.09729)", "down"),
    Metric("actor/router_shift_ratio",
           "mean over tokens of gamma = max(exp(-mean over layers, old's experts of |log p_pi/p_old|), floor), p the "
           "routers'; absent where the objective does not scale by it", "1", "RSPO (arXiv 2510.23027)", "flat"),
    Metric("actor/router_shift_clipfrac", "tokens whose gamma is at its floor / all tokens", "fraction",
           "RSPO (arXiv 2510.23027)", "down"),
    Metric("actor/objective", "the maximised objective, summed over the micro-batches of a mini-batch", "reward",
           "MiniRL Eq. 7"),
    Metric("actor/kl_penalty", "mean over tokens of the estimator of KL(pi || ref), without its coefficient",
           "nats/token", "Pr2 Eq. 11"),
    Metric("actor/k3_kl_mu_pi",
           "mean over tokens of w - 1 - log w, w = pi/mu, each at most e^75: the whole of log(pi/mu) = log(old/mu) + "
           "log(pi/old)", "nats/token", "MiniRL Eq. 5, Pr2 Eq. 21", "down"),
    Metric("actor/lr", "learning rate of the step", "1", "here"),
    Metric("actor/num_updates", "optimiser steps of the global step", "updates", "here"),
    # -- routing
    Metric("routing/router_disagreement", "fraction of (token, layer) routers whose two expert sets differ",
           "fraction", "R3 sec. 3.2 and App. H", "down"),
    Metric("routing/token_disagreement", "fraction of tokens whose expert sets differ in at least one layer",
           "fraction", "R3 sec. 3.2 and App. H", "down"),
    Metric("routing/sequence_mean_difference",
           "per sequence, the mean over tokens of the number of differing expert choices; mean over sequences",
           "choices/token", "R3 sec. 3.2 and App. H", "down"),
    Metric("routing/topk_agreement", "mean over tokens and layers of |I_a & I_b| / k", "fraction", "Pr2 sec. 5.4",
           "up"),
    Metric("routing/zero_deviation", "fraction of (token, layer) with k - |I_a & I_b| = 0", "fraction",
           "Pr2 sec. 5.4", "up"),
    Metric("routing/one_deviation", "fraction of (token, layer) with k - |I_a & I_b| = 1", "fraction",
           "Pr2 sec. 5.4 and Fig. 4b", "down"),
    Metric("routing/route_kl", "mean over feature rows and layers of KL(live router || cached router)", "nats",
           "Pr2 sec. 5.4", "down"),
    Metric("routing/route_tv", "mean over feature rows and layers of TV(live router, cached router)", "1",
           "Pr2 Eq. 16 and Prop. B.1, a layer", "down"),
    Metric("routing/staleness_tv", "mean over tokens of TV(live route, cached route): 1 where any layer's set differs",
           "fraction", "Pr2 sec. 3.3", "down"),
    Metric("routing/native_rows", "rows without a record, routed naturally under replay", "rows", "here", "down"),
    Metric("routing/replayed_fraction", "rows that replayed a record / rows of the pass", "fraction", "here"),
    Metric("routing/noop", "1 where replay changed no expert although the engines disagree, else 0", "flag", "here",
           "down"),
    Metric("predictor/loss", "KL(sg[rho] || rho_hat) of the route predictor, or its delta-matching loss", "nats",
           "Pr2 Eq. 8 and App. G", "down"),
    Metric("predictor/weight_norm", "Frobenius norm of W_p, all layers together", "1", "Pr2 Eq. 4"),
    # -- the data
    Metric("response_length/mean", "mean number of response tokens", "tokens", "verl"),
    Metric("response_length/max", "largest number of response tokens", "tokens", "verl"),
    Metric("response_length/clip_ratio", "responses that max_tokens cut / all responses; not those that max_turns cut",
           "fraction", "verl", "down"),
    Metric("turns/mean", "mean over responses of the number of stretches of sampled tokens between observations",
           "turns", "here"),
    Metric("sampling/kept_group_fraction", "groups with unequal rewards / groups of the batch", "fraction",
           "DAPO sec. 3.2"),
    Metric("sampling/rounds", "rounds of generation until enough mixed groups were kept", "rounds", "DAPO sec. 3.2",
           "down"),
    Metric("sampling/kept_responses",
           "responses in progress after the step's rollout that the next one continues, or takes if they are complete",
           "responses", "here; partial rollouts: Kimi k1.5 (arXiv 2501.12599)"),
    Metric("sampling/dropped_responses",
           "responses begun and given up: all that a batch does not take under drop, else those too stale for the "
           "next; and those of spare groups of equal rewards",
           "responses", "here; over-sampling: DAPO sec. 3.2", "down"),
    Metric("sampling/dropped_tokens", "tokens sampled for the responses given up", "tokens", "here", "down"),
    Metric("progress/num_tokens", "response tokens that the global step trains on", "tokens", "here"),
    Metric("progress/num_responses", "responses that the global step trains on", "responses", "here"),
    # -- a cluster: time, transfers, and whether both engines hold the same weights
    Metric("timing_s/step", "wall-clock time of the global step, evaluation and recording left out", "s", "verl",
           "down"),
    Metric("timing_s/gen", "time in the rollout engines, all rounds of the global step together", "s", "verl", "down"),
    Metric("timing_s/old_log_prob", "time of the old pass", "s", "verl", "down"),
    Metric("timing_s/ref", "time of the reference pass", "s", "verl", "down"),
    Metric("timing_s/update_actor", "time of the N updates together", "s", "verl", "down"),
    Metric("timing_s/push", "time from the trainer's first exported tensor to the last engine's last one", "s", "here",
           "down"),
    Metric("timing_s/turn", "time in which ranks and engines on the same GPUs hand them over, both ways together", "s",
           "here", "down"),
    Metric("timing_s/save_checkpoint", "time that the run waited for checkpoints since the step before", "s", "verl",
           "down"),
    Metric("timing_s/cpu_ranks", "processor time of all training ranks' processes during the global step", "s", "here",
           "down"),
    Metric("timing_s/cpu_engines", "processor time of all inference engines' processes during the global step", "s",
           "here", "down"),
    Metric("transfer/rollout_bytes", "bytes of rollouts, routing records and features that the engines send",
           "bytes", "here; R3 Tab. 9 for routing records", "down"),
    Metric("transfer/routes_bytes",
           "bytes of mu's routing records for the responses that the global step trains on", "bytes", "R3 Tab. 9",
           "down"),
    Metric("transfer/features_bytes",
           "bytes of mu's router features for the responses that the global step trains on", "bytes", "Pr2 Tab. 3",
           "down"),
    Metric("transfer/weights_bytes", "bytes of one push of the weights, counted once for all engines", "bytes", "here",
           "down"),
    Metric("rollout/top_tokens_bytes",
           "bytes of mu's likeliest tokens, ids and log-probabilities, for the responses that the step trains on",
           "bytes", "here; score centering (arXiv 2609.20807)", "down"),
    Metric("rollout/engine_restarts", "inference engines that were lost and started again during the step", "engines",
           "here", "down"),
    Metric("probe/mean_abs_diff",
           "largest over engines of the mean of min(|log mu - log old|, 1) over sampled probe tokens, after a push",
           "nats/token", "here", "down"),
    Metric("probe/max_abs_diff", "largest |log mu - log old| of any sampled probe token and engine", "nats/token",
           "here", "down"),
)  # fmt: skip

REGISTRY: dict[str, Metric] = {metric.name: metric for metric in _METRICS}
"""Every metric by name."""


def describe(name: str) -> str:
    """One line on the metric: name, formula, unit and source. Raises ValueError with the nearest name if unknown."""
    if name not in REGISTRY:
        raise unknown_name("metric", name, REGISTRY)
    metric = REGISTRY[name]
    good = "" if metric.good is None else f"; good: {metric.good}"
    return f"{metric.name} = {metric.formula} [{metric.unit}] ({metric.source}{good})"


def check(metrics: Mapping[str, object]) -> None:
    """Raises ValueError where a name is not registered (with the nearest one), or a value is None instead of absent."""
    for name, value in metrics.items():
        if name not in REGISTRY:
            raise unknown_name("metric", name, REGISTRY)
        if value is None:
            raise ValueError(f"{name}: expected a number, got None (a metric without data is left out)")
