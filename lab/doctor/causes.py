"""The causes the doctor knows: for each the rule that weighs its evidence (rules.py), the plain words, and the fix.

Rules run in order, and a later cause cannot explain what an earlier one has explained: a strength is a weight times the
share still unexplained. Faults of the tokens, which explain no gap (`explains`), leave that share as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.doctor import rules, words
from lab.doctor.words import Seen


@dataclass(frozen=True)
class Cause:
    """One possible fault: `title` ends the sentence "It looks like ..."; `shows` names the clues to print."""

    name: str
    title: str
    rule: Callable[[Seen], float]
    words: Callable[[Seen], str]
    fix: str
    shows: tuple[str, ...] = ()
    explains: bool = True
    """Whether it explains the gap of the log-probabilities; a fault of the tokens leaves that gap to later causes."""


CAUSES: tuple[Cause, ...] = (
    Cause(
        "not_finite", "log-probabilities that are NaN or infinite",
        lambda seen: float(seen.get("nonfinite_share", 0) > 0),
        lambda seen: f"{words.share(seen['nonfinite_share'])} of the log-probabilities are NaN or infinite.",
        "Find the first one: -inf for a sampled token means that one side masks tokens the other samples.",
        ("nonfinite_share",),
    ),
    # Before every cause of a gap: none of them says anything about how responses end.
    Cause(
        "end_token", "responses without their end token", rules.cut_off, words.cut_off,
        "Keep the stop token in the sampled tokens (vLLM: include_stop_str_in_output; SGLang: no_stop_trim).",
        ("end_share",), explains=False,
    ),
    Cause(
        "zero_padded", "missing log-probabilities filled with zeros",
        lambda seen: rules.over(seen.get("zero_share"), 0.01), words.padded,
        "Fill missing values with NaN, not 0 (probability 1), and mask those tokens; check that the engine returns one "
        "log-probability per token, also after preemption and for forced tokens.",
        ("zero_share", "zero_last_share"),
    ),
    Cause(
        "last_token", "a missing log-probability of the last token",
        lambda seen: rules.over(seen.get("zero_last_share"), 0.4) * rules.under(seen.get("zero_sure_share", 0.0), 0.1),
        words.unended,
        "Let the engine return the log-probability of the end token too (include the stop token in the output), or "
        "mask the last token on both sides.",
        ("zero_last_share", "zero_sure_share"),
    ),
    Cause(
        "shifted", "log-probabilities shifted by one token",
        lambda seen: rules.over(seen.get("shift_gain"), 2.0),
        lambda seen: (f"log mu_t is {seen['shift_gain']:.3g} times closer to log old_(t{seen['shift']:+.0f}) than to "
                      "log old_t: one side is off by one."),
        "Logits at position t score token t + 1: check the slice [prompt - 1 : -1] on the side that was changed last.",
        ("shift", "shift_gain", "correlation"),
    ),
    Cause(
        "unrelated", "unrelated log-probabilities", rules.unrelated,
        lambda seen: (f"The two sides have correlation {seen.get('correlation', 0):.2g}: they do not score the same "
                      "tokens under nearly the same model."),
        "Check that both sides score the same responses in the same order, with the same chat template and weights.",
        ("correlation", "k3_kl"),
    ),
    Cause(
        "mask", "log-probabilities of a truncated distribution on one side", rules.mask, words.masked,
        "Sample untruncated, or keep the sampling mask and apply it on both sides. Log-probabilities of the truncated "
        "distribution (vLLM: logprobs_mode processed_logprobs) are right only then.",
        ("rho_mean", "rho_z", "one_sided"),
    ),
    Cause(
        "temperature", "log-probabilities at two temperatures", rules.temperature, words.scaled,
        "Divide the trainer's logits by the sampling temperature in every pass, and have the engine record "
        "log-probabilities at the same temperature (vLLM: logprobs_mode processed_logprobs); never change one side "
        "alone.",
        ("temperature", "logit_slope", "logit_fit", "rho_mean"),
    ),
    Cause(
        "wrong_weights", "weights that are not the trainer's", rules.wrong_weights, words.misplaced,
        "Compare the engine's weights with the trainer's, tensor by tensor, after a weight transfer: expert order, "
        "gate and up projections, scales of the routed experts, the checkpoint itself.",
        ("size", "sure_ratio", "noise_share", "correlation", "router_disagreement"),
    ),
    Cause(
        "sampler_mask", "sampling with unscored top-p, top-k or min-p", rules.sampler_mask, words.sharp,
        "Look for sampling defaults in the model folder (generation_config.json) and switch them off, or keep the mask "
        "and score with it.",
        ("surprise_gap", "surprise_z", "collision_z", "tail_share"), explains=False,
    ),
    Cause(
        "sampler_temperature", "sampling at an unscored temperature", rules.sampler_temperature, words.sharp,
        "Look for a temperature among the sampling defaults in the model folder (generation_config.json), and divide "
        "both sides' logits by the sampling temperature.",
        ("temperature", "surprise_gap", "surprise_z", "collision_z", "tail_share"), explains=False,
    ),
    Cause(
        "route_record", "a routing record that differs from the routes that ran", rules.route_record, words.recorded,
        "Check the capture: one row per input token (S - 1 rows), a buffer of its own for every layer, and rows for "
        "cached prefixes too; then replay is safe.",
        ("router_disagreement", "row_shift_gain", "unrecorded_share", "exact_share"),
    ),
    Cause(
        "missing_rows", "a routing record that lacks rows", rules.missing_rows,
        lambda seen: (f"mu's experts are missing in {words.share(seen['unrecorded_share'])} of the (row, layer) pairs "
                      "that old has. All other clues on routers are of the rest."),
        "Find the tokens without routes from the engine (cached prefixes, preempted requests, tool outputs): replay "
        "cannot cover them.",
        ("unrecorded_share",), explains=False,
    ),
    Cause(
        "nothing", "nothing wrong", rules.nothing,
        lambda seen: "Every log-probability has the same bits on both sides.",
        "No change is needed.",
        ("exact_share", "router_disagreement", "surprise_z"),
    ),
    Cause(
        "switched", "weights that changed mid-response", rules.switched, words.fell,
        "Abort and restart from the prompt with the new weights, or keep each segment's version and its own mu "
        "log-probabilities; a correction (Token-TIS, IcePop) bounds the remaining gap.",
        ("jump", "jump_at", "k3_kl"),
    ),
    Cause(
        "routing", "routers that choose other experts", rules.routing, words.routers,
        "Replay the routes (R3: mu's experts in the trainer; R2 or Pr2 where the target must not move), or compute the "
        "router in float32 on both sides.",
        (
            "replay_removes", "router_disagreement", "flips_per_size", "flip_share_of_kl", "noise_share",
            "unrepeated_tail",
        ),
    ),
    Cause(
        "stale", "weights of another version", rules.stale, words.behind,
        "Push the weights, score one batch again before any update, and check that the gap vanishes; where the lag is "
        "intended (asynchronous training), correct it by importance weights and log the version lag.",
        ("size", "sure_ratio", "kl_per_flip", "flips_per_size", "noise_share"),
    ),
    Cause(
        "precision", "different arithmetic for the same weights", rules.precision, words.small,
        "Raise the precision of the engine or lower the trainer's to match (same formats, same order of summation); "
        "leave the remaining gap to a correction (Token-TIS, IcePop).",
        ("k3_kl", "extreme_frac_tau2", "size", "router_disagreement", "flip_share_of_kl", "noise_share"),
    ),
)  # fmt: skip
"""Every cause, in the order in which their rules run."""

UNKNOWN = Cause(
    "unknown", "an unknown cause", lambda seen: 1.0,
    lambda seen: "No rule explains these numbers.",
    "Score one batch twice with the same engine, then change one thing at a time.",
    ("k3_kl", "extreme_frac_tau2", "size", "correlation"),
)  # fmt: skip
