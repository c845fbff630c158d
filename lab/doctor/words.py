"""The doctor's plain words: one function a cause whose sentences depend on what was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping

Seen = Mapping[str, float]
"""The clues by name."""


HARMLESS = 1e-6
"""A k3 KL below this, nats per token, is of rounding that no update is moved by."""
COARSE = 0.2
"""A deviation of a logit from which on formats coarser than FP8 look like other weights (docs/doctor.md)."""
WHOLE_UNITS = 2.0
"""A deviation of a logit that no format reached: NVFP4 comes to 1 on the models of the thresholds."""


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.3g} %"


def masked(seen: Seen) -> str:
    """A distribution cut off on one side."""
    side = "mu's" if seen["rho_mean"] < 1 else "old's"
    other = "old's" if side == "mu's" else "mu's"
    mass = min(seen["rho_mean"], 1 / seen["rho_mean"])
    return (
        f"{side} log-probabilities are hardly ever below {other}, and the mean ratio is {mass:.4g} where two policies "
        f"over the same tokens give 1: {side} are of a distribution cut to about {share(mass)} of its mass (top-p, "
        "top-k, min-p)."
    )


def scaled(seen: Seen) -> str:
    """Two temperatures."""
    return (
        f"logit(mu) = {seen['logit_slope']:.3g} logit(old) explains {share(seen['logit_fit'])} of what differs: "
        "the sides divide their logits by temperatures whose ratio, old's over mu's, is that slope."
        f"{_at_one(seen)}"
    )


def _at_one(seen: Seen) -> str:
    """The side that left out the recorded temperature, where the slope says it: 1/T or T, within a third of log T."""
    T, slope = seen.get("temperature", 1.0), seen["logit_slope"]
    if T == 1 or slope <= 0:
        return ""
    off = {side: abs(math.log(slope) - sign * math.log(T)) for side, sign in (("old", -1), ("mu", 1))}
    side = min(off, key=lambda name: off[name])
    if off[side] > abs(math.log(T)) / 3:
        return ""
    who = "the trainer scores" if side == "old" else "the engine writes down log-probabilities"
    return f" Tokens were sampled at {T:.3g}, and {who} at 1."


def sharp(seen: Seen) -> str:
    """Tokens from a sharper distribution than the scored one."""
    known = "surprise_gap" in seen
    gap = f"by {-seen['surprise_gap']:.2g} nats per token " if known else ""
    left = (
        f" Of the unlikely tokens that should be there, {share(seen['tail_share'])} are."
        if "tail_share" in seen
        else ""
    )
    return (
        f"Tokens are {gap}likelier than the distribution they are scored under makes them: they were drawn from a "
        f"sharper one, and the importance ratio does not know it.{left}"
    )


def small(seen: Seen) -> str:
    """Rounding."""
    if "router_disagreement" not in seen:
        routes = "The trace has not both sides' experts, so routers cannot be cleared."
    elif seen.get("num_flips", 0) == 0:
        routes = "No router differs: what differs comes after the last one, or is too small to move any."
    else:
        routes = (
            f"{share(seen['router_disagreement'])} of the routers differ with it, as they would from rounding, and "
            f"{share(seen.get('flip_share_of_kl', 0))} of the KL sits on their tokens: replay takes that part out."
        )
    harmless = " At this size it is harmless." if seen["k3_kl"] < HARMLESS else ""
    repeat = seen.get("noise_share")
    again = ""
    if repeat is not None:
        again = " The same context gives the same deviation again" if repeat < 0.3 else " It is another one each time"
        again += "." if repeat < 0.3 else " the same context is met: noise."
    return f"A logit is off by {seen.get('size', 0):.2g} as a rule. {routes}{again}{harmless}"


def routers(seen: Seen) -> str:
    """Routers by themselves."""
    return (
        f"{share(seen['router_disagreement'])} of the routers choose other experts, more than logits that are off by "
        f"{seen['size']:.2g} explain; {share(seen.get('flip_share_of_kl', 0))} of the KL is on tokens whose own "
        "experts differ."
    )


def behind(seen: Seen) -> str:
    """Other weights."""
    return (
        f"A logit is off by {seen.get('size', 0):.2g}, always by the same in the same context, less where the "
        "policy is sure, and few routers differ for that: these are other weights, not the same ones rounded."
        f"{_or_coarse(seen)}"
    )


def misplaced(seen: Seen) -> str:
    """Weights in the wrong place, or on the wrong scale."""
    routes = ""
    if seen.get("num_flips") == 0:
        routes = " No router differs, so the weights before the last router are right."
    return (
        f"A logit is off by {seen.get('size', 0):.2g} as a rule, also where the policy is sure, and always by the same "
        "in the same context: more than rounding or some updates do. Matrices stand in the wrong place or on the wrong "
        f"scale, or the engine has another checkpoint.{routes}{_or_coarse(seen)}"
    )


def _or_coarse(seen: Seen) -> str:
    """A cause that one step cannot tell from other weights: a format of the weights coarser than FP8 per channel."""
    if not COARSE <= seen.get("size", 0.0) < WHOLE_UNITS:
        return ""
    return (
        " Weights or activations in a format coarser than FP8 with a scale per channel (UE8M0 scales, MXFP8, NVFP4, "
        "INT4) can look the same at this size: if either side uses one, score the batch with bf16 weights first; a gap "
        "that falls then is the format's."
    )


def fell(seen: Seen) -> str:
    """Weights that changed in mid-response."""
    return (
        f"From position {seen['jump_at']:.0f} of the responses on, deviations are smaller by a factor of "
        f"{2.718281828 ** min(seen['jump'], 20):.2g}, on all prompts: the weights changed in mid-response."
    )


def recorded(seen: Seen) -> str:
    """A record that is not what was run."""
    if seen.get("unrecorded_share", 0) > 0.02:
        return f"mu's experts are missing in {share(seen['unrecorded_share'])} of the (row, layer) pairs that old has."
    moved = " Shifted by one row they agree better." if seen.get("row_shift_gain", 0) > 1 else ""
    return (
        f"Log-probabilities agree while {share(seen['router_disagreement'])} of the routers are said to differ: the "
        f"experts written down are not those that were run.{moved}"
    )


def padded(seen: Seen) -> str:
    """Zeros for missing values."""
    return (
        f"On {share(seen['zero_share'])} of the tokens that one side finds unlikely the other's log-probability is "
        "exactly 0 (probability 1): missing values were filled in."
    )


def unended(seen: Seen) -> str:
    """A zero for the last token alone."""
    return (
        f"On {share(seen['zero_last_share'])} of the last tokens one side is exactly 0, and hardly elsewhere: the end "
        "token's value is missing and was padded."
    )


def cut_off(seen: Seen) -> str:
    """No end token."""
    return (
        f"Only {share(seen['end_share'])} of the responses that ended by themselves have an end token: it was cut off, "
        "and stopping is never trained."
    )
