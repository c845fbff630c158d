"""Bugs that the objectives, corrections and advantages of 2025 and 2026 could have; rows C as of corrections.

No thread led to these: each is a reading of a formula that is not its paper's, or its code's. LUSPO has no code of its
own to be wrong: it is GSPO under another aggregation.
"""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

FIXES, PARTS = "theory.objectives.corrections", "theory.objectives.presets"
WEIGHTS, BINDS = "weights_are_their_formulas", "bounds_are_their_formulas"
GRADIENTS = "presets_have_their_papers_gradient"
SHIFTED = "gamma_multiplies_every_ratio"
TOKENWISE = "optimal_token_is_its_formula"


def misread(name: str, bug: str, source: str, target: str, old: str, new: str, killer: str) -> Mutant:
    """A mutant of one edit whose reference is a formula."""
    return Mutant(name, "C", bug, f"no thread: {source} misread", (Edit(target, old, new),), killer)


SHELF = (
    misread(
        "lower_bound_is_left_out", "A weight that is clipped at both ends is cut at its cap alone.", "TRL's clip_min",
        f"{FIXES}.weights:Clipped.weight", ".clamp(self.lo, self.hi)", ".clamp(max=self.hi)", WEIGHTS,
    ),
    misread(
        "clipped_response_weight_is_a_tokens", "A response's clipped weight is each token's own.",
        "TRL's sequence_truncate", f"{FIXES}.weights:SeqClip._log_weight", "sequence_sum(log_gap_BT)", "log_gap_BT",
        WEIGHTS,
    ),
    misread(
        "largest_divergence_is_the_smallest", "A response is rejected only if all of its tokens diverge.",
        "trust region masking", f"{FIXES}.rejections:_SeqMax.keep", ".any(1)", ".all(1)", WEIGHTS,
    ),
    misread(
        "token_bounds_are_on_the_inverse", "verl's bounds on mu/old are taken for bounds on old/mu.",
        "verl's token_k1", f"{FIXES}.rejections:TokenK1.truncated", "log_gap_BT.exp()", "(-log_gap_BT).exp()", WEIGHTS,
    ),
    misread(
        "k2_has_no_half", "A token's k2 is the square of its log-ratio.", "verl's token_k2",
        f"{FIXES}.rejections:TokenK2.truncated", "> self.max_k2", "> self.max_k2 / 2", WEIGHTS,
    ),
    misread(
        "k3_is_of_the_other_direction", "A token's k3 is that of the KL from old to mu.", "verl's token_k3",
        f"{FIXES}.rejections:TokenK3.truncated", "log_gap_BT)", "-log_gap_BT)", WEIGHTS,
    ),
    misread(
        "rejection_beside_a_weight_keeps_all", "Of a weight and a rejection, the weight alone is applied.",
        "verl's Geo-RS-Token-TIS", "theory.objectives.objective:Objective.kept",
        " & self.rejection.keep(log_rho_BT, is_response_BT)", "", "a_weight_and_a_rejection_multiply",
    ),
    misread(
        "token_rejection_beside_a_weight_keeps_all", "A rejected token keeps its weight.", "verl's token_k1",
        "theory.objectives.weighing:token_weights", "torch.where(passes_BT, value_BT, 0.0)", "value_BT",
        "a_weight_and_a_rejection_multiply",
    ),
    misread(
        "rejection_looks_at_pi", "A rejection beside a weight on pi/mu is decided on pi/mu: it moves with pi.",
        "verl's decoupled mode", "theory.objectives.weighing:token_weights", "rejection.truncated(log_rho_BT",
        "rejection.truncated(log_gap_BT", "rejections_look_at_the_gap",
    ),
    misread(
        "mean_weight_counts_tokens_of_responses", "The mean of responses' weights counts each by its length.",
        "verl's rollout_is_batch_normalize", "theory.objectives.weighing:log_mean_weight",
        "if correction.per_response:", "if False:", "normalised_weights_have_mean_1",
    ),
    misread(
        "mean_weight_is_that_of_a_part", "Normalised weights are not divided where a mini-batch is its own whole.",
        "verl's rollout_is_batch_normalize", "theory.objectives.objective:Objective._totals",
        "return replace(totals, log_mean_weight=mean)", "return totals", "normalised_weights_have_mean_1",
    ),
    misread(
        "gate_has_no_ratio", "SAPO's slope is that of the gate in r, and not in log r.", "SAPO",
        f"{PARTS}.sapo:SoftGate.term", "logsigmoid(-z_BT) + log_BT", "logsigmoid(-z_BT)", GRADIENTS,
    ),
    misread(
        "gate_temperatures_are_swapped", "SAPO's harder gate acts where A > 0.", "SAPO",
        f"{PARTS}.sapo:SoftGate.term", "advantages_B1 > 0", "advantages_B1 < 0", GRADIENTS,
    ),
    misread(
        "geometric_clip_ignores_the_sign", "GMPO's upper bound stops tokens whatever the sign of A.", "GMPO",
        f"{PARTS}.gmpo:GeometricClip.clipped", "(advantages_B1 > 0) & (ratio_BT > high)", "ratio_BT > high", BINDS,
    ),
    misread(
        "geometric_mean_forgets_the_held", "GMPO's mean leaves out the tokens that a bound holds.", "GMPO",
        f"{PARTS}.gmpo:GeometricClip.term", "torch.where(moves_BT, log_ratio_BT, bound_BT)",
        "torch.where(moves_BT, log_ratio_BT, 0.0)", GRADIENTS,
    ),
    misread(
        "kernel_of_a_geometric_mean", "VESPO's W is a mean over the response's length.", "VESPO",
        f"{PARTS}.vespo:GammaKernel.kernel", ".sum(1, keepdim=True)", ".mean(1, keepdim=True)", GRADIENTS,
    ),
    misread(
        "kernel_leaves_out_the_engine_gap", "VESPO's W is pi/old.", "VESPO", f"{PARTS}.vespo:GammaKernel.kernel",
        "tokens.logp_mu_BT", "tokens.logp_old_BT", GRADIENTS,
    ),
    misread(
        "positions_count_from_0", "CTPO's first token has a width of 0.", "CTPO", f"{PARTS}.ctpo:SqrtClip.bound",
        "tokens.is_response_BT.cumsum(1)", "(tokens.is_response_BT.cumsum(1) - 1)", BINDS,
    ),
    misread(
        "widths_grow_as_the_position", "CTPO's widths grow as t, not as its root.", "CTPO",
        f"{PARTS}.ctpo:SqrtClip.bound", ".sqrt()", "", "ctpo_widens_with_the_root",
    ),
    misread(
        "prefix_carries_a_gradient", "Every token of a prefix gets the gradient of those after it.", "CTPO",
        "theory.objectives.ratios:_prefix_product_token", "log_ratio_BT.detach().cumsum(1) + own_BT",
        "log_ratio_BT.cumsum(1)", GRADIENTS,
    ),
    misread(
        "good_responses_are_masked", "A far response is masked whatever its advantage.", "DeepSeek-V3.2 Eq. 9",
        f"{PARTS}.deepseek:SequenceMask.masked", "(advantages_B1 < 0) & (", "(", BINDS,
    ),
    misread(
        "mask_is_for_what_pi_makes_likelier", "The mask's divergence is log(pi/mu).", "DeepSeek-V3.2 Eq. 9",
        f"{PARTS}.deepseek:SequenceMask.masked", "-gap_BT.sum", "gap_BT.sum", BINDS,
    ),
    misread(
        "penaltys_ratio_is_stopped", "The ratio before k3 is a constant: the gradient is still k3's own.",
        "DeepSeek-V3.2's unbiased KL", "theory.objectives.kl_penalty:kl_pi_ref", "logp_mu_BT.detach()).exp()",
        "logp_mu_BT.detach()).exp().detach()", "the_ratio_makes_k3_unbiased",
    ),
    misread(
        "straight_through_goes_through", "k3+ has the gradient of k3, and its own value twice.", "verl's k3+",
        "theory.objectives.kl_penalty:kl_pi_ref", "logp_pi_BT.detach()) + (k2_BT - k2_BT.detach())", "logp_pi_BT)",
        "k3_plus_has_the_gradient_of_k2",
    ),
    misread(
        "shift_scales_old", "The router-shift ratio divides pi/old, and tokens of moved routers count more.", "RSPO",
        "theory.objectives.objective:Objective._term", "tokens.logp_old_BT - log_gamma_BT",
        "tokens.logp_old_BT + log_gamma_BT", SHIFTED,
    ),
    misread(
        "shift_has_no_floor", "A token whose routers have moved far counts for nothing.", "RSPO",
        "theory.objectives.router_shift:log_router_ratio", ".clamp(min=math.log(floor))", "", SHIFTED,
    ),
    misread(
        "shift_keeps_its_sign", "Experts that pi's router likes more make up for those it likes less.", "RSPO",
        "theory.routing.shift:_distance", ".abs()", "", "shift_is_the_mean_distance",
    ),
    misread(
        "shift_is_of_the_tokens_own_row", "The routers compared are those that read the token, not that predict it.",
        "RSPO", "theory.routing.shift:router_shift", "+ row_BT)", "+ row_BT + 1)",
        "shift_is_the_mean_distance",
    ),
    misread(
        "shift_is_on_the_experts_of_pi", "Scores are compared on the experts that pi's pass uses.", "RSPO",
        "theory.routing.replay:ReplayContext._scored",
        "scored.layer(number) if isinstance(scored, RoutingRecord) else used_NK.index_select(0, rows_R)",
        "used_NK.index_select(0, rows_R)", "scores_are_of_the_experts_asked_for",
    ),
    misread(
        "budget_counts_all_tokens", "The second moment is that of all tokens, also of those that come back.", "M2PO",
        "theory.objectives.second_moment:clip_level", "kept_BT & (advantages_B1 * log_ratio_BT > 0)", "kept_BT",
        "capping_meets_the_budget",
    ),
    misread(
        "budget_leaves_out_the_capped", "The level is solved as if the tokens above it were gone.", "M2PO",
        "theory.objectives.second_moment:clip_level", "before_n + left_n * square_n", "before_n + square_n",
        "capping_meets_the_budget",
    ),
    misread(
        "budget_narrows_the_least_bounds", "The level replaces bounds that are wider.", "M2PO",
        "theory.objectives.objective:Objective.within_budget", "max(region.eps_low, -math.expm1(-tau))",
        "min(region.eps_low, -math.expm1(-tau))", "budgets_bounds_are_grpos",
    ),
    misread(
        "opo_baseline_ignores_lengths", "OPO's baseline is the group's mean.", "OPO", "theory.advantages:opo",
        "lengths_PG.to(rewards_PG.dtype)", "torch.ones_like(rewards_PG)", "advantages_of_lengths_are_their_formulas",
    ),
    misread(
        "token_energy_has_one_probability", "A score's squared length is 1 - p + sum p^2.", "optimal token baseline",
        "theory.advantages:optimal_token", "1 - 2 * logp", "1 - logp", TOKENWISE,
    ),
    misread(
        "token_energy_is_of_the_token_alone", "A token's weight forgets the tokens before it.",
        "optimal token baseline", "theory.advantages:optimal_token", ", 0.0).cumsum(1)", ", 0.0)", TOKENWISE,
    ),
    misread(
        "token_places_count_observations", "A token is compared with those in its column, observations counted.",
        "optimal token baseline", "theory.advantages:optimal_token",
        "(~is_response_BT).long().argsort(dim=1, stable=True)", "torch.arange(T).expand_as(energy_BT)", TOKENWISE,
    ),
    misread(
        "sum_of_squares_is_of_probabilities", "The old pass reports sum_v old(v), which is 1.",
        "optimal token baseline", "sandbox.training.head:_scores",
        "all_pi_nV.square().sum(-1)", "all_pi_nV.sum(-1)", "old_pass_reports_squares",
    ),
    misread(
        "tokens_share_their_responses_advantage", "Where each token has an advantage, the response's is taken.",
        "optimal token baseline", "theory.objectives.objective:_broadcast",
        "_on(is_response_BT, wide(advantages_BT.detach()))", "wide(advantages_B.detach())[:, None]",
        "tokens_have_their_own_advantage",
    ),
    misread(
        "whitening_counts_responses", "REINFORCE++'s mean and deviation count responses, not tokens.", "REINFORCE++",
        "theory.advantages:_whitened", "lengths_PG.to(x_PG.dtype)", "torch.ones_like(x_PG)",
        "advantages_of_lengths_are_their_formulas",
    ),
    misread(
        "baseline_is_left_out", "REINFORCE++-baseline whitens the rewards themselves.", "REINFORCE++",
        "theory.advantages:reinforce_pp_baseline", "group_mean(rewards_PG)", "rewards_PG",
        "advantages_of_lengths_are_their_formulas",
    ),
    misread(
        "short_responses_are_rewarded", "The overlong penalty goes on below its buffer, as a reward.", "DAPO Eq. 13",
        "theory.advantages:overlong_penalty", ".clamp(min=0, max=buffer)", ".clamp(max=buffer)",
        "overlong_penalty_is_a_line",
    ),
)  # fmt: skip

__all__ = ["SHELF"]
