"""Replay bugs in what an engine captures and in who consumes it, and the rows of the catalogue that have no place here.

Second part of rows B5.1 to B5.26: the sandbox's engines, and the parts of vLLM's adapter that need no vLLM.
"""

from __future__ import annotations

from tests.mutants.mutant import Absent, Edit, Mutant

ROLLOUTS = "sandbox.engines.rollouts:rollouts_of"
STORE = "scaled.vllm_engine.capture:RouteStore"
ROUTES = "scaled.vllm_engine.routes"
TRAINER = "sandbox.training.engine"

CAPTURE = (
    Mutant(
        "record_is_a_row_late",
        "B5.3",
        "The record's rows start at the second input token: each token replays its successor's route.",
        "slime #1045, verl align_r3",
        (Edit(ROLLOUTS, "buffers.experts_BWLK[is_row_BW]", "buffers.experts_BWLK.roll(-1, 1)[is_row_BW]"),),
        "exact_engine_is_the_trainer",
    ),
    Mutant(
        "prefill_loses_its_last_row",
        "B5.3",
        "The route of the last prompt token, computed by the prefill, is not kept.",
        "sglang #20964",
        (
            Edit(
                "sandbox.engines.prompt_pass:_store_routes",
                "(torch.arange(width) < counts_p[:, None])",
                "(torch.arange(width) < counts_p[:, None] - 1)",
            ),
        ),
        "exact_engine_is_the_trainer",
    ),
    Mutant(
        "lost_rows_become_expert_0",
        "B5.4",
        "Rows whose routes the engine lost are filled with zeros.",
        "sglang #36404 (ROCm fills 0, CUDA -1)",
        (Edit(f"{ROUTES}:unknown", "MISSING", "0"),),
        "cached_prefix_is_missing",
    ),
    Mutant(
        "one_row_is_repeated",
        "B5.5",
        "From the boundary of a prefill's chunk on, one row of the buffer is read again and again.",
        "sglang #36404 (67 times)",
        (
            Edit(
                f"{STORE}.add",
                "(start, experts_NLK[span].astype(self._dtype))",
                "(start, experts_NLK[span][:1].repeat(span.stop - span.start, 0).astype(self._dtype))",
            ),
        ),
        "the_last_run_of_a_row_wins",
    ),
    Mutant(
        "taken_routes_stay_behind",
        "B5.5",
        "A request's rows are not cleared when they are taken, and fill the gaps of the next of that name.",
        "sglang #36404",
        (Edit(f"{STORE}.take", "self._chunks.pop(name, [])", "self._chunks.get(name, [])"),),
        "taken_routes_are_forgotten",
    ),
    Mutant(
        "cached_prefix_has_no_routes",
        "B5.6",
        "Tokens found in the prefix cache are not run, and their routes are not looked up.",
        "vLLM #39568, #45635",
        (Edit(f"{STORE}.add", "if has_cache and start > 0 and", "if False and"),),
        "a_shared_block_brings_its_routes",
    ),
    Mutant(
        "cache_is_read_before_it_is_written",
        "B5.6",
        "A request that shares a block with another of the same step reads the slot's former routes.",
        "vLLM #56402, tpu-inference #3583",
        (
            Edit(
                f"{STORE}.add",
                "for name, start, span in step.spans():\n            self._cache",
                "for name, start, span in ():\n            self._cache",
            ),
        ),
        "a_shared_block_brings_its_routes",
    ),
    Mutant(
        "cached_routes_outlive_the_weights",
        "B5.6",
        "New weights are loaded and cached prefixes keep the routes of the old ones.",
        "vLLM #57025",
        (Edit(f"{STORE}.forget_cache", "self._cache_CLK.fill(MISSING)", "pass"),),
        "a_shared_block_brings_its_routes",
    ),
    Mutant(
        "omitted_prefix_shifts_the_rows",
        "B5.6",
        "A payload that starts after the cached prefix is laid down from row 0.",
        "vLLM #57966, sglang routed_experts_start_len",
        (Edit(f"{STORE}.add", "(start, experts_NLK[span]", "(0, experts_NLK[span]"),),
        "a_shared_block_brings_its_routes",
    ),
    Mutant(
        "last_stage_overwrites_the_first",
        "B5.9",
        "Every pipeline stage writes its routes to the same place: only the last stage's layers are left.",
        "vLLM #35623",
        (
            Edit(
                "sandbox.engines.buffers:Buffers.store",
                "torch.stack(recorder.experts, 1)",
                "torch.stack(recorder.experts[-1:] * len(recorder.experts), 1)",
            ),
        ),
        "exact_engine_is_the_trainer",
    ),
    Mutant(
        "first_run_of_a_row_wins",
        "B5.11",
        "A preempted request runs again, and the routes of its abandoned first run are kept.",
        "vLLM #39917, #39568",
        (Edit(f"{STORE}.take", "self._chunks.pop(name, [])", "reversed(self._chunks.pop(name, []))"),),
        "the_last_run_of_a_row_wins",
    ),
    Mutant(
        "overrun_rows_are_kept",
        "B5.12",
        "A scheduler that runs ahead runs a stopped request once more, and its surplus row is kept.",
        "vLLM #39917, #42434",
        (Edit(f"{STORE}.take", "experts[: max(0, num_rows - start)]", "experts"),),
        "the_last_run_of_a_row_wins",
    ),
    Mutant(
        "decoding_repeats_the_prompts_route",
        "B5.13",
        "The capture is not part of the replayed graph: every decoded token gets the route of the one before.",
        "sglang #12162",
        (
            Edit(
                "sandbox.engines.buffers:Buffers.store_steps",
                "self.experts_BWLK[rows[:, None], positions_An] = experts_nLAK.permute(2, 0, 1, 3)",
                "self.experts_BWLK[rows[:, None], positions_An] = experts_nLAK.permute(2, 0, 1, 3)\n"
                "    before_AnLK = self.experts_BWLK[rows[:, None], positions_An - 1]\n"
                "    self.experts_BWLK[rows[:, None], positions_An] = before_AnLK",
            ),
        ),
        "exact_engine_is_the_trainer",
    ),
    Mutant(
        "micro_batches_overwrite_each_other",
        "B5.19",
        "Of several micro-batches' routes only the last one's are kept.",
        "Megatron-LM fork #217",
        (Edit("sandbox.training.forward:BatchRoutes.add", "self.used.append(used)", "self.used[:] = [used]"),),
        "routes_do_not_know_micro_batches",
    ),
    Mutant(
        "reference_replays_the_last_record",
        "B5.20",
        "The reference model's pass consumes the routes that were meant for the policy.",
        "slime #1187, NeMo-RL #4083",
        (
            Edit(
                f"{TRAINER}:SandboxTrainingEngine.score",
                "whole = rollouts.padded()",
                "whole = rollouts.padded(); self.last = plan",
            ),
            Edit(
                f"{TRAINER}:SandboxTrainingEngine.score_reference",
                "NaturalRouting()",
                "self._context(whole, self.last, chosen).__enter__()",
            ),
        ),
        "reference_is_naturally_routed",
    ),
    Mutant(
        "predictor_stays_in_the_teacher",
        "C",
        "The predictor learns from logits that already hold its own bias.",
        "no thread: Pr2 Eq. 4 misread",
        (Edit("theory.old_pass:_features", "rollouts.features.minus_bias(handed)", "rollouts.features"),),
        "pr3_learns_from_unbiased_logits",
    ),
)

ABSENT = (
    Absent(
        "B5.7", "In hybrid attention the first cache group is not the attention's: routes of prompts are zeros.",
        "vLLM #35744, #37118",
        "no engine here has more than one kind of cache; with vLLM a prefix cache over several kinds is refused, "
        "and an unfilled layer is an error (unfilled_layers_are_accepted)",
    ),
    Absent(
        "B5.8", "Under expert load balancing the ids are those of physical experts.", "vLLM #33013",
        "experts are never replicated here; an id out of range or repeated is an error (bad_ids_are_found)",
    ),
    Absent(
        "B5.10", "The draft model's own routers are captured with the target's.", "vLLM #48622, slime #1131",
        "no draft models; what they would do to a pass is built as second_writer_wins",
    ),
    Absent(
        "B5.14", "A long prefill in one piece exceeds the capture buffer and crashes.", "sglang #26860",
        "the sandbox sizes its buffers by the request; vLLM's are sized by its largest step (tests/scaled)",
    ),
    Absent(
        "B5.23", "Routes as nested JSON cost a second a hop, and a copy on every rank exhausts the host.",
        "NeMo-RL #3292, slime #2384",
        "a cost and no wrong number: `firstorder plan` counts the payload; its type is built as ids_take_eight_bytes",
    ),
)  # fmt: skip
