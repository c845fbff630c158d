"""Replay bugs in what a record holds and how it is packed, cut, joined, weighed and counted: rows B5.1 to B5.26."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

RECORD, PACKED = "theory.routing.record", "theory.routing.packed_rows"
PAYLOADS = "theory.routing.payloads"

RECORDS = (
    Mutant(
        "dense_layers_are_counted",
        "B5.2",
        "A payload over all decoder layers is read as if its first columns were the MoE layers.",
        "slime #819",
        (Edit(f"{PAYLOADS}:_columns", "names = range(L)", "return list(range(len(kept)))"),),
        "payload_is_cut_by_layer_number",
    ),
    Mutant(
        "any_layer_count_is_taken",
        "B5.2",
        "A payload over neither the MoE layers nor all layers is cut to fit instead of refused.",
        "slime #819, verl #5452",
        (Edit(f"{PAYLOADS}:_columns", "elif num_decoder_layers == L:", "elif num_decoder_layers is not None:"),),
        "odd_layer_counts_are_refused",
    ),
    Mutant(
        "stage_takes_the_first_layers",
        "B5.2",
        "A pipeline stage is given the first columns of the record rather than those of its own layers.",
        "verl #5452",
        (
            Edit(
                f"{RECORD}:RoutingRecord._ids",
                "[self.layer_numbers.index(n) for n in layers]",
                "list(range(len(layers)))",
            ),
        ),
        "a_stage_has_its_own_columns",
    ),
    Mutant(
        "first_row_is_dropped_for_the_last",
        "B5.3",
        "Where an engine gives a row too many, the first one is dropped: all routes move by one token.",
        "slime #1045, verl align_r3",
        (Edit(f"{PAYLOADS}:_drop_trailing_rows", "payload[: S - 1]", "payload[len(payload) - (S - 1) :]"),),
        "trailing_row_is_dropped",
    ),
    Mutant(
        "lost_rows_are_let_through",
        "B5.3",
        "A record with fewer rows than input tokens is taken as it is.",
        "sglang #20964",
        (
            Edit(
                f"{PAYLOADS}:_drop_trailing_rows",
                "if S < 1 or len(payload) not in (S - 1, S):",
                "if S < 1 or len(payload) > S:",
            ),
        ),
        "other_row_counts_are_refused",
    ),
    Mutant(
        "filler_counts_as_agreement",
        "B5.3",
        "Metrics compare rows that nobody recorded as if both records had chosen the same filler.",
        "verl, comment on metrics of expert 0",
        (Edit("theory.routing.measures:_d", "(b_KM[0] == MISSING)] = MISSING", "(b_KM[0] == MISSING)] = 0"),),
        "measures_are_the_papers",
    ),
    Mutant(
        "padding_is_expert_0",
        "B5.4",
        "A padded record holds id 0 in every slot, which reads as expert 0 chosen K times.",
        "verl #4986, slime #941, #1052",
        (Edit(f"{RECORD}:RoutingRecord.padded", "MISSING)", "0)"),),
        "records_round_trip",
    ),
    Mutant(
        "repeated_ids_are_accepted",
        "B5.4",
        "A row that names one expert twice is accepted; dispatchers collapse it and lose a slot.",
        "verl #4986",
        (
            Edit(
                f"{RECORD}:RoutingRecord._bad",
                "ids_rLK[..., k] <= ids_rLK[..., k - 1]",
                "ids_rLK[..., k] < ids_rLK[..., k - 1]",
            ),
        ),
        "bad_ids_are_found",
    ),
    Mutant(
        "unfilled_layers_are_accepted",
        "B5.8",
        "A capturer that was bound too early leaves zeros, which are replayed as expert 0 on every row.",
        "vLLM #33013, slime's validator",
        (Edit(f"{PAYLOADS}:_check_all_zero", "if bool(dead.any()):", "if False:"),),
        "unfilled_layers_are_refused",
    ),
    Mutant(
        "native_rows_are_not_counted",
        "B5.11",
        "Rows whose routes were lost are routed naturally, and nothing says how many.",
        "vLLM #39917",
        (Edit(f"{RECORD}:RoutingRecord.num_missing_rows", "int((~self.row_mask).sum())", "0"),),
        "records_round_trip",
    ),
    Mutant(
        "selection_drops_the_record",
        "B5.15",
        "A list of allowed fields leaves the routes out on the way from the rollout to the trainer.",
        "NeMo-RL #2849, slime #1909",
        (Edit("theory.rollouts:Rollouts.select", "experts=None if self.experts is None else", "experts=None and"),),
        "every_field_is_carried",
    ),
    Mutant(
        "concatenation_drops_the_record",
        "B5.15",
        "Joining groups of responses keeps tokens and forgets routes.",
        "slime #1145",
        (
            Edit(
                "theory.rollouts:Rollouts.concat",
                "RoutingRecord.concat(experts) if len(experts) == len(parts) else None",
                "None",
            ),
        ),
        "every_field_is_carried",
    ),
    Mutant(
        "replay_without_routes_is_natural",
        "B5.15",
        "With the flag on and no routes in the data, training continues with natural routing.",
        "slime #1909, miles #407",
        (
            Edit(
                "theory.old_pass:_require_inputs",
                "if passes.records_rollout and rollouts.experts is None:",
                "if False:",
            ),
            Edit("theory.old_pass:old_pass", "if passes.records_old and cached is None:", "if False:"),
            Edit("theory.old_pass:_routing", 'if passes.old == "replay_rollout":', "if rollouts.experts is not None:"),
            Edit("theory.old_pass:old_pass", 'if passes.gradient == "natural":', "if cached is None:"),
        ),
        "replay_without_a_record_is_refused",
    ),
    Mutant(
        "scores_are_zero_off_the_live_top_k",
        "B5.17",
        "Replayed weights are gathered from scores that were zeroed outside the live top-k: exact zeros, no gradient.",
        "Megatron-LM fork #79, correcting #49",
        (
            Edit(
                "theory.routing.gates:_weights",
                "weights_NK = scores_NE.gather(1, experts_NK)",
                "s, top = scores_NE, scores_NE.topk(experts_NK.shape[1], -1).indices; "
                "zeroed = s if gate.order == 'after' else torch.zeros_like(s).scatter(1, top, s.gather(1, top)); "
                "weights_NK = zeroed.gather(1, experts_NK)",
            ),
        ),
        "gradients_reach_a_replayed_set",
    ),
    Mutant(
        "replayed_weights_are_constants",
        "B5.17",
        "The weights of replayed experts are taken off the graph: the router never learns.",
        "no thread: what R3 Eq. 8 is there to avoid",
        (Edit("theory.routing.gates:weigh", "_choosing(logits_NE, gate)", "_choosing(logits_NE, gate).detach()"),),
        "gradients_reach_a_replayed_set",
        ("replay_changes_no_bit",),
    ),
    Mutant(
        "routes_are_padded_to_another_width",
        "B5.18",
        "Routes are padded to their own longest response, tokens to a rounded width: rows go to other tokens.",
        "verl #5989, #5283, slime #2175",
        (Edit(f"{PACKED}:flat_rows", ")) * width", ")) * max(num_rows_B)"),),
        "records_round_trip",
        ("rows_stand_where_tokens_stand",),
    ),
    Mutant(
        "window_is_off_by_one",
        "B5.18",
        "A sequence-parallel rank's window of rows begins one row late.",
        "verl #7106, #7786, #7805",
        (Edit(f"{RECORD}:RoutingRecord._ids", "self.offsets[which_Q] + from_Q", "self.offsets[which_Q] + from_Q + 1"),),
        "windows_partition_the_rows",
    ),
    Mutant(
        "last_sequence_overwrites_the_others",
        "B5.19",
        "In a packed batch every sequence writes from row 0 on: only the last one's routes are left.",
        "Megatron-LM fork #217",
        (Edit(f"{PACKED}:flat_rows", ")) * width", ")) * 0"),),
        "recorded_rows_are_used",
    ),
    Mutant(
        "selection_repeats_the_first_response",
        "B5.19",
        "Splitting a packed record into micro-batches gives each of them the rows from the front.",
        "Megatron-LM fork #217",
        (Edit(f"{PACKED}:selected_rows", "offsets[which], ", "offsets[: len(indices)], "),),
        "records_split_and_join",
    ),
    Mutant(
        "r2_replays_the_rollout",
        "B5.21",
        "R2 without an old pass replays what the engine recorded: the first mini-batch is no longer untouched.",
        "verl #7805 (R2 with bypass mode)",
        (
            Edit(
                "theory.old_pass:old_pass",
                'rollouts.experts if passes.gradient == "replay_rollout" else scores.experts',
                "rollouts.experts",
            ),
        ),
        "modes_cache_their_own_routes",
    ),
    Mutant(
        "bias_weighs",
        "B5.22",
        "The load-balancing bias, made for the choice alone, also enters the weights of the experts.",
        "prime-rl #2953, DeepSeek-V3's convention",
        (
            Edit(
                "theory.routing.gates:route",
                "_weights(scores_NE, experts_NK, gate)",
                "_weights(_choosing(logits_NE if selection_bias_E is None else logits_NE + selection_bias_E, gate), "
                "experts_NK, gate)",
            ),
        ),
        "bias_chooses_and_does_not_weigh",
    ),
    Mutant(
        "ids_take_eight_bytes",
        "B5.23",
        "Ids are kept in the type that top-k returns: eight times the memory and the traffic.",
        "slime #2384, prime-rl #2796, NeMo-RL #3292",
        (Edit(f"{RECORD}:index_dtype", "(torch.int8, torch.int16, torch.int32)", "(torch.int64,)"),),
        "ids_are_narrow",
    ),
    Mutant(
        "ids_are_unsigned_bytes",
        "B5.24",
        "Ids are unsigned bytes: -1 becomes 255, and 256 experts do not fit.",
        "verl #7407, NeMo-RL #3113",
        (Edit(f"{RECORD}:index_dtype", "(torch.int8, torch.int16", "(torch.uint8, torch.int16"),),
        "ids_are_narrow",
        ("records_round_trip",),
    ),
    Mutant(
        "ids_wrap_before_the_check",
        "B5.24",
        "Ids are narrowed before their range is checked: expert 264 of 300 becomes expert 8.",
        "verl #7407",
        (
            Edit(
                f"{PAYLOADS}:_narrow",
                "_COMPARABLE.get(payload.dtype, payload.dtype)",
                "index_dtype(num_experts)",
            ),
        ),
        "bad_ids_are_found",
    ),
)
