"""Value and gradient of every preset under every correction in extended numbers: a sign and a logarithm.

Nothing overflows here, and every case stands on its own line: a ratio with numerator 0 is 0, a product with a factor 0
is 0. Nothing here calls the code it describes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from theory.objectives import Objective

INF = math.inf
LARGEST = math.log(sys.float_info.max)
Logs = list[float]


def ratio(a: float, b: float) -> float:
    """log(a/b) of two log-probabilities."""
    if a == -INF:
        return -INF
    return INF if b == -INF else a - b


def product(*logs: float) -> float:
    """The logarithm of a product."""
    return -INF if -INF in logs else sum(logs)


def number(sign: float, log: float) -> float:
    """sign exp(log), or inf with that sign."""
    if sign == 0 or log == -INF:
        return 0.0
    return sign * (math.exp(log) if log < LARGEST else INF)


def log_of(x: float) -> float:
    return math.log(x) if x > 0 else -INF


# ---- corrections, on the log-gaps of one response --------------------------------------------------------------------


def weights(name: str, gap: Logs, p: dict[str, float]) -> Logs:
    """log w of each token."""
    T, cap = range(len(gap)), math.log(p.get("cap", INF))
    if name in ("none", "geo_rs", "k3_rs", "seq_max_k2", "seq_max_k3"):
        return [0.0 for _ in T]
    if name in ("token_clip", "seq_clip"):
        whole = gap if name == "token_clip" else [product(*gap)] * len(gap)
        return [min(max(x, log_of(p["lo"])), log_of(p["hi"])) for x in whole]
    if name == "token_k1":
        return [0.0 if log_of(p["lo"]) <= x <= log_of(p["hi"]) else -INF for x in gap]
    if name in ("token_k2", "token_k3"):
        return [0.0 if estimate(name[-2:], x) <= p[f"max_{name[-2:]}"] else -INF for x in gap]
    if name in ("token_is", "token_tis"):
        return [min(x, cap) for x in gap]
    if name == "prefix_tis":
        return [min(product(*gap[: t + 1]), cap) for t in T]
    if name == "minpro":
        return [min(product(gap[t], min(gap[:t], default=0.0)), cap) for t in T]
    if name in ("seq_tis", "seq_mis"):
        return [min(product(*gap), cap) for _ in T]
    assert name == "icepop"
    return [x if log_of(p["lo"]) <= x <= log_of(p["hi"]) else -INF for x in gap]


def estimate(name: str, x: float) -> float:
    """k2 or k3 of a log-gap."""
    if abs(x) == INF:
        return INF
    return x * x / 2 if name == "k2" else number(1, x) - 1 - x


def keeps(name: str, rho: Logs, p: dict[str, float]) -> bool:
    """Whether the response stays."""
    if name == "seq_mis":
        return log_of(p["lo"]) <= product(*rho) <= log_of(p["hi"])
    if name == "geo_rs":
        return log_of(p["lo"]) <= product(*rho) / len(rho) <= log_of(p["hi"])
    if name == "k3_rs":
        return sum(estimate("k3", x) for x in rho) / len(rho) <= p["max_k3"]
    if name in ("seq_max_k2", "seq_max_k3"):
        return max(estimate(name[-2:], x) for x in rho) <= p[f"max_{name[-2:]}"]
    return True


# ---- bounds ----------------------------------------------------------------------------------------------------------


def divergence(name: str, mu: float, pi: float, eps: float) -> float:
    """Of "this token or another", mu against pi; a rest is at least the resolution of the type."""
    if name != "dppo_kl":
        return abs(math.exp(pi) - math.exp(mu))
    rest_mu, rest_pi = (max(-math.expm1(x), eps) for x in (mu, pi))
    if mu == -INF:
        this = 0.0
    else:
        this = INF if pi == -INF else math.exp(mu) * (mu - pi)
    return this + rest_mu * math.log(rest_mu / rest_pi)


def stops(region, r: Logs, pi: Logs, mu: Logs, A: float, eps: float) -> list[bool]:
    """The tokens that the region stops, for a region that stops tokens."""
    if region.name in ("none", "weight_clip", "soft_gate", "gamma_kernel") or A == 0:
        return [False] * len(r)
    width = region.eps_high if A > 0 else region.eps_low
    if region.name in ("minirl_mask", "min_clip"):
        return [x > math.log1p(width) if A > 0 else x < log_of(1 - width) for x in r]
    if region.name == "dual_clip":
        c = math.log(region.clip_ratio_c)
        return [x > math.log1p(width) if A > 0 else x < log_of(1 - width) or x > c for x in r]
    if region.name == "sequence_mask":
        far = A < 0 and -product(*map(ratio, pi, mu)) / len(pi) > region.delta
        return [far or (x > math.log1p(width) if A > 0 else x < log_of(1 - width)) for x in r]
    if region.name == "geometric_clip":
        return [x > width if A > 0 else x < -width for x in r]
    if region.name == "sqrt_clip":
        c = [region.eps_c * math.sqrt(t + 1) for t in range(len(r))]
        w = [width * math.sqrt(t + 1) for t in range(len(r))]
        return [x > b if A > 0 else x < -b or x > a for x, b, a in zip(r, w, c, strict=True)]
    D = [divergence(region.name, m, p, eps) for m, p in zip(mu, pi, strict=True)]
    away = [p > m if A > 0 else p < m for m, p in zip(mu, pi, strict=True)]
    if region.name != "cppo":
        return [d > width and a for d, a in zip(D, away, strict=True)]
    left, T, result = 0.0, len(r), []
    for t in range(T):
        w = 1 - (1 - region.w_min) * t / (T - 1) if T > 1 else 1.0
        result.append(w * D[t] > width + min(0.0, left) and away[t])
        left += w * (region.delta_b - D[t])
    return result


# ---- one response, and a batch of them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extreme:
    """d J / d log pi of each token, and J's terms, as the equation has them."""

    gradient: list[list[float]]
    terms: list[float]


def _response(objective: Objective, pi: Logs, old: Logs, mu: Logs, A: float, eps: float) -> tuple[Logs, Logs]:
    """Terms and slopes of one response that is kept, before any denominator."""
    fix, region, T = objective.correction, objective.trust_region, len(pi)
    gap = [ratio(a, b) for a, b in zip(pi if fix.numerator == "pi" else old, mu, strict=True)]
    beside = [ratio(a, b) for a, b in zip(old, mu, strict=True)]
    w = [
        product(a, b)
        for a, b in zip(
            weights(fix.name, gap, vars(fix)),
            weights(objective.rejection.name, beside, vars(objective.rejection)),
            strict=True,
        )
    ]
    own = [ratio(a, b) for a, b in zip(pi, old, strict=True)]
    is_sequence = objective.ratio.name == "sequence_geometric"
    assert is_sequence or objective.ratio.name in ("token", "none", "prefix_product_token")
    r = [product(*own) / T] * T if is_sequence else own if objective.ratio.symbol else [0.0] * T
    if objective.ratio.name == "prefix_product_token":
        r = [product(*own[: t + 1]) for t in range(T)]
    stopped = stops(region, r, pi, mu, A, eps)
    sign, size = math.copysign(A != 0, A), log_of(abs(A))
    if region.name == "soft_gate":
        return _gate(region, w, r, A)
    if region.name == "geometric_clip":
        held = [(region.eps_high if A > 0 else -region.eps_low) if stopped[t] else r[t] for t in range(T)]
        value = [number(sign, product(x, product(*held) / T, size)) for x in w]
        return value, [0.0 if stopped[t] or A == 0 else sum(value) / T for t in range(T)]
    if region.name == "sqrt_clip":
        bounds = [region.eps_high if A > 0 else region.eps_c if r[t] > 0 else -region.eps_low for t in range(T)]
        held = [bounds[t] * math.sqrt(t + 1) if stopped[t] else r[t] for t in range(T)]
        value = [number(sign, product(w[t], held[t], size)) for t in range(T)]
        return value, [0.0 if stopped[t] else value[t] for t in range(T)]
    if region.name == "sequence_mask" and A < 0 and -product(*map(ratio, pi, mu)) / T > region.delta:
        return [0.0] * T, [0.0] * T
    if region.name in ("min_clip", "dual_clip", "sequence_mask"):
        is_dual = region.name == "dual_clip" and A < 0
        most = math.log(region.clip_ratio_c) if is_dual else math.log1p(region.eps_high)  # pyright: ignore
        held = [min(max(x, log_of(1 - region.eps_low)), most) for x in r]  # pyright: ignore
        value = [number(sign, product(w[t], held[t] if stopped[t] else r[t], size)) for t in range(T)]
        slope = [0.0 if stopped[t] else value[t] for t in range(T)]
        return value, [sum(slope) / T] * T if is_sequence else slope
    if region.name == "weight_clip":
        r = [min(max(x, log_of(1 - region.eps_low)), math.log1p(region.eps_high)) for x in r]  # pyright: ignore
    whole = w if fix.numerator == "pi" else [product(a, b) for a, b in zip(w, r, strict=True)]
    if region.name == "gamma_kernel":
        k, decay = (region.k_pos, region.lambda_pos) if A >= 0 else (region.k_neg, region.lambda_neg)
        log_W = product(*map(ratio, pi, mu))
        phi = product(k * log_W, -decay * (math.expm1(log_W) if log_W < LARGEST else INF))
        whole = [product(x, phi if phi > LEAST else -INF) for x in w]
    c = [-INF if stopped[t] else product(whole[t], size) for t in range(T)]
    # A coefficient that is too small for the type is 0, and then so is its term, also at log pi = -inf.
    least = math.log(2.0) * (-1075 if eps < 1e-10 else -150)
    value = [number(-sign, product(c[t], log_of(-pi[t]))) if c[t] > least else 0.0 for t in range(T)]
    return value, [number(sign, x) for x in c]


LEAST = -1e30
"""The logarithm below which the exponential is 0, also times infinity: no float holds such a logarithm of log(1/0)."""


def _gate(region, w: Logs, r: Logs, A: float) -> tuple[Logs, Logs]:
    """SAPO's terms and slopes: a gate of the ratio, flat where the ratio is far above 1."""
    sign, size = math.copysign(A != 0, A), log_of(abs(A))
    tau = region.tau_pos if A > 0 else region.tau_neg
    value, slope = [], []
    for x, weight in zip(r, w, strict=True):
        z = tau * (math.expm1(x) if x < LARGEST else INF)
        up, down = (-math.log1p(math.exp(-y)) if y > -700 else y for y in (z, -z))
        steep = product(math.log(4), up, down, x)
        value.append(number(sign, product(weight, math.log(4 / tau) + up, size)))
        slope.append(number(sign, product(weight, steep if steep > LEAST else -INF, size)))
    return value, slope


def reference(
    objective: Objective, rows: list[tuple[Logs, Logs, Logs]], advantages: list[float], eps: float
) -> Extreme:
    """The objective on responses of (pi, old, mu), their tokens alone; `eps` is the resolution of the arithmetic."""
    fixes = (objective.correction, objective.rejection)
    kept = [
        bool(pi) and all(keeps(x.name, [ratio(a, b) for a, b in zip(old, mu, strict=True)], vars(x)) for x in fixes)
        for pi, old, mu in rows
    ]
    is_mean, tokens = objective.aggregation.name == "length_norm", objective.aggregation.name == "token_mean"
    denominator = sum((len(row[0]) if tokens else 1) for row, k in zip(rows, kept, strict=True) if k)
    gradient, terms = [], []
    for row, A, k in zip(rows, advantages, kept, strict=True):
        value, slope = _response(objective, *row, A, eps) if k else ([], [0.0] * len(row[0]))
        scale = (len(row[0]) if is_mean else 1) * max(denominator, 1)
        gradient.append([x / scale for x in slope])
        terms += [x / scale for x in value]
    return Extreme(gradient, terms)
