"""The doctor's plain words: a function for each cause whose sentences depend on the clues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Seen = Mapping[str, float]
"""The clues by name."""


HARMLESS = 1e-6
"""k3 KL, in nats per token, below which rounding does not move an update."""
COARSE = 0.2
"""Deviation of a logit, in logit units, above which formats coarser than FP8 look like other weights."""
WHOLE_UNITS = 2.0
"""Deviation of a logit that no format reached; NVFP4 reaches 1 on the models that set the thresholds."""
ALL_TOKENS = 0.9
"""Share of tokens with a differing router above which the KL on them says nothing. At half of Qwen3-30B-A3B's depth it
is 0.97 in BF16, where R3 removes 93% of the KL, and 1 with FP8 weights, where it removes 46% (docs/on-gpu.md)."""

JUMPS = 7.5
"""Tail of what does not repeat in the same context, as a multiple of its median, above which single routers err."""
CAUSED = 0.5
"""Share of the k3 KL, without its largest 0.5 %, that replay removes from which on a large gap comes through the
routers. On two models of width 104 and 52 it was 0.53 to 0.86 for noise of 0.1 and more, at most 0.44 for all else."""


def plain(value: Any) -> Any:
    """The same for JSON, which has neither NaN nor infinity: null for a number that is not finite."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.3g} %"


def counted(num: int, what: str, plural: str = "s") -> str:
    """A number of things: 1 step, 2,000 steps."""
    return f"{num:,} {what}{'' if num == 1 else plural}"


def masked(seen: Seen) -> str:
    """Words for a distribution truncated on one side."""
    # A truncated side divides by the mass that it keeps, so its probabilities are the larger ones; rho is old/mu.
    side = "mu's" if seen["rho_mean"] < 1 else "old's"
    other = "old's" if side == "mu's" else "mu's"
    # It is 0 in float64 where old is over 745 nats below mu on every token, as a filler for -inf may be.
    mass = min(seen["rho_mean"], 1 / max(seen["rho_mean"], 1e-300))
    return (
        f"{side} log-probabilities are hardly ever below {other}, and the mean ratio is {mass:.4g} where two policies "
        f"over the same tokens give 1: {side} distribution is truncated to about {share(mass)} of its mass (top-p, "
        "top-k, min-p)."
    )


def scaled(seen: Seen) -> str:
    """Words for two temperatures."""
    return (
        f"logit(mu) = {seen['logit_slope']:.3g} logit(old) explains {share(seen['logit_fit'])} of the difference: "
        "the sides divide their logits by temperatures whose ratio, old's over mu's, is that slope."
        f"{_at_one(seen)}"
    )


def _at_one(seen: Seen) -> str:
    """Names the side that ignored the recorded temperature T, if the slope is 1/T or T within a third of log T."""
    T, slope = seen.get("temperature", 1.0), seen["logit_slope"]
    if T == 1 or slope <= 0:
        return ""
    off = {side: abs(math.log(slope) - sign * math.log(T)) for side, sign in (("old", -1), ("mu", 1))}
    side = min(off, key=lambda name: off[name])
    if off[side] > abs(math.log(T)) / 3:
        return ""
    who = "the trainer scores" if side == "old" else "the engine records log-probabilities"
    return f" Tokens were sampled at temperature {T:.3g}, and {who} at 1."


def sharp(seen: Seen) -> str:
    """Words for tokens from a sharper distribution than the scored one."""
    known = "surprise_gap" in seen
    gap = f"by {-seen['surprise_gap']:.2g} nats per token " if known else ""
    left = (
        f" {share(seen['tail_share'])} of the expected number of unlikely tokens occur." if "tail_share" in seen else ""
    )
    return (
        f"Tokens are {gap}likelier than under the distribution that scores them: they were drawn from a sharper one, "
        f"which the importance ratio ignores.{left}"
    )


def small(seen: Seen) -> str:
    """Words for rounding."""
    if seen.get("is_dense"):
        routes = "The model has no routers."
    elif seen.get("is_replayed"):
        routes = "The trainer replayed mu's experts: no route differs."
    elif "router_disagreement" not in seen:
        routes = "The trace lacks the experts of one side or both, so routers cannot be ruled out."
    elif seen.get("num_flips", 0) == 0:
        routes = "No router differs: the difference arises after the last one, or is too small to change a route."
    else:
        routes = (
            f"{share(seen['router_disagreement'])} of the routers differ too, as they would from rounding, and "
            f"{share(seen.get('flip_share_of_kl', 0))} of the KL is on their tokens: replay removes that part."
        )
    harmless = " At this size it is harmless." if seen["k3_kl"] < HARMLESS else ""
    repeat = seen.get("noise_share")
    again = ""
    if repeat is not None:
        again = f" The same context gives {'the same' if repeat < 0.3 else 'another'} deviation each time"
        again += "." if repeat < 0.3 else ": noise."
    return f"A logit is typically off by {seen.get('size', 0):.2g}. {routes}{again}{harmless}"


def routers(seen: Seen) -> str:
    """Words for routers that err on their own, or that replay found to cause the gap."""
    if "router_disagreement" not in seen:
        return f"{_jump(seen)} The dump lacks the experts of one side or both, which would show them."
    if "replay_removes" in seen:
        return (
            f"{share(seen['router_disagreement'])} of the routers choose other experts. With mu's, "
            f"{share(seen['replay_removes'])} of the KL is gone."
        )
    is_jump = seen.get("unrepeated_tail", 0.0) >= JUMPS
    more = f", more than a logit deviation of {seen.get('size', 0):.2g} explains" if not is_jump else ""
    found = (
        f"{share(seen['router_disagreement'])} of the routers choose other experts{more}; "
        f"{share(seen.get('flip_share_of_kl', 0))} of the KL is on tokens whose own experts differ."
    )
    found += f" {_jump(seen)}" if is_jump else ""
    tokens = seen.get("flip_token_share", 0)
    if tokens < ALL_TOKENS:
        return found
    return (
        f"{found} But {share(tokens)} of all tokens have such experts, so this does not say how much of the KL replay "
        "would remove: score the batch again under replay (`firstorder ladder` does)."
    )


def _jump(seen: Seen) -> str:
    return (
        f"In the same context {share(1 - seen.get('noise_share', 0))} of the squared deviation repeats. The rest jumps "
        f"(its 99 % quantile is {seen.get('unrepeated_tail', 0):.3g} times its median, 3.8 for normal noise), as where "
        "single routers choose other experts."
    )


def behind(seen: Seen) -> str:
    """Words for weights of another version."""
    return (
        f"A logit is off by {seen.get('size', 0):.2g}, by the same amount in the same context and by less where the "
        "policy is sure, and few routers differ for that size: these are other weights, not the same ones rounded."
        f"{_or_coarse(seen)}"
    )


def misplaced(seen: Seen) -> str:
    """Words for weights in the wrong place or on the wrong scale."""
    routes = ""
    if seen.get("num_flips") == 0:
        routes = " No router differs, so the weights before the last router are right."
    return (
        f"A logit is typically off by {seen.get('size', 0):.2g}, even where the policy is sure, and by the same amount "
        "in the same context: more than rounding or a few updates cause. Matrices are in the wrong place or on the "
        f"wrong scale, or the engine has another checkpoint.{routes}{_or_coarse(seen)}"
    )


def _or_coarse(seen: Seen) -> str:
    """Words for a cause that one step cannot tell from other weights: a format coarser than FP8 per channel."""
    if not COARSE <= seen.get("size", 0.0) < WHOLE_UNITS:
        return ""
    return (
        " Weights or activations in a format coarser than FP8 with a scale per channel (UE8M0 scales, MXFP8, NVFP4, "
        "INT4) can look the same at this size: if either side uses one, score the batch with bf16 weights first. If "
        "the gap shrinks, the format causes it."
    )


def fell(seen: Seen) -> str:
    """Words for weights that changed mid-response."""
    return (
        f"From position {seen['jump_at']:.0f} of the responses on, deviations are smaller by a factor of "
        f"{math.exp(min(seen['jump'], 20)):.2g} on all prompts: the weights changed mid-response."
    )


def recorded(seen: Seen) -> str:
    """Words for a routing record that differs from the routes that ran."""
    moved = " Shifted by one row they agree better." if seen.get("row_shift_gain", 0) > 1 else ""
    agree = "Log-probabilities agree although " if seen["k3_kl"] < HARMLESS else ""
    return (
        f"{agree}{share(seen['router_disagreement'])} of the recorded routers differ: the recorded experts are not "
        f"the ones that ran.{moved}"
    )


def padded(seen: Seen) -> str:
    """Words for missing values filled with zeros."""
    return (
        f"On {share(seen['zero_share'])} of the tokens that one side finds unlikely, the other's log-probability is "
        "exactly 0 (probability 1): missing values were filled with zeros."
    )


def unended(seen: Seen) -> str:
    """Words for a zero at the last token alone."""
    return (
        f"On {share(seen['zero_last_share'])} of the last tokens, and hardly elsewhere, one side is exactly 0: the end "
        "token's value was missing and was padded with 0."
    )


def cut_off(seen: Seen) -> str:
    """Words for missing end tokens."""
    return (
        f"Only {share(seen['end_share'])} of the responses that ended on their own have an end token: it was cut off, "
        "and the policy never learns to stop."
    )
