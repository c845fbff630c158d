"""The laws of drift, centring and exact training; matrix.py tries them on the mutants of their own row alone."""

from __future__ import annotations

import torch

from tests.mutants.law import Law, times
from tests.sandbox.exact import test_routed_training as routed
from tests.theory import test_drift as drift
from tests.theory import test_exact_centering as centering
from tests.theory import test_exact_estimator as estimator
from tests.theory import test_exact_noise as noise
from tests.theory import test_exact_settling as settling
from tests.theory import test_exact_training as training
from tests.theory import test_exact_update as update
from theory.exact.groups import Group

EXACT = (
    Law(
        "the_expected_update_is_the_audits",
        times(update.test_the_update_is_the_audit_s, {"name": "reinforce"}, {"name": "grpo"}),
    ),
    Law(
        "an_update_is_the_sum_of_its_responses",
        times(update.test_an_update_is_the_sum_of_its_responses, {"name": "reinforce"}, {"name": "minirl"}),
    ),
    Law("drift_is_what_centring_takes_off", times(update.test_the_drift_is_what_centring_takes_off)),
    Law("equal_engines_leave_nothing_of_mu", times(training.test_equal_engines_leave_nothing_of_mu)),
    Law("mini_batches_share_a_rollout", times(training.test_mini_batches_share_a_rollout)),
    Law("a_lagging_engine_has_former_weights", times(training.test_an_engine_that_lags_samples_from_former_weights)),
    Law("what_mu_never_samples_counts_for_nothing", times(update.test_tokens_that_are_never_sampled_count_for_nothing)),
    Law("a_trajectory_holds_what_is_asked_for", times(training.test_a_trajectory_holds_what_is_asked_for)),
    Law(
        "an_objectives_centring_is_the_exact_one",
        times(centering.test_with_all_of_mu_the_whole_drift_goes, {"group": Group(None, "mean")}),
    ),
    Law("noise_falls_as_the_root_of_the_batch", times(noise.test_an_infinite_batch_is_the_expected_run)),
    Law("an_expected_variance_is_the_audits", times(noise.test_the_variance_is_the_audit_s, {"name": "reinforce"})),
    Law("the_drifts_error_by_hand", times(drift.test_the_error_of_two_responses_by_hand)),
    Law(
        "a_whole_weight_has_no_drift",
        times(drift.test_a_weight_of_the_whole_gap_has_none_and_others_have_no_number),
    ),
    Law("rejected_tokens_have_no_drift", times(drift.test_rejected_and_padded_tokens_are_left_out)),
    Law(
        "a_batch_in_proportion_gives_the_expected_update",
        times(
            settling.test_a_batch_in_mu_s_proportions_gives_the_expected_update,
            {"name": "m2po"},
            {"name": "optimal token"},
            {"name": "m2po, optimal token"},
        ),
    ),
    Law("a_budget_is_of_all_groups", times(estimator.test_a_budget_counts_how_often_each_sign_occurs)),
    Law(
        "an_expected_router_shift_is_the_loops",
        times(
            routed.test_a_router_shift_is_the_loop_s_own_on_every_response,
            {"mode": "none", "floor": 0.9},
            {"mode": "R3", "floor": 0.95},
        ),
        torch.float32,  # as in the sandbox's own tests
    ),
)
