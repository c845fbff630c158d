"""Bugs in the correction of the engine gap and in denominators that public trainers have had.

Row C.n is the n-th of the users' threads that led to them; plain C is a mode that a system documents, or a reading of a
formula that is not its paper's.
"""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

FIXES = "theory.objectives.corrections"
OBJECTIVE = "theory.objectives.objective:Objective"
CALL = f"{OBJECTIVE}.__call__"
RATIOS = "theory.objectives.ratios"
SUMS = "theory.objectives.aggregations"

CORRECTIONS = (
    Mutant(
        "rejected_tokens_stay_in_the_denominator",
        "C.11",
        "Tokens of rejected responses are counted in the loss's denominator, so that rejection shrinks the step.",
        "slime #657",
        (Edit("theory.objectives.objective:Objective._totals", "count(kept_BT)", "count(is_response_BT)"),),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "totals_count_rejected_tokens",
        "C.11",
        "The whole mini-batch's denominators are counted before rejection, its parts' after.",
        "slime #657",
        (
            Edit(
                "theory.objectives.objective:Objective.totals",
                "self._totals(old_BT, mu_BT, self.kept(old_BT, mu_BT, is_response_BT), is_response_BT)",
                "self._totals(old_BT, mu_BT, is_response_BT, is_response_BT)",
            ),
        ),
        "rejection_changes_denominators",
        ("objectives_add_up_over_parts",),
    ),
    Mutant(
        "zeroed_weights_leave_the_denominator",
        "C.11",
        "A token whose weight IcePop zeroes is taken out of the mask as if its response had been rejected.",
        "slime #657 (the converse)",
        (
            Edit(
                CALL,
                "kept_BT = self.kept(old_BT, mu_BT, is_response_BT)",
                "kept_BT = self.kept(old_BT, mu_BT, is_response_BT)\n"
                "    kept_BT = kept_BT & ~self.correction.truncated(old_BT - mu_BT, is_response_BT)",
            ),
        ),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "micro_batches_have_their_own_denominator",
        "C.5",
        "Each micro-batch is normalised by its own tokens: the gradient depends on how the batch was cut.",
        "verl #2088, #2996",
        (Edit("sandbox.training.engine:SandboxTrainingEngine.update", "totals=totals,", "totals=None,"),),
        "updates_do_not_know_micro_batches",
    ),
    Mutant(
        "length_counts_padding",
        "C.5",
        "A response's mean is taken over the padded width.",
        "verl #2088",
        (Edit(f"{SUMS}:_length_norm", "kept_BT.sum(1).clamp(min=1)", "kept_BT.shape[1]"),),
        "aggregations_are_their_formulas",
    ),
    Mutant(
        "empty_rows_are_responses",
        "C.5",
        "Rows without a token (padding of the batch) are counted as responses.",
        "verl #2088",
        (Edit(f"{SUMS}:count", "int(kept_BT.any(1).sum())", "len(kept_BT)"),),
        "aggregations_are_their_formulas",
    ),
    Mutant(
        "token_mean_of_sequence_means",
        "C.5",
        "A token mean is computed as a mean over responses of their means: long responses weigh as short ones.",
        "DAPO against GRPO, as in MiniRL App. A",
        (
            Edit(
                f"{SUMS}:_token_mean",
                "_divide(term_BT.sum(), totals.num_tokens)",
                "_length_norm(term_BT, kept_BT, totals)",
            ),
        ),
        "aggregations_are_their_formulas",
    ),
    Mutant(
        "sequence_weight_is_a_mean",
        "C.8",
        "The sequence weight is a geometric mean where the product is meant.",
        "ms-swift's sequence level, verl's is a product",
        (Edit(f"{FIXES}.base:sequence_sum", "log_gap_BT.sum(1, keepdim=True)", "log_gap_BT.mean(1, keepdim=True)"),),
        "weights_are_their_formulas",
    ),
    Mutant(
        "geometric_mean_is_a_product",
        "C.8",
        "The sequence ratio is a sum of logs where the mean is meant: 0.57 while the tokens agree, and a dead run.",
        "TRL #5814, NeMo-RL #2269",
        (
            Edit(
                f"{RATIOS}:_mean_log",
                " / is_response_BT.sum(1, keepdim=True).clamp(min=1)",
                "",
            ),
        ),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "geometric_rejection_is_a_product",
        "C.8",
        "Responses are rejected by their product where bounds are set for the geometric mean.",
        "TRL #5814",
        (
            Edit(
                f"{FIXES}.rejections:GeoRS.keep", "(log_rho_BT.sum(1) / _lengths(is_response_BT))", "log_rho_BT.sum(1)"
            ),
        ),
        "weights_are_their_formulas",
    ),
    Mutant(
        "mean_over_the_padded_width",
        "C.8",
        "The geometric mean divides by the padded width, so that short responses look closer to mu.",
        "TRL #5814",
        (Edit(f"{FIXES}.rejections:_lengths", "is_response_BT.sum(1).clamp(min=1)", "is_response_BT.shape[1]"),),
        "weights_are_their_formulas",
    ),
    Mutant(
        "infinite_weight_is_nan",
        "C.9",
        "A capped weight is computed as a share of itself, clamp(rho) / rho: not a number where rho overflows.",
        "TRL #7120",
        (
            Edit(
                f"{FIXES}.base:Truncated.weight",
                "return self._log_weight(log_gap_BT, is_response_BT).exp().clamp(max=self.cap)",
                "w = self._log_weight(log_gap_BT, is_response_BT).exp(); return w * (w.clamp(max=self.cap) / w)",
            ),
        ),
        "no_gap_is_too_wide",
    ),
    Mutant(
        "rejections_are_not_reported",
        "C.9",
        "A batch whose every response is masked trains on loss 0, and no metric says so.",
        "TRL #7120",
        (
            Edit(
                "theory.objectives.metrics:weight_metrics",
                "rejected_BT = is_response_BT & ~kept_BT",
                "rejected_BT = kept_BT & ~is_response_BT",
            ),
        ),
        "everything_may_be_rejected",
    ),
    Mutant(
        "cap_is_applied_to_the_logarithm",
        "C.9",
        "The cap is applied to log rho and not to rho: a cap of 2 lets weights of 7.4 through.",
        "no thread: TIS's cap misread",
        (
            Edit(
                f"{FIXES}.base:Truncated.weight",
                ".exp().clamp(max=self.cap)",
                ".clamp(max=self.cap).exp()",
            ),
        ),
        "weights_are_their_formulas",
    ),
    Mutant(
        "tokens_are_capped_before_the_product",
        "C.9",
        "A sequence weight is the product of capped token ratios.",
        "no thread: TIS's cap misread",
        (
            Edit(
                f"{FIXES}.weights:SeqTIS._log_weight",
                "sequence_sum(log_gap_BT)",
                "sequence_sum(log_gap_BT.exp().clamp(max=self.cap).log())",
            ),
        ),
        "weights_are_their_formulas",
    ),
    Mutant(
        "log_ratio_is_clamped",
        "C.9",
        "Log-ratios are clamped to +-20 for safety: what should be infinite looks like a large number.",
        "verl's rollout correction, log-ratio safety clamp",
        (
            Edit(
                f"{OBJECTIVE}._log_ratios",
                "log_ratio(numerator_BT, mu_BT)",
                "log_ratio(numerator_BT, mu_BT).clamp(-20, 20)",
            ),
        ),
        "no_gap_is_too_wide",
    ),
    Mutant(
        "ratio_is_clamped",
        "C.9",
        "The ratio's logarithm is clamped, which also takes away its gradient outside.",
        "torchforge's REINFORCE clamps the ratio to [0.1, 10]",
        (Edit(f"{RATIOS}:_token", "return log_ratio_BT", "return log_ratio_BT.clamp(-2.3, 2.3)"),),
        "no_gap_is_too_wide",
    ),
    Mutant(
        "icepop_clamps",
        "C.9",
        "A weight outside IcePop's interval is moved to its end instead of zeroed.",
        "no thread: TIS and IcePop mixed up",
        (
            Edit(
                f"{FIXES}.weights:IcePop.log_weight",
                "torch.where(self.truncated(log_gap_BT, is_response_BT), -math.inf, log_gap_BT)",
                "log_gap_BT.exp().clamp(self.lo, self.hi).log()",
            ),
        ),
        "weights_are_their_formulas",
    ),
)
