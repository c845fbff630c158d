"""Replay bugs in how a pass binds routes to routers, uses them and lets go of them: rows B5.1 to B5.26.

What a record may hold is in catalogue_records.py, what an engine captures in catalogue_capture.py. References are
issues and pull requests of the public projects.
"""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

PASS = "theory.routing.replay:ReplayContext"

REPLAY = (
    Mutant(
        "record_reaches_no_router",
        "B5.1",
        "Targets go to the routers of a discarded decoder, so that every pass routes naturally without a word.",
        "verl #7340, miles #2570",
        (Edit(f"{PASS}._chosen", "experts_NK = self._replayed(", "_ = self._replayed("),),
        "recorded_rows_are_used",
    ),
    Mutant(
        "orphaned_router_goes_unnoticed",
        "B5.1",
        "A layer that never asks for its routes fails nothing: the model's router is not the one that was bound.",
        "verl #7340",
        (Edit(f"{PASS}.__exit__", "if absent:", "if absent and False:"),),
        "each_layer_is_routed_once",
    ),
    Mutant(
        "layers_bound_by_order",
        "B5.2",
        "Targets are handed out in the order in which routers ask, not by the router's number.",
        "verl #5452, #5037",
        (
            Edit(
                f"{PASS}._chosen",
                "self.plan.record.layer(layer_number)",
                "self.plan.record.experts[:, len(self._experts)]",
            ),
        ),
        "recorded_rows_are_used",
    ),
    Mutant(
        "padded_rows_all_go_to_one_expert",
        "B5.4",
        "Rows of the padding are dispatched to expert 0 in every slot instead of to distinct experts.",
        "slime #941, NeMo-RL #3208",
        (Edit(f"{PASS}._replayed", "natural_NK.clone()", "torch.zeros_like(natural_NK)"),),
        "recorded_rows_are_used",
    ),
    Mutant(
        "missing_rows_are_dispatched",
        "B5.4",
        "The marker of a missing row is used as the id of an expert (-1 is the last one).",
        "sglang #36404, SkyRL #1908",
        (Edit(f"{PASS}._replayed", "recorded_RK[:, 0] >= 0", "recorded_RK[:, 0] >= -1"),),
        "recorded_rows_are_used",
    ),
    Mutant(
        "second_writer_wins",
        "B5.10",
        "A draft or prediction head that names its layer 0 overwrites the route of the model's own layer 0.",
        "vLLM #48622, sglang #26980",
        (
            Edit(
                f"{PASS}._check_use",
                "if self._recomputed is None and layer_number in self._experts:",
                "if False:",
            ),
        ),
        "each_layer_is_routed_once",
    ),
    Mutant(
        "recomputation_routes_anew",
        "B5.16",
        "Activation recomputation asks the live router again, and a near tie falls the other way.",
        "Automodel #3156, Megatron-core's design note",
        (
            Edit(
                f"{PASS}._chosen",
                "return self._experts[layer_number].to(torch.int64)",
                "return gates.select(logits_NE, num_slots, gate, selection_bias_E)",
            ),
        ),
        "recomputed_routes_cannot_flip",
        ("recomputation_changes_no_gradient",),
    ),
    Mutant(
        "recomputation_pops_in_forward_order",
        "B5.16",
        "Backward recomputes the last layer first and is given the first layer's routes.",
        "AReaL #1166, verl replay_backward_list",
        (
            Edit(
                f"{PASS}._chosen",
                "return self._experts[layer_number].to(torch.int64)",
                "return list(self._experts.values())[len(self._recomputed) - 1].to(torch.int64)",
            ),
        ),
        "recomputation_changes_no_gradient",
    ),
    Mutant(
        "recomputation_routes_padding_anew",
        "B5.16",
        "Only the rows of responses are held for recomputation; those of the padding may flip.",
        "Automodel #3156",
        (
            Edit(
                f"{PASS}._chosen",
                "return self._experts[layer_number].to(torch.int64)",
                "again = gates.select(logits_NE, num_slots, gate, selection_bias_E)\n"
                "        again[self._rows_R] = self._experts[layer_number].to(torch.int64)[self._rows_R]\n"
                "        return again",
            ),
        ),
        "recomputed_routes_cannot_flip",
    ),
    Mutant(
        "failed_pass_leaves_its_routes",
        "B5.16",
        "A forward that ended in an exception leaves its queue behind for the next pass to consume.",
        "SkyRL #1908",
        (Edit(f"{PASS}.__exit__", "if kind is not None:", "if kind is not None and False:"),),
        "a_pass_lives_once",
    ),
    Mutant(
        "pass_is_used_again",
        "B5.16",
        "A closed pass may be entered again, so that a forward-only pass feeds the update after it.",
        "SkyRL #1908",
        (Edit(f"{PASS}.__enter__", 'if self._state != "new":', 'if self._state == "open":'),),
        "a_pass_lives_once",
    ),
    Mutant(
        "row_counts_are_not_compared",
        "B5.18",
        "A record whose responses have other lengths than the batch is laid over it without a check.",
        "verl #5891",
        (
            Edit(
                "theory.routing.passes:RoutingPlan.require_rows",
                "if self.record is not None and self.record.num_rows_B != num_rows_B:",
                "if False:",
            ),
        ),
        "sizes_must_fit",
    ),
    Mutant(
        "natural_routes_ignore_the_selection_bias",
        "B5.22",
        "Under replay the load-balancing bias is left out of the choice of natural rows.",
        "prime-rl #2953",
        (
            Edit(
                f"{PASS}._chosen",
                "natural_NK = gates.select(logits_NE, num_slots, gate, selection_bias_E)",
                "natural_NK = gates.select(logits_NE, num_slots, gate)",
            ),
        ),
        "a_pass_chooses_with_the_bias",
    ),
    Mutant(
        "predicted_routes_ignore_the_selection_bias",
        "B5.22",
        "The predicted choice leaves the load-balancing bias out.",
        "prime-rl #2953",
        (
            Edit(
                f"{PASS}._chosen",
                "experts_NK = gates.select(choosing_NE, num_slots, gate, selection_bias_E)",
                "experts_NK = gates.select(choosing_NE, num_slots, gate)",
            ),
        ),
        "a_pass_chooses_with_the_bias",
    ),
    Mutant(
        "shared_expert_takes_a_slot",
        "B5.25",
        "A record with the shared expert as one more slot is replayed by a router of fewer slots.",
        "sglang #36515",
        (
            Edit(
                f"{PASS}._check_use",
                "if record is not None and (record.num_experts, record.num_slots) != (E, num_slots):",
                "if False:",
            ),
        ),
        "sizes_must_fit",
    ),
    Mutant(
        "fused_router_bypasses_the_hook",
        "B5.26",
        "The model's router computes its own top-k and never asks the pass.",
        "verl dynamic-CP guard, AReaL #1496",
        (
            Edit(
                "sandbox.model.layers:ExpertMLP.forward",
                "shared.routing.route(",
                "__import__('theory.routing.replay', fromlist=['']).NaturalRouting().route(",
            ),
        ),
        "r3_uses_mus_experts",
    ),
)
