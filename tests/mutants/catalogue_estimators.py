"""Bugs in advantages, divergences, metrics and the order of a global step that public trainers have had."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

KL = "theory.divergences"
ADVANTAGES = "theory.advantages"

ESTIMATORS = (
    Mutant(
        "population_deviation",
        "C.23",
        "The group's deviation has the divisor G, where the source's has G - 1: advantages are larger by the root.",
        "verl against others; MiniRL App. A says neither",
        (Edit(f"{ADVANTAGES}:group_norm", "correction=1", "correction=0"),),
        "advantages_are_their_formulas",
    ),
    Mutant(
        "deviation_of_the_others",
        "C.23",
        "The deviation is that of the other responses: where they are all equal, it is 0, and advantages explode.",
        "NeMo-RL #4158 (an advantage of -2075)",
        (
            Edit(
                f"{ADVANTAGES}:group_norm",
                "rewards_PG.std(dim=1, keepdim=True, correction=1)",
                "torch.stack([rewards_PG[:, [j for j in range(rewards_PG.shape[1]) if j != i]].std(dim=1, correction=0)"
                " for i in range(rewards_PG.shape[1])], dim=1)",
            ),
        ),
        "advantages_are_their_formulas",
    ),
    Mutant(
        "equal_rewards_are_divided_by_their_rounding",
        "C.23",
        "Equal rewards leave the rounding of their mean, which division by a deviation of 0 blows up.",
        "NeMo-RL #4158",
        (
            Edit(
                f"{ADVANTAGES}:group_mean",
                "torch.where(keep_mixed_groups(rewards_PG)[:, None], centred_PG, torch.zeros_like(centred_PG))",
                "centred_PG",
            ),
        ),
        "equal_rewards_give_zero",
    ),
    Mutant(
        "leave_one_out_leaves_none_out",
        "C.23",
        "The leave-one-out baseline contains the response's own reward.",
        "no thread: RLOO without its factor G / (G - 1)",
        (Edit(f"{ADVANTAGES}:leave_one_out", "* (G / (G - 1))", "* 1.0"),),
        "advantages_are_their_formulas",
    ),
    Mutant(
        "groups_are_taken_across_prompts",
        "C",
        "The mean is taken over prompts instead of over a prompt's responses.",
        "no thread: (P, G) transposed",
        (
            Edit(
                f"{ADVANTAGES}:group_mean",
                "rewards_PG.mean(dim=1, keepdim=True)",
                "rewards_PG.mean(dim=0, keepdim=True)",
            ),
        ),
        "advantages_are_their_formulas",
    ),
    Mutant(
        "advantages_lose_their_responses",
        "C",
        "Groups are shuffled into mini-batches and their advantages are not.",
        "no thread: an index lost in the shuffle",
        (Edit("theory.loop:take", "advantages_B=advantages_B[chosen]", "advantages_B=advantages_B[: len(chosen)]"),),
        "minibatches_carry_their_own_rows",
    ),
    Mutant(
        "old_log_probs_lose_their_responses",
        "C",
        "Groups are shuffled into mini-batches and the old pass's log-probs are not.",
        "no thread: an index lost in the shuffle",
        (Edit("theory.loop:take", "old.scores.logp_BT[chosen][:, :T]", "old.scores.logp_BT[: len(chosen)][:, :T]"),),
        "minibatches_carry_their_own_rows",
    ),
    Mutant(
        "k3_is_clamped",
        "C",
        "k3 is clamped at 10, so that the estimate stops growing where the engines part.",
        "clamps in public KL penalties",
        (Edit(f"{KL}:k3", "return log_r.expm1() - log_r", "return (log_r.expm1() - log_r).clamp(-10, 10)"),),
        "estimators_have_their_values",
    ),
    Mutant(
        "k3_has_the_other_direction",
        "C",
        "k3 is fed 1/r: unbiased for the other direction, and only with samples from the other policy.",
        "verl and AReaL have opposite signs of k1",
        (Edit(f"{KL}:k3", "log_r = logp_q - logp_p", "log_r = logp_p - logp_q"),),
        "estimators_have_their_values",
        ("estimators_are_unbiased",),
    ),
    Mutant(
        "kl_is_a_squared_log_ratio",
        "C",
        "What is called KL is k2, a squared log-ratio.",
        "kl_loss in public trainers",
        (Edit(f"{KL}:k3_kl_mu_old", "k3(logp_old_BT, logp_mu_BT)", "k2(logp_old_BT, logp_mu_BT)"),),
        "estimators_have_their_values",
        ("discrepancy_is_its_formulas",),
    ),
    Mutant(
        "k3_cancels_near_one",
        "C",
        "r - 1 - log r is computed as it is written: near r = 1 its digits cancel to noise.",
        "the formula as it is usually coded",
        (Edit(f"{KL}:k3", "log_r.expm1() - log_r", "log_r.exp() - 1 - log_r"),),
        "k3_keeps_its_digits",
    ),
    Mutant(
        "chi2_of_the_geometric_mean",
        "C.8",
        "The sequence's chi-square is that of geometric means.",
        "ms-swift against verl",
        (
            Edit(
                f"{KL}:chi2_seq",
                "torch.where(mask_BT, logp_old_BT - logp_mu_BT, 0.0).sum(1)",
                "torch.where(mask_BT, logp_old_BT - logp_mu_BT, 0.0).sum(1) / mask_BT.sum(1).clamp(min=1)",
            ),
        ),
        "chi2_is_its_formula",
    ),
    Mutant(
        "perplexities_are_compared_the_other_way",
        "C",
        "The difference of log-perplexities has the other sign.",
        "verl's documentation against its code",
        (Edit(f"{KL}:discrepancy_metrics", "-masked_mean(mean_gap_B,", "masked_mean(mean_gap_B,"),),
        "discrepancy_is_its_formulas",
    ),
    Mutant(
        "metrics_count_padding",
        "C.19",
        "Means of metrics are taken over padding too, where the log-ratio is 0.",
        "vime #70",
        (
            Edit(
                f"{KL}:masked_mean",
                "count = int(mask_BT.sum())",
                "count = mask_BT.numel() if bool(mask_BT.any()) else 0",
            ),
        ),
        "masked_means_count_the_mask",
    ),
    Mutant(
        "metrics_of_the_wrong_mode",
        "C.10",
        "The discrepancy is measured between mu and itself, as if old had been replaced by mu.",
        "verl #4070",
        (
            Edit(
                "theory.step_metrics:old_pass_metrics",
                "discrepancy_metrics(scores.logp_BT, batch.logp_mu_BT,",
                "discrepancy_metrics(batch.logp_mu_BT, batch.logp_mu_BT,",
            ),
        ),
        "a_step_measures_what_it_did",
    ),
    Mutant(
        "staleness_is_measured_against_mu",
        "C.10",
        "Policy staleness is measured from mu instead of old, and so holds the discrepancy too.",
        "verl #4070",
        (
            Edit(
                "theory.step_metrics:update_metrics",
                "m.logp_old_BT[mask] for (m, _), mask",
                "m.rollouts.padded().logp_mu_BT[mask] for (m, _), mask",
            ),
        ),
        "on_policy_there_is_no_staleness",
    ),
    Mutant(
        "maxima_are_averaged",
        "C.10",
        "A mini-batch's maximum is the mean of its parts' maxima.",
        "no thread: one reduction for all metrics",
        (Edit("theory.objectives.metrics:combine_metrics", 'if name.endswith("_max"):', "if False:"),),
        "maxima_do_not_know_micro_batches",
    ),
    Mutant(
        "version_is_not_counted",
        "C.16",
        "The rollout engine takes new weights and keeps the old version's number.",
        "symptom of slime #1695 (discrepancy high after a resume)",
        (Edit("sandbox.engines.engine:SandboxEngine.load_weights", "self.version = version", "self.version = 0"),),
        "a_step_measures_what_it_did",
    ),
    Mutant(
        "weights_are_not_handed_over",
        "C.16",
        "The rollout engine continues with the weights that it had.",
        "symptom of slime #1695",
        (Edit("theory.loop:hand_over", "rollout.load_weights(tensors, version)", "rollout.version = version"),),
        "weights_reach_the_engine",
    ),
    Mutant(
        "predictor_is_not_folded",
        "C.16",
        "Under Pr3 the engine is handed gates without the predictor: it routes naturally.",
        "no thread: Pr2 App. C.2 left out",
        (Edit("theory.loop:hand_over", 'folded=algorithm.passes.rollout == "predicted"', "folded=False"),),
        "pr3_samples_by_the_predicted_route",
    ),
    Mutant(
        "draws_are_not_named",
        "C.4",
        "The engine draws from the process's generator: the same seed gives other tokens.",
        "verl #3126",
        (
            Edit(
                "sandbox.engines.engine:_draws",
                'generator=stream(sampling.seed, "sampling")',
                "generator=None",
            ),
        ),
        "the_seed_names_the_draw",
    ),
    Mutant(
        "penalty_has_the_other_sign",
        "C",
        "The KL penalty is added to the objective instead of taken off it.",
        "no thread: a loss taken for an objective",
        (
            Edit(
                "theory.objectives.objective:Objective.__call__",
                "term_BT - self.kl_coefficient * penalty_BT",
                "term_BT + self.kl_coefficient * penalty_BT",
            ),
        ),
        "the_penalty_is_taken_off",
    ),
)
