"""Bugs in drift, centring and exact training; rows E. No public system has these parts, so that none has a thread."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

TRAINING, EXPECTED, DRIFT = "theory.exact.training", "theory.exact.expected", "theory.drift"
SETTLING, IN_PROPORTION = "theory.exact.settling", "a_batch_in_proportion_gives_the_expected_update"
ROUTED, RSPO = "sandbox.exact.routed_policy", "an_expected_router_shift_is_the_loops"
CENTERING = "theory.objectives.centering:centering_term"


def _mutant(name: str, bug: str, target: str, old: str, new: str, killer: str) -> Mutant:
    return Mutant(name, "E", bug, "no thread: a part that is ours", (Edit(target, old, new),), killer)


EXACT = (
    _mutant(
        "every_update_rolls_out", "Mini-batches do not share a rollout: N updates are N on-policy steps.",
        f"{TRAINING}:train", "number % settings.num_minibatches == 0", "number % 1 == 0",
        "mini_batches_share_a_rollout",
    ),
    _mutant(
        "a_lag_is_ignored", "An engine that holds former weights samples from the present ones.",
        f"{TRAINING}:train", "policy, former[0])", "policy, policy)", "a_lagging_engine_has_former_weights",
    ),
    _mutant(
        "the_last_update_is_not_observed", "A run's last row is that of its last multiple of observe_every.",
        f"{TRAINING}:train", "if is_last or number % settings.observe_every == 0:",
        "if number % settings.observe_every == 0:", "a_trajectory_holds_what_is_asked_for",
    ),
    _mutant(
        "noise_falls_with_the_batch", "The noise of B responses is divided by B and not by its root.",
        f"{TRAINING}:_noise", "settings.batch_size**0.5", "settings.batch_size", "noise_falls_as_the_root_of_the_batch",
    ),
    _mutant(
        "every_advantage_is_positive", "Each response's coefficient is that of a positive advantage.",
        f"{EXPECTED}:Update.combined", "1.0 - 2.0 * has_sY[1].double()", "1.0 - 0.0 * has_sY[1].double()",
        "an_update_is_the_sum_of_its_responses",
    ),
    _mutant(
        "a_rare_sign_is_left_out", "Where a response has both signs, or none, only positive shares are looked for.",
        f"{EXPECTED}:Update.combined", "has_sY.nonzero(as_tuple=True)", "has_sY[:1].nonzero(as_tuple=True)",
        "an_update_is_the_sum_of_its_responses",
    ),
    _mutant(
        "drift_is_of_the_whole_mean", "A prefix's mean advantage is not divided by how likely the prefix is.",
        "theory.exact.batch:Batch.prefix_shares_sBT.func", "self.node_shares_sN / reach_N", "self.node_shares_sN",
        "drift_is_what_centring_takes_off",
    ),
    _mutant(
        "centring_forgets_mu", "Tokens are centred by a plain sum over the vocabulary, not by their chances under mu.",
        CENTERING, "times(mu_BTJ.exp(), c_BTJ)", "times(torch.ones_like(c_BTJ), c_BTJ)",
        "an_objectives_centring_is_the_exact_one",
    ),
    _mutant(
        "centring_is_of_unsampled_tokens", "Tokens that mu samples are left out of the centring, the others are in it.",
        CENTERING, "there_BTJ = kept_BT[..., None] & (mu_BTJ > -torch.inf)",
        "there_BTJ = kept_BT[..., None] & (mu_BTJ < -torch.inf)", "an_objectives_centring_is_the_exact_one",
    ),
    _mutant(
        "drift_is_not_compared_with_pi", "The metric is the coefficient's square, without what a whole weight adds.",
        f"{DRIFT}:squared_drift", "- wide(advantages_B)[:, None] * (pi_BT - mu_BT / 2).exp()",
        "- 0.0 * wide(advantages_B)[:, None] * (pi_BT - mu_BT / 2).exp()", "a_whole_weight_has_no_drift",
    ),
    _mutant(
        "drift_counts_rejected_tokens", "Tokens of rejected responses are in the mean of the metric.",
        f"{DRIFT}:squared_drift", "kept_BT = objective.kept(logp_old_BT, logp_mu_BT, is_response_BT)",
        "kept_BT = is_response_BT", "rejected_tokens_have_no_drift",
    ),
    _mutant(
        "budget_counts_every_response_once", "A budget's bounds are those of a batch that holds each response once.",
        f"{SETTLING}:within_budget", "weights_sB.reshape(-1, 1)", "torch.ones_like(weights_sB).reshape(-1, 1)",
        IN_PROPORTION,
    ),
    _mutant(
        "budget_is_settled_at_old", "The bounds of a budget are settled once, where pi still is old.",
        f"{EXPECTED}:Update.objective.func", "logp = (self.pi_BT,", "logp = (batch.old_BT,", IN_PROPORTION,
    ),
    _mutant(
        "budget_weighs_by_the_advantage", "In finite groups a sign counts by the size of its advantages.",
        "theory.exact.estimator:estimate", "weights.number_sC", "weights.first_sC", "a_budget_is_of_all_groups",
    ),
    _mutant(
        "baseline_is_the_mean", "A token's baseline is the mean reward of the responses that have such a token.",
        f"{SETTLING}:baselines", "weighted_PT / weight_PT, mean_PT", "mean_PT, mean_PT", IN_PROPORTION,
    ),
    _mutant(
        "baseline_is_of_all_prompts", "Tokens are compared with those of other prompts.",
        f"{SETTLING}:baselines", "sum_PT.index_add_(0, prompt_Y[rows],", "sum_PT.index_add_(0, 0 * prompt_Y[rows],",
        IN_PROPORTION,
    ),
    _mutant(
        "baseline_forgets_the_prefix", "A token's weight in its baseline is that of its own score alone.",
        f"{SETTLING}:baselines", "tree.gather(energy, paths).cumsum(1)", "tree.gather(energy, paths)", IN_PROPORTION,
    ),
    _mutant(
        "expected_routers_stand_still", "An expected update takes pi's routers for old's.",
        f"{EXPECTED}:Update._coefficients", "shift_BT[rows_b]", "0 * shift_BT[rows_b]", RSPO,
    ),
    _mutant(
        "expected_routers_are_of_the_first_update", "The shift is asked for as at a first update, where there is none.",
        f"{ROUTED}:router_shift", "index=1", "index=0", RSPO,
    ),
)  # fmt: skip
