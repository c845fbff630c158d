"""The laws of objectives, corrections, advantages and divergences."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.mutants.law import Law, times
from tests.strategies import Cut
from tests.theory import test_advantages as advantages
from tests.theory import test_aggregations as aggregations
from tests.theory import test_centering as centering
from tests.theory import test_corrections as corrections
from tests.theory import test_divergences as divergences
from tests.theory import test_kl_penalty as kl_penalty
from tests.theory import test_laws_rollouts as rollouts
from tests.theory import test_laws_wide_gaps as wide_gaps
from tests.theory import test_objective_laws as laws
from tests.theory import test_objective_masks as masks
from tests.theory import test_objectives as objectives
from tests.theory import test_presets as presets
from tests.theory import test_router_shift as router_shift
from tests.theory import test_second_moment as second_moment
from tests.theory import test_shelf as shelf
from tests.theory import test_token_advantages as token_advantages
from tests.theory import test_trust_regions as regions
from tests.theory import test_weighing as weighing
from tests.theory.laws_advantages import ADVANTAGE_ROWS, LENGTH_ADVANTAGE_ROWS
from tests.theory.laws_objectives import AGGREGATION_ROWS, CORRECTION_ROWS, REGION_ROWS
from tests.theory.laws_presets import PRESET_ROWS
from tests.theory.objective_batches import Batch, make_batch
from theory.advantages import advantages_of
from theory.objectives import CORRECTIONS


def _possible(batch: Batch) -> Batch:
    """The batch with log-probabilities below 0, as a divergence of probabilities needs them."""
    return replace(batch, **{name: getattr(batch, name).clamp(max=-0.05) for name in ("pi", "old", "mu")})


BATCH = {"batch": _possible(make_batch(0))}
WIDE = {"batch": _possible(make_batch(5, staleness=0.6, gap=1.2))}
# Every preset under no correction, and a score and a ratio objective under every correction.
PAIRS = [{"name": p, "correction_name": "none"} for p in PRESET_ROWS] + [
    {"name": p, "correction_name": c} for p in ("minirl_lengthnorm", "grpo_dapo", "gspo") for c in CORRECTION_ROWS
]
POLICIES = {
    "p": torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64),
    "q": torch.tensor([-0.5, 0.4, 0.1, 1.5, -2.0], dtype=torch.float64),
}
# The third response has no kept token at all.
HOLED = replace(make_batch(1), mask=make_batch(1).mask & (torch.arange(6) != 2)[:, None])
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0], [1.0] * 4 + [0.0], [0.1] * 5], dtype=torch.float64)


def _corrections() -> None:
    for name in CORRECTION_ROWS:
        for tight in (False, True):
            corrections.test_corrections_are_their_formulas.hypothesis.inner_test(name=name, tight=tight, **BATCH)
        corrections.test_corrections_are_their_formulas.hypothesis.inner_test(name=name, tight=False, **WIDE)


def _advantages_of_lengths() -> None:
    lengths_PG = torch.tensor([[1, 2, 3, 4, 5], [9, 1, 1, 2, 7], [3, 3, 5, 1, 1]])
    for name, by_hand in LENGTH_ADVANTAGE_ROWS.items():
        got = advantages_of(name, REWARDS, lengths_PG)
        expected = torch.tensor(by_hand(REWARDS.tolist(), lengths_PG.tolist()), dtype=got.dtype)
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


def _wide_gaps() -> None:
    for gap in (25.0, 800.0):
        for name in wide_gaps.CAPPED:
            wide_gaps.test_a_capped_weight_is_its_cap(name, gap)
        wide_gaps.test_icepop_zeroes_what_is_outside(gap)
    for gap in (-25.0, 25.0):
        wide_gaps.test_an_uncapped_weight_is_the_ratio(gap)
        wide_gaps.test_the_ratio_is_not_clamped("ppo", gap)
    wide_gaps.test_the_largest_weight_is_reported_as_it_is()


OBJECTIVES = (
    Law("weights_are_their_formulas", _corrections),
    Law(
        "equal_engines_change_nothing",
        times(corrections.test_equal_engines_change_nothing, *({"name": n} for n in CORRECTIONS)),
    ),
    Law(
        "one_token_has_its_own_weight",
        times(
            corrections.test_one_token_has_its_own_ratio_as_weight, *({"name": n, "log_rho": 0.4} for n in CORRECTIONS)
        ),
    ),
    Law("no_gap_is_too_wide", _wide_gaps),
    Law(
        "bounds_are_their_formulas",
        times(regions.test_regions_bind_and_weigh_as_their_formulas, *({"name": n, **BATCH} for n in REGION_ROWS)),
    ),
    Law(
        "what_leads_back_is_never_stopped",
        times(
            regions.test_what_brings_pi_back_is_never_stopped,
            *({"name": n, **BATCH} for n, row in REGION_ROWS.items() if row.signed and row.bounded),
        ),
    ),
    Law(
        "aggregations_are_their_formulas",
        times(
            aggregations.test_aggregations_equal_lists_and_add_up,
            *({"name": n, "cut": 2, "batch": batch} for n in AGGREGATION_ROWS for batch in (make_batch(0), HOLED)),
        ),
    ),
    Law(
        "gradients_are_score_function_forms",
        times(laws.test_gradient_is_the_score_function_form, *(pair | BATCH for pair in PAIRS)),
    ),
    Law(
        "presets_have_their_papers_gradient",
        times(
            laws.test_gradient_under_its_own_correction, *({"name": n, **b} for n in PRESET_ROWS for b in (BATCH, WIDE))
        ),
    ),
    Law(
        "what_is_stopped_has_no_derivative",
        times(laws.test_what_is_stopped_has_no_derivative, *({"name": n, **BATCH} for n in ("minirl", "cispo", "ppo"))),
    ),
    Law(
        "only_pi_carries_a_gradient",
        times(laws.test_only_pi_carries_a_gradient, *({"name": n, **BATCH} for n in ("minirl", "cispo", "gspo"))),
    ),
    Law(
        "objectives_add_up_over_parts",
        times(
            masks.test_permutation_and_micro_batches,
            *(
                {"name": "minirl", "correction_name": c, "cut": Cut(torch.tensor([2, 0, 5, 1, 4, 3]), 2)} | BATCH
                for c in ("token_tis", "geo_rs", "seq_mis")
            ),
        ),
    ),
    Law(
        "masked_positions_are_nowhere",
        times(
            masks.test_masked_positions_are_nowhere,
            *({"name": n, "correction_name": None, **BATCH} for n in ("minirl", "gspo", "cppo")),
        ),
    ),
    Law("everything_may_be_rejected", times(masks.test_everything_rejected, {"name": "minirl"}, {"name": "grpo"})),
    Law("rejection_changes_denominators", times(masks.test_rejection_changes_denominators_and_icepop_does_not)),
    Law("weights_are_reported", times(masks.test_weight_metrics)),
    Law("padding_keeps_the_holes", times(rollouts.test_padding_keeps_every_token_and_every_hole)),
    Law("unsampled_tokens_are_in_no_objective", times(rollouts.test_tokens_that_mu_did_not_sample_are_in_no_objective)),
    Law("the_ratio_is_counted_once", times(presets.test_the_ratio_is_never_counted_twice, {"name": "ppo"})),
    Law("dual_clip_is_its_formula", times(objectives.test_dual_clip_is_trls_two_sided_clip, {"c": 1.5}, {"c": 3.0})),
    Law(
        "centred_scores_have_mean_0",
        times(
            centering.test_the_centred_score_has_the_mean_0_under_mu,
            *({"name": n, "seed": 3, "advantage": -1.5} for n in ("no weight", "pi/mu", "PPO")),
        ),
    ),
    Law(
        "equal_engines_need_no_centering",
        times(centering.test_where_mu_is_pi_nothing_is_taken_off, {"seed": 3, "k": 2}, {"seed": 3, "k": 5}),
    ),
    Law("the_penalty_is_taken_off", times(kl_penalty.test_kl_penalty_is_taken_off, {"estimator": "k2"})),
    Law(
        "the_ratio_makes_k3_unbiased",
        times(kl_penalty.test_the_ratio_makes_k3_unbiased_for_tokens_of_mu, {"seed": 3}),
    ),
    Law(
        "gamma_multiplies_every_ratio",
        times(
            router_shift.test_gamma_multiplies_every_ratio_before_clips_and_means,
            *({"name": n, **BATCH} for n in ("grpo", "gspo", "gmpo")),
        ),
    ),
    Law(
        "shift_is_the_mean_distance",
        times(router_shift.test_shift_is_the_mean_distance_on_the_row_that_predicts_the_token),
    ),
    Law(
        "capping_meets_the_budget",
        times(
            second_moment.test_capping_at_the_level_meets_the_budget, *({"budget": b, **BATCH} for b in (1e-4, 0.04))
        ),
    ),
    Law(
        "budgets_bounds_are_grpos",
        times(second_moment.test_it_is_grpo_with_the_bounds_of_its_batch, {"batch": make_batch(2, B=40, T=10)}),
    ),
    Law("ctpo_widens_with_the_root", times(shelf.test_ctpo_widens_with_the_root_of_the_position)),
    Law("k3_plus_has_the_gradient_of_k2", times(kl_penalty.test_k3_plus_is_k3_with_the_gradient_of_k2, {"seed": 3})),
    Law(
        "a_weight_and_a_rejection_multiply",
        times(
            weighing.test_a_weight_and_a_rejection_multiply,
            *({"weight": "token_tis", "rejection": name, **BATCH} for name in ("geo_rs", "seq_max_k3", "token_k1")),
        ),
    ),
    Law(
        "rejections_look_at_the_gap",
        times(weighing.test_a_rejection_looks_at_the_engine_gap_whatever_the_weight_is_built_on),
    ),
    Law(
        "normalised_weights_have_mean_1",
        times(
            weighing.test_normalised_weights_have_the_mean_1,
            *(
                {"weight": w, "cut": Cut(torch.tensor([2, 0, 5, 1, 4, 3]), 2), **BATCH}
                for w in ("token_tis", "seq_tis")
            ),
        ),
    ),
)

ESTIMATORS = (
    Law(
        "advantages_are_their_formulas",
        times(
            advantages.test_advantages_are_their_formulas, *({"name": n, "rewards_PG": REWARDS} for n in ADVANTAGE_ROWS)
        ),
    ),
    Law(
        "equal_rewards_give_zero",
        times(
            advantages.test_equal_rewards_give_exactly_zero,
            *({"name": n, "reward": 0.1, "G": G} for n in ADVANTAGE_ROWS for G in (3, 5, 7)),
        ),
    ),
    Law("advantages_of_lengths_are_their_formulas", _advantages_of_lengths),
    Law(
        "optimal_token_is_its_formula",
        times(token_advantages.test_the_optimal_token_baseline_is_its_formula, {"seed": 0}, {"seed": 1}),
    ),
    Law("tokens_have_their_own_advantage", times(token_advantages.test_every_token_is_weighed_by_its_own)),
    Law("overlong_penalty_is_a_line", times(advantages.test_overlong_penalty_is_a_line)),
    Law("divergences_equal_their_sums", times(divergences.test_exact_divergences_equal_their_sums, POLICIES)),
    Law("estimators_have_their_values", times(divergences.test_pointwise_values, {"log_r": -3.0}, {"log_r": 3.5})),
    Law("estimators_are_unbiased", times(divergences.test_k1_and_k3_are_unbiased, POLICIES)),
    Law("k3_keeps_its_digits", times(divergences.test_k3_keeps_its_digits_near_one)),
    Law("chi2_is_its_formula", times(divergences.test_chi2_token_and_seq)),
    Law("masked_means_count_the_mask", times(divergences.test_masked_mean)),
    Law("discrepancy_is_its_formulas", times(divergences.test_discrepancy_and_staleness_metrics)),
)
