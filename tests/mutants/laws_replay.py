"""The laws of routes: records, passes, gates, and what engines and trainers do with them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.contracts import test_rollout_engine as engines
from tests.contracts import test_training_engine as trainers
from tests.contracts import worlds
from tests.mutants.law import Law, Scripted, times
from tests.sandbox.training import test_laws_cached_routes as cached_routes
from tests.sandbox.training import test_laws_centering as centering
from tests.sandbox.training import test_laws_log_probs as log_probs
from tests.sandbox.training import test_laws_micro_batches as micro_batches
from tests.sandbox.training import test_laws_router_shift as router_shift
from tests.sandbox.training import test_laws_temperature as temperature
from tests.sandbox.training import test_laws_token_advantages as token_advantages
from tests.sandbox.training import test_modes as modes
from tests.sandbox.training import test_predictive_replay as predictive
from tests.scaled import test_laws_capture as capture
from tests.scaled import test_vllm_routes as vllm_routes
from tests.theory import test_gates as gates
from tests.theory import test_laws_rollouts as rollouts
from tests.theory import test_laws_rows as rows
from tests.theory import test_laws_selection_bias as selection_bias
from tests.theory import test_replay as replay
from tests.theory import test_replay_ledger as ledger
from tests.theory import test_routing_measures as measures
from tests.theory import test_routing_record as record
from tests.theory.tiny_moe import CONVENTIONS
from theory.contracts import Sampling

ROWS = {"seed": 3, "num_rows": [4, 2, 3]}
BAD_IDS = ((3, 8), (264, 4), (4, 4), (4, -1))


def _bad_ids() -> None:
    for ids in BAD_IDS:
        shown = ", ".join(str(i) for i in (sorted(ids) if -1 in ids else ids))
        message = rf"response 1, row 2, layer 5: expected .* got \[{shown}\]"
        record.test_bad_ids_name_response_row_and_layer(list(ids), message)


RECORDS = (
    Law(
        "records_round_trip",
        times(record.test_record_round_trips, {"seed": 1, "num_tokens": [5, 3, 7], "num_missing": 1, "K": 2}),
    ),
    Law(
        "records_split_and_join",
        times(
            record.test_select_then_concat_is_the_record,
            {"seed": 1, "num_tokens": [5, 3, 7], "data": lambda: Scripted(1, [2, 0, 1])},
        ),
    ),
    Law(
        "ids_are_narrow",
        times(
            record.test_ids_are_as_narrow_as_signed_integers_allow,
            {"num_experts": 128, "expected": torch.int8},
            {"num_experts": 129, "expected": torch.int16},
            {"num_experts": 256, "expected": torch.int16},
        ),
    ),
    Law(
        "payloads_are_read_by_value",
        times(record.test_payloads_of_every_integer_type_are_read_by_value, {"dtype": torch.uint8, "top": 200}),
    ),
    Law("trailing_row_is_dropped", times(record.test_one_trailing_row_is_dropped_and_said)),
    Law(
        "other_row_counts_are_refused",
        times(record.test_any_other_number_of_rows_is_an_error, {"num_rows": 3}, {"num_rows": 6}),
    ),
    Law(
        "payload_is_cut_by_layer_number",
        times(record.test_payload_over_all_decoder_layers_is_cut_by_number),
    ),
    Law("layers_are_bound_by_number", times(record.test_layers_are_bound_by_number_not_by_order)),
    Law(
        "odd_layer_counts_are_refused",
        times(record.test_layer_count_that_fits_neither_is_an_error, {"L": 2}, {"L": 4}, {"L": 5}),
    ),
    Law("bad_ids_are_found", _bad_ids),
    Law("unfilled_layers_are_refused", times(record.test_layer_that_was_never_captured_is_an_error)),
    Law("invalid_records_do_not_exist", times(record.test_a_record_cannot_be_built_invalid)),
    Law("a_stage_has_its_own_columns", times(record.test_layers_of_a_stage_are_those_columns)),
    Law(
        "windows_partition_the_rows",
        times(record.test_windows_partition_every_response, {"seed": 1, "num_tokens": [5, 3, 7], "width": 2}),
    ),
    Law(
        "every_field_is_carried",
        times(rollouts.test_selecting_and_joining_carry_every_field, {"order": [2, 0]}, {"order": [0, 1, 2]}),
    ),
    Law(
        "measures_are_the_papers",
        times(
            measures.test_measures_are_the_papers_definitions,
            {"seed": 5, "num_rows": [4, 3], "K": 2, "num_missing": 1},
        ),
    ),
)

PASSES = (
    Law("modes_are_the_table", times(replay.test_passes_are_the_design_table)),
    Law(
        "replay_changes_no_bit",
        times(
            replay.test_replaying_the_natural_record_changes_no_bit,
            *({"name": name, **ROWS} for name in CONVENTIONS),
        ),
    ),
    Law(
        "recorded_rows_are_used",
        times(replay.test_replay_uses_the_record_where_it_has_rows, {**ROWS, "num_missing": 1}),
    ),
    Law("rows_stand_where_tokens_stand", times(rows.test_rows_stand_where_their_tokens_stand, {"width": 8})),
    Law("a_micro_batch_is_its_responses", times(replay.test_a_micro_batch_is_its_responses, ROWS)),
    Law(
        "recomputation_changes_no_gradient",
        times(
            ledger.test_recomputation_changes_no_gradient,
            *({"name": "olmoe", "source": source, "seed": 3} for source in ("natural", "replay")),
        ),
    ),
    Law("recomputed_routes_cannot_flip", times(ledger.test_recomputed_natural_routes_cannot_flip, {"seed": 3})),
    Law("each_layer_is_routed_once", times(ledger.test_each_layer_is_routed_exactly_once)),
    Law("layers_are_those_of_the_record", times(ledger.test_layers_must_be_those_of_the_record)),
    Law("a_pass_lives_once", times(ledger.test_a_pass_lives_once_and_only_inside_its_context)),
    Law("sizes_must_fit", times(ledger.test_sizes_that_do_not_fit_name_both_numbers)),
    Law("contradictions_are_refused", times(ledger.test_contradictory_routings_are_errors)),
    Law("a_pass_chooses_with_the_bias", times(selection_bias.test_every_choice_of_a_pass_takes_the_bias, {"seed": 3})),
    Law(
        "gradients_reach_a_replayed_set",
        times(
            gates.test_gradients_reach_the_logits_of_a_replayed_set,
            *({"name": name, "seed": 3} for name in ("olmoe", "qwen3", "softmax_after")),
        ),
    ),
    Law("bias_chooses_and_does_not_weigh", times(gates.test_selection_bias_chooses_but_does_not_weigh, {"seed": 3})),
)


def on_a_noisy_engine(test: Callable, **arguments: object) -> Callable[[], None]:
    """A test of the training engine's contract, over what a noisy engine sampled."""

    def check() -> None:
        weights = worlds.model()
        sampled = worlds.rollout_engine("fp8-and-noise", weights).generate(
            worlds.prompts(), Sampling(max_tokens=8, num_responses=3, seed=2)
        )
        test(weights=weights, rollouts=sampled, **arguments)

    return check


def _seeds_name_draws() -> None:
    weights = worlds.model()
    engine = worlds.rollout_engine("exact", weights)
    engines.test_the_seed_names_the_draw(engine, engine.generate(worlds.prompts(), engines.SAMPLING))


SANDBOX = (
    Law(
        "exact_engine_is_the_trainer",
        times(log_probs.test_the_exact_engine_is_the_trainer_at_any_temperature, {"temperature": 1.0}),
    ),
    Law(
        "log_probs_are_tempered",
        times(log_probs.test_the_exact_engine_is_the_trainer_at_any_temperature, {"temperature": 0.5}),
    ),
    Law("the_record_is_mu", times(centering.test_the_record_is_mu, {"temperature": 0.7})),
    Law("the_trainer_scores_the_record", times(centering.test_the_trainer_scores_the_record_in_every_micro_batch)),
    Law(
        "scores_are_of_the_experts_asked_for",
        times(router_shift.test_a_pass_keeps_the_scores_that_it_is_asked_for, {"gate": "qwen3"}),
    ),
    Law(
        "old_pass_reports_squares",
        times(token_advantages.test_the_old_pass_reports_the_sum_of_squares, {"temperature": 0.7}),
    ),
    Law("scored_is_drawn", times(temperature.test_what_is_scored_is_what_is_drawn_from, {"temperature": 0.7})),
    Law(
        "passes_are_tempered",
        times(
            temperature.test_old_pi_reference_and_entropy_are_of_the_tempered_policy,
            {"temperature": 0.7},
        ),
    ),
    Law(
        "the_gradient_is_unbiased_at_a_temperature",
        times(temperature.test_the_on_policy_gradient_is_unbiased_at_every_temperature, {"temperature": 0.7}),
    ),
    Law(
        "rollouts_keep_their_temperature",
        times(
            temperature.test_every_engine_scores_by_prefill_what_it_scored_by_decoding_at_a_temperature,
        ),
    ),
    Law("reference_is_naturally_routed", times(log_probs.test_the_reference_is_naturally_routed)),
    Law("old_stays_old", times(log_probs.test_old_stays_old_after_an_update)),
    Law("weights_reach_the_engine", times(log_probs.test_the_engine_takes_the_weights_that_it_is_handed)),
    Law("the_seed_names_the_draw", _seeds_name_draws),
    Law(
        "r3_uses_mus_experts",
        on_a_noisy_engine(trainers.test_replay_uses_the_record_and_keeps_what_it_would_have_chosen),
    ),
    Law(
        "modes_cache_their_own_routes",
        times(
            cached_routes.test_gradient_passes_replay_what_their_mode_says,
            {"mode": "R2", "source": "old"},
            {"mode": "R3", "source": "mu"},
        ),
    ),
    Law("pr3_samples_by_the_predicted_route", times(predictive.test_pr3_samples_by_the_predicted_route)),
    Law("pr3_learns_from_unbiased_logits", times(predictive.test_pr3_learns_from_unbiased_logits)),
    Law("replay_without_a_record_is_refused", times(modes.test_replay_without_a_record_is_refused, {"mode": "R3"})),
    Law("minibatches_carry_their_own_rows", times(modes.test_minibatches_carry_their_own_rows)),
    Law(
        "on_policy_there_is_no_staleness",
        times(modes.test_on_policy_there_is_no_staleness, {"mode": "none"}),
    ),
    Law("a_step_measures_what_it_did", times(modes.test_two_steps, {"mode": "R3", "name": "minirl", "gate": "qwen3"})),
    Law(
        "scores_do_not_know_micro_batches",
        on_a_noisy_engine(trainers.test_scores_do_not_depend_on_micro_batches, micro_batch_size=5),
    ),
    Law(
        "updates_do_not_know_micro_batches",
        on_a_noisy_engine(trainers.test_updates_do_not_depend_on_micro_batches, name="grpo_dapo"),
    ),
    Law(
        "maxima_do_not_know_micro_batches",
        on_a_noisy_engine(trainers.test_updates_do_not_depend_on_micro_batches, name="minirl"),
    ),
    Law(
        "routes_do_not_know_micro_batches", times(micro_batches.test_routes_do_not_depend_on_micro_batches, {"size": 5})
    ),
    Law("exported_weights_are_the_policy", on_a_noisy_engine(trainers.test_exported_weights_are_the_policy)),
    Law("pi_starts_as_old", on_a_noisy_engine(trainers.test_pi_is_old_before_the_first_update, source="replay")),
)

VLLM = (
    Law(
        "every_schema_gives_one_record",
        times(
            vllm_routes.test_every_schema_gives_the_same_record,
            *({"name": name} for name in vllm_routes.SCHEMAS if "n rows" not in name),
        ),
    ),
    Law("cached_prefix_is_missing", times(vllm_routes.test_a_cached_prefix_is_missing)),
    Law("a_shared_block_brings_its_routes", times(vllm_routes.test_a_shared_block_brings_its_routes)),
    Law("the_last_run_of_a_row_wins", times(vllm_routes.test_the_last_run_of_a_row_wins_and_overruns_are_cut)),
    Law("taken_routes_are_forgotten", times(capture.test_taken_routes_are_forgotten)),
    Law("tokens_come_with_their_log_probs", times(capture.test_tokens_come_with_their_own_log_probs)),
)
