"""Bugs in ratios, bounds, stopped gradients, and in whose log-probabilities are whose; rows C as of corrections."""

from __future__ import annotations

from tests.mutants.mutant import Absent, Edit, Mutant

FIXES = "theory.objectives.corrections"
OBJECTIVE = "theory.objectives.objective:Objective"
CALL = f"{OBJECTIVE}.__call__"
REGIONS = "theory.objectives.trust_regions.ratio_bounds"

OBJECTIVES = (
    Mutant(
        "weight_is_upside_down",
        "C",
        "The weight is mu/old: it doubles the engine gap instead of taking it out.",
        "sign conventions of k1 differ between verl and AReaL",
        (Edit(f"{OBJECTIVE}._log_ratios", "log_ratio(numerator_BT, mu_BT)", "log_ratio(mu_BT, numerator_BT)"),),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "ratio_is_counted_twice",
        "C",
        "A weight on pi/mu is combined with an objective that multiplies by pi/old itself.",
        "no thread: verl's bypass and decoupled modes mixed up",
        (
            Edit(
                "theory.objectives.composition:Composition.__post_init__",
                'if self.correction.numerator == "pi" and self.trust_region.weight_ratio == "old/mu":',
                "if False:",
            ),
        ),
        "the_ratio_is_counted_once",
    ),
    Mutant(
        "second_clip_ignores_the_sign",
        "C",
        "Dual clip's bound c stops a token whatever the sign of its advantage.",
        "no thread: 1912.09729 read without its case A < 0",
        (
            Edit(
                "theory.objectives.presets.dual_clip:DualClip.clipped",
                "((advantages_B1 < 0) & (ratio_BT > self.clip_ratio_c))",
                "(ratio_BT > self.clip_ratio_c)",
            ),
        ),
        "bounds_are_their_formulas",
    ),
    Mutant(
        "second_clip_has_no_value",
        "C",
        "Where c binds the term is that of PPO's upper bound, and not c A.",
        "no thread: a clip that is flat at another height",
        (
            Edit(
                "theory.objectives.presets.dual_clip:DualClip.held",
                "below_c_BT = ratio_BT.clamp(self.low, self.clip_ratio_c)",
                "below_c_BT = super().held(tokens, ratio_BT, advantages_B1)",
            ),
        ),
        "dual_clip_is_its_formula",
    ),
    Mutant(
        "gap_goes_without_the_ratio",
        "C",
        "MiniRL's weight is built on old/mu alone, and pi/old is left out of it.",
        "no thread: MiniRL Eq. 7 read without Eq. 5",
        (
            Edit(
                "theory.objectives.objective:Objective._term",
                "weight if ratio_in_weight else weight * Factor.exp(log_ratio_BT)",
                "weight",
            ),
        ),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "weight_carries_a_gradient",
        "C",
        "The importance weight is not stopped: the gradient of w A log pi has a second term.",
        "no thread: MiniRL Eq. 7 without its sg[.]",
        (
            Edit(
                CALL,
                "sampled = Tokens(_on(is_response_BT, logp_pi_BT.detach())",
                "sampled = Tokens(_on(is_response_BT, logp_pi_BT)",
            ),
            Edit(
                "theory.objectives.trust_regions.base:score",
                "linear(times(weight_BT, advantages_B1), logp_pi_BT)",
                "weight_BT * advantages_B1 * logp_pi_BT",
            ),
        ),
        "what_is_stopped_has_no_derivative",
    ),
    Mutant(
        "stop_is_a_mask",
        "C",
        "Tokens that MiniRL's M_t stops leave the denominator too.",
        "no thread: MiniRL Eq. 7 read as a mask",
        (
            Edit(
                CALL,
                "return ObjectiveOutput(self.aggregation(term_BT, kept_BT, totals), metrics)",
                "kept_BT = kept_BT & (term_BT != 0)\n"
                "    return ObjectiveOutput(self.aggregation(term_BT, kept_BT, count(kept_BT)), metrics)",
            ),
        ),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "clip_is_optimistic",
        "C",
        "PPO's bound takes the larger of the clipped and the free term.",
        "no thread: PPO Eq. 7 misread",
        (Edit(f"{REGIONS}:held_ratio", "region.clipped(tokens, ratio_BT, a", "region.clipped(tokens, ratio_BT, -a"),),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "stop_ignores_the_advantages_sign",
        "C",
        "Tokens beyond a bound are stopped even where their gradient leads back.",
        "no thread: MiniRL Eq. 7 misread",
        (
            Edit(
                f"{REGIONS}:RatioBounds.clipped", "(advantages_B1 > 0) & (ratio_BT > self.high)", "ratio_BT > self.high"
            ),
        ),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "cispo_weight_carries_a_gradient",
        "C.13",
        "CISPO's clipped weight is not stopped; inside its bounds the gradient has a second term.",
        "symptom of MiniMax-M1 #31",
        (
            Edit(
                f"{REGIONS}:WeightClip.term",
                "score(clipped.value_BT, advantages_B1, tokens.logp_pi_BT)",
                "weight.value_BT * log_ratio_BT.exp().clamp(self.low, self.high) * advantages_B1 * tokens.logp_pi_BT",
            ),
        ),
        "gradients_are_score_function_forms",
    ),
    Mutant(
        "divergence_mask_stops_the_way_back",
        "C.13",
        "Tokens that are too far from mu are stopped whichever way A pushes them, so that nothing brings them back.",
        "symptom of MiniMax-M1 #31; DPPO Eq. 12",
        (
            Edit(
                "theory.objectives.trust_regions.divergence_masks:DivergenceMask.clipped",
                "far_BT & up_BT & (advantages_B1 > 0)",
                "far_BT & (advantages_B1 > 0)",
            ),
        ),
        "what_leads_back_is_never_stopped",
        ("bounds_are_their_formulas",),
    ),
    Mutant(
        "unsampled_tokens_enter_the_minimum",
        "C.19",
        "In a minimum over a prefix's ratios a tool's token counts as a ratio of 1.",
        "vime #70, for MinPRO",
        (
            Edit(
                f"{FIXES}.weights:MinPRO._log_weight",
                "torch.where(is_response_BT, log_gap_BT, math.inf)",
                "log_gap_BT",
            ),
        ),
        "weights_are_their_formulas",
    ),
    Mutant(
        "old_is_refreshed_every_minibatch",
        "C.5",
        "Mini-batches after the first take pi's own log-probs for old's: every ratio is 1 and nothing is ever clipped.",
        "verl #6280 (the converse), TRL's on-policy shortcut",
        (
            Edit(
                "sandbox.training.engine:SandboxTrainingEngine.update",
                "minibatch.logp_old_BT[chosen, :width],",
                "forward.logp_BT.detach(),",
            ),
        ),
        "old_stays_old",
    ),
    Mutant(
        "unsampled_tokens_are_trained_on",
        "C.19",
        "Tokens that mu did not sample have log-prob 0 and pass for tokens of probability 1.",
        "vime #70",
        (
            Edit(
                "theory.rollouts:_token_batch",
                "[r.is_response for r in responses]",
                "[torch.ones_like(r.is_response) for r in responses]",
            ),
        ),
        "padding_keeps_the_holes",
    ),
    Mutant(
        "missing_log_probs_are_0",
        "C.19",
        "Where the engine returned no log-probs for its tokens they are taken to be 0.",
        "vime #70",
        (
            Edit(
                "scaled.vllm_engine.requests:Request.add",
                "if completion.logprobs is None:",
                "if completion.logprobs is None:\n"
                "            self.tokens += new\n"
                "            self.logp += [0.0] * len(new)\n"
                "            new, completion.logprobs = [], []\n"
                "        elif False:",
            ),
        ),
        "tokens_come_with_their_log_probs",
    ),
    Mutant(
        "log_probs_of_other_tokens",
        "C.20",
        "Log-probs and tokens of different lengths are paired from the front without a word.",
        "Megatron-LM #6044 (returned silently)",
        (
            Edit(
                "scaled.vllm_engine.requests:Request.add",
                "zip(new, completion.logprobs, strict=True)",
                "zip(new, completion.logprobs)",
            ),
        ),
        "tokens_come_with_their_log_probs",
    ),
    Mutant(
        "raw_log_probs",
        "C.7",
        "The engine reports log-probs before temperature, where the trainer's are after it.",
        "verl #6240, TRL #6789, prime-rl #2600",
        (
            Edit(
                "sandbox.engines.engine:SandboxEngine.scored",
                "tempered(logits_AV, temperature)",
                "logits_AV",
            ),
        ),
        "log_probs_are_tempered",
        ("scored_is_drawn",),
    ),
    Mutant(
        "the_trainer_scores_at_one",
        "C.7",
        "The trainer scores at temperature 1 the tokens that were drawn and reported at another.",
        "verl #6240, TRL #6789, prime-rl #2600 (the converse)",
        (
            Edit(
                "sandbox.training.head:_scores",
                "numerics=numerics), temperature)",
                "numerics=numerics), 1.0)",
            ),
        ),
        "log_probs_are_tempered",
        ("the_gradient_is_unbiased_at_a_temperature",),
    ),
    Mutant(
        "nobody_scores_at_the_temperature",
        "C.7",
        "Tokens are drawn at a temperature, and mu, old and pi are all scored at 1: equal to the bit, and biased.",
        "no thread: found by comparison with verl and TRL",
        (Edit("theory.temperature:tempered", "if temperature == 1:", "if True:"),),
        "scored_is_drawn",
        ("passes_are_tempered",),
    ),
    Mutant(
        "tail_is_dropped",
        "C",
        "Score centering by the likeliest tokens takes what they leave of mu for nothing.",
        "no thread: the tail of arXiv 2609.20807 left out",
        (
            Edit(
                "theory.objectives.centering:centering_term",
                "C_BTK = C_BTK - each_BTJ[..., -1:] * (pi_BTJ[..., :-1] - pi_BTJ[..., -1:]).exp()",
                "pass",
            ),
        ),
        "equal_engines_need_no_centering",
    ),
    Mutant(
        "centering_ignores_the_weight",
        "C",
        "The expectation that is taken off has no weight where the sampled token's term has one.",
        "no thread: arXiv 2609.20807 composed with a weight by hand",
        (
            Edit(
                "theory.objectives.objective:Objective.centering_of",
                "weight = self._weight(log_gap_Bt.detach(), log_rho_Bt, there_Bt, there_Bt)",
                "weight = self._weight(torch.zeros_like(log_gap_Bt).detach(), log_rho_Bt, there_Bt, there_Bt)",
            ),
        ),
        "centred_scores_have_mean_0",
    ),
    Mutant(
        "centering_has_the_other_sign",
        "C",
        "What centering takes off is added: the drift is doubled.",
        "no thread: a loss taken for an objective",
        (Edit("theory.objectives.centering:centering_term", "return -linear", "return linear"),),
        "centred_scores_have_mean_0",
    ),
    Mutant(
        "record_mixes_up_its_ids",
        "C",
        "The ids of mu's likeliest tokens are sorted, their log-probs are not.",
        "no thread: ids and log-probs from two sorts",
        (
            Edit(
                "theory.top_tokens:TopTokens.of",
                "TopTokens.packed(ids.to(id_dtype(V)), logp, offsets, V)",
                "TopTokens.packed(ids.sort(1).values.to(id_dtype(V)), logp, offsets, V)",
            ),
        ),
        "the_record_is_mu",
        ("the_trainer_scores_the_record",),
    ),
    Mutant(
        "parts_lose_their_temperature",
        "C.7",
        "A selection of the responses forgets the temperature that they were sampled at: mini-batches train at 1.",
        "no thread: a field left out of a copy",
        (Edit("theory.rollouts:Rollouts.select", "temperature=self.temperature", "temperature=1.0"),),
        "rollouts_keep_their_temperature",
    ),
    Mutant(
        "last_token_is_left_out",
        "C",
        "The last sampled token (the stop token) is outside the mask: the policy never learns to stop.",
        "no thread: off by one",
        (
            Edit(
                "theory.rollouts:_token_batch",
                "[r.is_response for r in responses]",
                "[r.is_response & (torch.arange(len(r.tokens)) < len(r.tokens) - 1) for r in responses]",
            ),
        ),
        "padding_keeps_the_holes",
    ),
    Mutant(
        "logits_of_the_token_itself",
        "C",
        "A token's log-prob is read from the row of the token instead of the row before it.",
        "no thread: off by one",
        (Edit("theory.rollouts:TokenBatch.predicting_row_BT", "device) - 1", "device)"),),
        "exact_engine_is_the_trainer",
    ),
    Mutant(
        "two_experts_are_swapped",
        "C.22",
        "Two experts' weights are exported under each other's name: 25 times the discrepancy, and a clean audit.",
        "verl #7986",
        (
            Edit(
                "sandbox.model.checkpoint:to_hf",
                "yield name,",
                'yield name.replace(".0.gate", ".#.gate").replace(".1.gate", ".0.gate").replace(".#.gate", ".1.gate"),',
            ),
        ),
        "exported_weights_are_the_policy",
    ),
)

ABSENT = (
    Absent(
        "C.7", "Truncated sampling (top-p, top-k) leaves the importance ratio off by the kept mass.",
        "TRL #6789, TRL #7269",
        "the sandbox samples from the whole distribution; with vLLM log-probs are asked for unprocessed, "
        "and truncated sampling is the config's own choice (tests/scaled/test_vllm_engine.py)",
    ),
    Absent(
        "C.22", "A change of the scale's format or source in a quantised engine goes unnoticed.",
        "prime-rl #3112, xtuner #2044",
        "quantised formats are compared with a reference on real vLLM (tests/scaled/test_vllm_quantize.py); here they "
        "are defects by intent, and rollout_corr/k3_kl measures them",
    ),
    Absent(
        "C.12", "Discrepancy grows although engines hold the same weights, with no cause found.",
        "Precision-RL #10, NeMo-RL #4243", "no known root cause that could be built",
    ),
)  # fmt: skip
