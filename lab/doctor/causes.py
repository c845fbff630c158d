"""The causes the doctor knows: for each the rule that weighs its evidence, the plain words, and the fix.

A rule maps the clues to a weight in [0, 1]; `over(x, t)` is 1/2 at its threshold t. Rules run in order, and a later
cause cannot explain what an earlier one has explained: a strength is a weight times the share still unexplained.
Faults of the tokens, which explain no gap (`explains`), leave that share as it is.
Thresholds are dimensionless ratios where possible; docs/doctor.md counts how often they are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.doctor import words
from lab.doctor.words import Seen


@dataclass(frozen=True)
class Cause:
    """One possible fault: `title` ends the sentence "It looks like ..."; `shows` names the clues to print."""

    name: str
    title: str
    rule: Callable[[Seen], float]
    words: Callable[[Seen], str]
    fix: str
    shows: tuple[str, ...]
    explains: bool = True
    """Whether it explains the gap of the log-probabilities; a fault of the tokens leaves that gap to later causes."""


REPEATED = 0.25
"""Factor on the routers' evidence, in [0, 1], where all deviations repeat: such routers do not err by chance."""


def over(x: float | None, threshold: float | int, power: float | int = 4) -> float:
    """x^power / (x^power + threshold^power) for x > 0: 1/2 at the threshold; 0 for x <= 0 and for no data."""
    if x is None or x <= 0:
        return 0.0
    # (threshold / x)^power would overflow for tiny x. A nan (rho_z where a ratio is infinite) fails both comparisons,
    # and counts as no evidence.
    return 1 / (1 + (threshold / x) ** power) if (x > threshold * 1e-6) else 0.0


def under(x: float | None, threshold: float | int, power: float | int = 4) -> float:
    """1 - over(x): 1 well below the threshold; 0 for no data."""
    return 0.0 if x is None else 1 - over(x, threshold, power)


def _unrelated(seen: Seen) -> float:
    """Other weights may correlate as little, but they give the same deviation in the same context."""
    # Without repeated contexts nothing speaks against unrelated values.
    is_new = over(seen["noise_share"], 0.3) if "noise_share" in seen else 1.0
    return under(max(seen.get("correlation", 1.0), 0.0), 0.5, 12) * is_new


def _cut_off(seen: Seen) -> float:
    return under(seen.get("end_share"), 0.1)


def _route_record(seen: Seen) -> float:
    """Log-probabilities agree far better than routes: the recorded rows are not the ones that ran."""
    share = over(seen.get("router_disagreement"), 0.02) * under(seen.get("k3_kl", 1.0), 1e-7)
    # Rows that fit a neighbour's better are misplaced, however large the gap of the log-probabilities.
    moved = over(seen.get("row_shift_gain"), 1.5) * over(seen.get("router_disagreement"), 0.1)
    return max(share, moved, over(seen.get("unrecorded_share"), 0.02))


def _mask(seen: Seen) -> float:
    # Two policies over the same tokens have a mean ratio of 1, however one-sided the gaps of a sample are.
    return over(seen.get("one_sided"), 0.9, 20) * over(abs(seen.get("rho_z", 0.0)), 5)


def _temperature(seen: Seen) -> float:
    """A slope well below 1/2 comes from nearly unrelated logits, not from a temperature above 2."""
    slope = seen.get("logit_slope", 1.0)
    return over(seen.get("logit_fit"), 0.6, 6) * over(abs(slope - 1), 0.03) * over(slope, 0.5, 8)


def _large(seen: Seen) -> float:
    """Whether the gap is too large for FP8 per channel, so that rounding alone does not explain it."""
    return over(seen.get("size"), words.COARSE, 8)


def _routed(seen: Seen) -> float:
    """Whether a large gap comes through the routers, as replay showed; 0 where it was not tried."""
    return over(seen.get("replay_removes"), words.CAUSED, 8) * _large(seen)


def _wrong_weights(seen: Seen) -> float:
    """Logits are off by whole units, by the same amount in the same context, even where the policy is sure.

    A policy gradient leaves sure tokens alone, and no rounding moves logits that far.
    """
    score = seen.get("size", 0.0) * seen.get("sure_ratio", 0.6)
    return over(score, 0.75) * under(seen.get("noise_share", 0.0), 0.3) * (1 - _routed(seen))


def _sharper(seen: Seen) -> float:
    """Tokens are likelier than the distribution that scored them allows."""
    # Without entropies there is no surprise; repeats among draws from one context serve instead.
    return over(-seen["surprise_z"] if "surprise_z" in seen else seen.get("collision_z"), 3.0, 8)


def _sampler_mask(seen: Seen) -> float:
    # Top-p and min-p remove the tail and a temperature thins it; top-k >= 2 removes the third token, not the second.
    tail = seen.get("tail_share")
    return _sharper(seen) * (0.5 if tail is None else max(under(tail, 0.09), over(tail, 0.65, 8)))


def _sampler_temperature(seen: Seen) -> float:
    tail = seen.get("tail_share")
    return _sharper(seen) * (0.5 if tail is None else over(tail, 0.09) * under(tail, 0.65, 8))


def _nothing(seen: Seen) -> float:
    # Equal bits say nothing about the distribution that tokens were drawn from, nor about tokens that are missing.
    return float(seen.get("exact_share") == 1) * (1 - _sharper(seen)) * (1 - _cut_off(seen))


def _switched(seen: Seen) -> float:
    return over(seen.get("jump"), 0.6, 6) if seen.get("jump_at", 0) > 0 else 0.0


def _routing(seen: Seen) -> float:
    """Routers differ more often than the logits' deviation explains; more so if the differences do not repeat.

    The rate that rounding causes depends on the model (0.24 to 2 per unit on the two tried). Where a token's deviation
    repeats with its context, the engine is a function of the context and no router errs by chance: then only routers
    that differ four times as often count as more than rounding.

    Where replay was tried, it decides on large gaps. Small ones it leaves to these clues: rounding before the routers
    comes through them, too.

    Without the experts of both sides, errors by chance alone can be seen: see `_jumps`.
    """
    noise = seen.get("noise_share")
    factor = 1.0 if noise is None else REPEATED + (1 + noise - REPEATED) * over(noise, 0.05)
    found = max(over(seen.get("flips_per_size", 0.0) * factor, 0.65, 5), _jumps(seen))
    if "replay_removes" in seen:
        found = found * (1 - _large(seen)) + _routed(seen)
    return found


def _jumps(seen: Seen) -> float:
    """Jumps of what does not repeat in the same context: most draws are as they were, few are far off.

    On the models that set the thresholds the tail was 6.8 and more for noise on routers, at most 5.2 for noise on
    logits beside rounding, and 7.7 beside old weights. Routers that err alike in the same context do not show.
    """
    if seen.get("is_dense"):
        return 0.0
    return over(seen.get("unrepeated_tail"), words.JUMPS, 8) * over(seen.get("noise_share"), 0.03)


def _stale(seen: Seen) -> float:
    """Logits move more, and each differing router comes with more KL, than where all weights are rounded alike.

    They move less where the policy is sure, as under a policy gradient. A handful of differing routers is no evidence.
    """
    is_repeated = under(seen.get("noise_share", 0.0), 0.3)
    if "flips_per_size" not in seen:
        # Without both sides' routes coarse rounding looks the same: as a rule old weights come second, with a strength
        # that is still named (NAMED in diagnosis.py).
        return 0.35 * over(seen.get("size"), 0.05) * is_repeated
    score = seen["kl_per_flip"] / max(seen["flips_per_size"], 1e-12) / max(seen.get("sure_ratio", 0.6), 1e-9)
    return over(score, 0.7, 2) * over(seen.get("num_flips"), 10) * is_repeated * (1 - _routed(seen))


def _precision(seen: Seen) -> float:
    # Too few tokens in doubt give no size: rounding then takes all that earlier causes leave.
    return 0.0 if seen.get("exact_share") == 1 else under(seen.get("size", 0.0), 0.6)


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
        "end_token", "responses without their end token", _cut_off, words.cut_off,
        "Keep the stop token in the sampled tokens (vLLM: include_stop_str_in_output; SGLang: no_stop_trim).",
        ("end_share",), explains=False,
    ),
    Cause(
        "zero_padded", "missing log-probabilities filled with zeros",
        lambda seen: over(seen.get("zero_share"), 0.01), words.padded,
        "Fill missing values with NaN, not 0 (probability 1), and mask those tokens; check that the engine returns one "
        "log-probability per token, also after preemption and for forced tokens.",
        ("zero_share", "zero_last_share"),
    ),
    Cause(
        "last_token", "a missing log-probability of the last token",
        lambda seen: over(seen.get("zero_last_share"), 0.4) * under(seen.get("zero_sure_share", 0.0), 0.1),
        words.unended,
        "Let the engine return the log-probability of the end token too (include the stop token in the output), or "
        "mask the last token on both sides.",
        ("zero_last_share", "zero_sure_share"),
    ),
    Cause(
        "shifted", "log-probabilities shifted by one token",
        lambda seen: over(seen.get("shift_gain"), 2.0),
        lambda seen: (f"log mu_t is {seen['shift_gain']:.3g} times closer to log old_(t{seen['shift']:+.0f}) than to "
                      "log old_t: one side is off by one."),
        "Logits at position t score token t + 1: check the slice [prompt - 1 : -1] on the side that was changed last.",
        ("shift", "shift_gain", "correlation"),
    ),
    Cause(
        "unrelated", "unrelated log-probabilities", _unrelated,
        lambda seen: (f"The two sides have correlation {seen.get('correlation', 0):.2g}: they do not score the same "
                      "tokens under nearly the same model."),
        "Check that both sides score the same responses in the same order, with the same chat template and weights.",
        ("correlation", "k3_kl"),
    ),
    Cause(
        "mask", "log-probabilities of a truncated distribution on one side", _mask, words.masked,
        "Sample untruncated, or keep the sampling mask and apply it on both sides. Log-probabilities of the truncated "
        "distribution (vLLM: logprobs_mode processed_logprobs) are right only then.",
        ("rho_mean", "rho_z", "one_sided"),
    ),
    Cause(
        "temperature", "log-probabilities at two temperatures", _temperature, words.scaled,
        "Divide the trainer's logits by the sampling temperature in every pass, and have the engine record "
        "log-probabilities at the same temperature (vLLM: logprobs_mode processed_logprobs); never change one side "
        "alone.",
        ("temperature", "logit_slope", "logit_fit", "rho_mean"),
    ),
    Cause(
        "wrong_weights", "weights that are not the trainer's", _wrong_weights, words.misplaced,
        "Compare the engine's weights with the trainer's, tensor by tensor, after a weight transfer: expert order, "
        "gate and up projections, scales of the routed experts, the checkpoint itself.",
        ("size", "sure_ratio", "noise_share", "correlation", "router_disagreement"),
    ),
    Cause(
        "sampler_mask", "sampling with unscored top-p, top-k or min-p", _sampler_mask, words.sharp,
        "Look for sampling defaults in the model folder (generation_config.json) and switch them off, or keep the mask "
        "and score with it.",
        ("surprise_gap", "surprise_z", "collision_z", "tail_share"), explains=False,
    ),
    Cause(
        "sampler_temperature", "sampling at an unscored temperature", _sampler_temperature, words.sharp,
        "Look for a temperature among the sampling defaults in the model folder (generation_config.json), and divide "
        "both sides' logits by the sampling temperature.",
        ("temperature", "surprise_gap", "surprise_z", "collision_z", "tail_share"), explains=False,
    ),
    Cause(
        "route_record", "a routing record that differs from the routes that ran", _route_record, words.recorded,
        "Check the capture: one row per input token (S - 1 rows), a buffer of its own for every layer, and rows for "
        "cached prefixes too; then replay is safe.",
        ("router_disagreement", "row_shift_gain", "unrecorded_share", "exact_share"),
    ),
    Cause(
        "nothing", "nothing wrong", _nothing,
        lambda seen: "Every log-probability has the same bits on both sides.",
        "No change is needed.",
        ("exact_share", "router_disagreement", "surprise_z"),
    ),
    Cause(
        "switched", "weights that changed mid-response", _switched, words.fell,
        "Abort and restart from the prompt with the new weights, or keep each segment's version and its own mu "
        "log-probabilities; a correction (Token-TIS, IcePop) bounds the remaining gap.",
        ("jump", "jump_at", "k3_kl"),
    ),
    Cause(
        "routing", "routers that choose other experts", _routing, words.routers,
        "Replay the routes (R3: mu's experts in the trainer; R2 or Pr2 where the target must not move), or compute the "
        "router in float32 on both sides.",
        (
            "replay_removes", "router_disagreement", "flips_per_size", "flip_share_of_kl", "noise_share",
            "unrepeated_tail",
        ),
    ),
    Cause(
        "stale", "weights of another version", _stale, words.behind,
        "Push the weights, score one batch again before any update, and check that the gap vanishes; where the lag is "
        "intended (asynchronous training), correct it by importance weights and log the version lag.",
        ("size", "sure_ratio", "kl_per_flip", "flips_per_size", "noise_share"),
    ),
    Cause(
        "precision", "different arithmetic for the same weights", _precision, words.small,
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
