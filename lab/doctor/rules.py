"""The rules that weigh the evidence for each cause: from the clues to a weight in [0, 1].

`over(x, t)` is 1/2 at its threshold t. Thresholds are dimensionless ratios where possible; docs/doctor.md counts how
often they are right.
"""

from __future__ import annotations

from lab.doctor import words
from lab.doctor.words import Seen

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


def unrelated(seen: Seen) -> float:
    """Other weights may correlate as little, but they give the same deviation in the same context."""
    # Without repeated contexts nothing speaks against unrelated values.
    is_new = over(seen["noise_share"], 0.3) if "noise_share" in seen else 1.0
    return under(max(seen.get("correlation", 1.0), 0.0), 0.5, 12) * is_new


def cut_off(seen: Seen) -> float:
    """Hardly any response that ended on its own has an end token."""
    return under(seen.get("end_share"), 0.1)


def route_record(seen: Seen) -> float:
    """Log-probabilities agree far better than routes: the recorded rows are not the ones that ran."""
    share = over(seen.get("router_disagreement"), 0.02) * under(seen.get("k3_kl", 1.0), 1e-7)
    # Rows that fit a neighbour's better are misplaced, however large the gap of the log-probabilities.
    moved = over(seen.get("row_shift_gain"), 1.5) * over(seen.get("router_disagreement"), 0.1)
    return max(share, moved)


def missing_rows(seen: Seen) -> float:
    """mu lacks rows that old has."""
    # A record that is a row late also lacks each response's last row.
    return over(seen.get("unrecorded_share"), 0.02) * (1 - route_record(seen))


def mask(seen: Seen) -> float:
    """Two policies over the same tokens have a mean ratio of 1, however one-sided the gaps of a sample are."""
    return over(seen.get("one_sided"), 0.9, 20) * over(abs(seen.get("rho_z", 0.0)), 5)


def temperature(seen: Seen) -> float:
    """A slope well below 1/2 comes from nearly unrelated logits, not from a temperature above 2."""
    slope = seen.get("logit_slope", 1.0)
    return over(seen.get("logit_fit"), 0.6, 6) * over(abs(slope - 1), 0.03) * over(slope, 0.5, 8)


def _large(seen: Seen) -> float:
    """Whether the gap is too large for FP8 per channel, so that rounding alone does not explain it."""
    return over(seen.get("size"), words.COARSE, 8)


def _routed(seen: Seen) -> float:
    """Whether a large gap comes through the routers, as replay showed; 0 where it was not tried."""
    return over(seen.get("replay_removes"), words.CAUSED, 8) * _large(seen)


def wrong_weights(seen: Seen) -> float:
    """Logits are off by whole units, by the same amount in the same context, even where the policy is sure.

    A policy gradient leaves sure tokens alone, and no rounding moves logits that far.
    """
    score = seen.get("size", 0.0) * seen.get("sure_ratio", 0.6)
    return over(score, 0.75) * under(seen.get("noise_share", 0.0), 0.3) * (1 - _routed(seen))


def _sharper(seen: Seen) -> float:
    """Tokens are likelier than the distribution that scored them allows."""
    # Without entropies there is no surprise; repeats among draws from one context serve instead.
    return over(-seen["surprise_z"] if "surprise_z" in seen else seen.get("collision_z"), 3.0, 8)


def sampler_mask(seen: Seen) -> float:
    """Top-p and min-p remove the tail and a temperature thins it; top-k from 2 on keeps the second token."""
    tail = seen.get("tail_share")
    return _sharper(seen) * (0.5 if tail is None else max(under(tail, 0.09), over(tail, 0.65, 8)))


def sampler_temperature(seen: Seen) -> float:
    """The tail is thinned, neither removed nor left."""
    tail = seen.get("tail_share")
    return _sharper(seen) * (0.5 if tail is None else over(tail, 0.09) * under(tail, 0.65, 8))


def nothing(seen: Seen) -> float:
    """Equal bits; they say nothing about the distribution that tokens were drawn from, nor about what is missing."""
    is_exact = float(seen.get("exact_share") == 1)
    return is_exact * (1 - _sharper(seen)) * (1 - cut_off(seen)) * (1 - missing_rows(seen))


def switched(seen: Seen) -> float:
    """Deviations fall from a position on, after the first."""
    return over(seen.get("jump"), 0.6, 6) if seen.get("jump_at", 0) > 0 else 0.0


def routing(seen: Seen) -> float:
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
    if seen.get("is_dense") or seen.get("is_replayed"):
        return 0.0
    return over(seen.get("unrepeated_tail"), words.JUMPS, 8) * over(seen.get("noise_share"), 0.03)


def stale(seen: Seen) -> float:
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


def precision(seen: Seen) -> float:
    """Small deviations; too few tokens in doubt give no size, and all that earlier causes leave is rounding."""
    return 0.0 if seen.get("exact_share") == 1 else under(seen.get("size", 0.0), 0.6)
