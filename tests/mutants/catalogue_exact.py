"""Bugs in drift, centring and exact training; rows E. No public system has these parts, so that none has a thread."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

TRAINING, EXPECTED, DRIFT = "theory.exact.training", "theory.exact.expected", "theory.drift"
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
        f"{EXPECTED}:Batch.prefix_shares_BT.func", "total_N / reach_N, 0.0", "total_N, 0.0",
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
)  # fmt: skip
