"""Batches of sampled tokens, and one response of them as lists with the bounds of the trust regions by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from theory.objectives import Objective, ObjectiveOutput
from theory.streams import stream


@dataclass(frozen=True)
class Batch:
    """Ragged responses, with tokens in their middle that mu did not sample."""

    pi: Tensor
    old: Tensor
    mu: Tensor
    advantages: Tensor
    mask: Tensor

    def __call__(self, objective: Objective, **kwargs) -> ObjectiveOutput:
        return objective(self.pi, self.old, self.mu, self.advantages, self.mask, **kwargs)

    def gradient(self, objective: Objective, **kwargs) -> Tensor:
        return self.with_gradient(objective, **kwargs)[1]

    def with_gradient(self, objective: Objective, **kwargs) -> tuple[ObjectiveOutput, Tensor]:
        """The output and the gradient in pi, of one forward pass: under shape checks a pass is most of a law's time."""
        pi = self.pi.clone().requires_grad_()
        out = dataclasses.replace(self, pi=pi)(objective, **kwargs)
        out.objective.backward()
        assert pi.grad is not None
        return out, pi.grad

    def rows(self, index: Any) -> Batch:
        return Batch(*(x[index] for x in (self.pi, self.old, self.mu, self.advantages, self.mask)))


def make_batch(seed: int, staleness: float = 0.25, gap: float = 0.15, B: int = 6, T: int = 5) -> Batch:
    generator = stream(seed, "objectives")

    def noise() -> Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64)

    mask = torch.rand(B, T, generator=generator) < 0.75
    mask[:, 0] = True
    mu = -1.0 + 0.5 * noise()
    old = mu + gap * noise()
    pi = old + staleness * noise()
    return Batch(pi, old, mu, torch.randn(B, generator=generator, dtype=torch.float64), mask)


def log_gaps(batch: Batch) -> Tensor:
    return torch.where(batch.mask, batch.old - batch.mu, 0.0)


def approx(x: list[float], rel: float = 1e-11) -> object:
    # Sums of at most five float64 log-ratios under exp: relative errors of a few 1e-15, of 1e-13 at gaps of 250.
    return pytest.approx(x, rel=rel, abs=1e-14)


# ---- one response, as lists ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """The response tokens of one row: log-probabilities, the advantage, the correction's weight w, the whole weight."""

    pi: list[float]
    old: list[float]
    mu: list[float]
    A: float
    w: list[float]
    whole: list[float]

    @property
    def r(self) -> list[float]:
        return ratios(self.pi, self.old)

    @property
    def s(self) -> float:
        return math.exp(sum(p - o for p, o in zip(self.pi, self.old, strict=True)) / len(self.pi))


def ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    return [math.exp(a - b) for a, b in zip(numerator, denominator, strict=True)]


def tokens_of(batch: Batch, b: int) -> tuple[list[float], list[float], list[float]]:
    pi, old, mu = (x[b][batch.mask[b]].tolist() for x in (batch.pi, batch.old, batch.mu))
    return pi, old, mu


# ---- bounds, by hand -----------------------------------------------------------------------------------------------

Stops = Callable[[Response], list[tuple[bool, bool]]]
"""Of each token, whether the upper and whether the lower bound binds."""


def ratio_stops(eps_low: float, eps_high: float) -> Stops:
    return lambda x: [(x.A > 0 and r > 1 + eps_high, x.A < 0 and r < 1 - eps_low) for r in x.r]


def dual_stops(eps_low: float, eps_high: float, c: float) -> Stops:
    return lambda x: [(x.A > 0 and r > 1 + eps_high, x.A < 0 and (r < 1 - eps_low or r > c)) for r in x.r]


def unsigned_stops(eps_low: float, eps_high: float) -> Stops:
    return lambda x: [(r > 1 + eps_high, r < 1 - eps_low) for r in x.r]


def divergence_stops(far: Callable[[Response, float], list[bool]], eps_low: float, eps_high: float) -> Stops:
    """A divergence mask: stopped where A pushes pi farther from mu, and it is `far` by the width of that direction."""

    def stops(x: Response) -> list[tuple[bool, bool]]:
        up, down = far(x, eps_high), far(x, eps_low)
        return [
            (x.A > 0 and p > m and u, x.A < 0 and p < m and d) for p, m, u, d in zip(x.pi, x.mu, up, down, strict=True)
        ]

    return stops


def tv_far(x: Response, eps: float) -> list[bool]:
    return [abs(math.exp(p) - math.exp(m)) > eps for p, m in zip(x.pi, x.mu, strict=True)]


def kl_far(x: Response, eps: float) -> list[bool]:
    def kl(p: float, q: float) -> float:
        # A certain token's rest is one unit of float64's resolution, not 0.
        rest_p, rest_q = max(-math.expm1(p), 2.0**-52), max(-math.expm1(q), 2.0**-52)
        return math.exp(p) * (p - q) + rest_p * math.log(rest_p / rest_q)

    return [kl(m, p) > eps for p, m in zip(x.pi, x.mu, strict=True)]


def cppo_far(delta_b: float, w_min: float) -> Callable[[Response, float], list[bool]]:
    """CPPO's Algorithm 1, as it is printed: token after token, with running sums S and W."""

    def far(x: Response, eps: float) -> list[bool]:
        T, S, W, result = len(x.pi), 0.0, 0.0, []
        for t in range(1, T + 1):
            w = 1 - (1 - w_min) / (T - 1) * (t - 1) if T > 1 else 1.0
            Z = w * abs(math.exp(x.pi[t - 1]) - math.exp(x.mu[t - 1]))
            c = min(eps, eps + delta_b * W - S)
            result.append(c < Z)
            S, W = S + Z, W + w
        return result

    return far


def stopped_whole(stops: Stops) -> Callable[[Response], list[float]]:
    """d term / d log pi of a region that stops: whole weight times A, and 0 where a bound binds."""
    return lambda x: [0.0 if high or low else w * x.A for w, (high, low) in zip(x.whole, stops(x), strict=True)]


def bounded_weight(eps_low: float, eps_high: float) -> Callable[[Response], list[float]]:
    return lambda x: [w * min(max(r, 1 - eps_low), 1 + eps_high) * x.A for w, r in zip(x.w, x.r, strict=True)]


# ---- the shelf: soft gates, kernels, prefixes ------------------------------------------------------------------------


def sqrt_stops(eps_low: float, eps_high: float, c: float, prefix: bool) -> Stops:
    """Bounds exp(width sqrt t) on the token's ratio, or on the product of those up to it."""

    def stops(x: Response) -> list[tuple[bool, bool]]:
        result = []
        for t, r in enumerate(prefix_ratios(x) if prefix else x.r):
            root = math.sqrt(t + 1)
            below = r < math.exp(-eps_low * root) or r > math.exp(c * root)
            result.append((x.A > 0 and r > math.exp(eps_high * root), x.A < 0 and below))
        return result

    return stops


def prefix_ratios(x: Response) -> list[float]:
    return [math.prod(x.r[: t + 1]) for t in range(len(x.r))]


def masking_stops(eps_low: float, eps_high: float, delta: float) -> Stops:
    """PPO's bounds, and all of a response with A < 0 whose mean log(mu/pi) exceeds delta."""

    def stops(x: Response) -> list[tuple[bool, bool]]:
        far = x.A < 0 and sum(m - p for m, p in zip(x.mu, x.pi, strict=True)) / len(x.pi) > delta
        return [(high, low or far) for high, low in ratio_stops(eps_low, eps_high)(x)]

    return stops


def geometric_stops(eps_low: float, eps_high: float) -> Stops:
    return lambda x: [(x.A > 0 and r > math.exp(eps_high), x.A < 0 and r < math.exp(-eps_low)) for r in x.r]


def geometric_slope(eps_low: float, eps_high: float) -> Callable[[Response], list[float]]:
    """Of sum_t w_t A exp(mean of the clipped log-ratios): every unstopped token moves the mean by 1/|y|."""

    def slope(x: Response) -> list[float]:
        stops = geometric_stops(eps_low, eps_high)(x)
        logs = [
            eps_high if high else -eps_low if low else math.log(r) for r, (high, low) in zip(x.r, stops, strict=True)
        ]
        whole = sum(x.w) * x.A * math.exp(sum(logs) / len(logs)) / len(logs)
        return [0.0 if high or low else whole for high, low in stops]

    return slope


def gated(tau_pos: float, tau_neg: float) -> Callable[[Response], list[float]]:
    """SAPO: w A r times the derivative of (4/tau) sigmoid(tau (r - 1))."""

    def slope(x: Response) -> list[float]:
        tau = tau_pos if x.A > 0 else tau_neg

        def gate(r: float) -> float:
            e = math.exp(-abs(tau * (r - 1)))
            return 4 * e / (1 + e) ** 2

        return [w * r * gate(r) * x.A for w, r in zip(x.w, x.r, strict=True)]

    return slope


def kernelled(k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Callable[[Response], list[float]]:
    """VESPO: w A W^k exp(lambda (1 - W)), W the product of pi/mu."""

    def slope(x: Response) -> list[float]:
        k, decay = (k_pos, lambda_pos) if x.A >= 0 else (k_neg, lambda_neg)
        log_W = math.fsum(p - m for p, m in zip(x.pi, x.mu, strict=True))
        W = math.exp(log_W) if log_W < 700 else math.inf
        phi = 0.0 if math.inf == W else math.exp(k * log_W + decay * (1 - W))
        return [w * phi * x.A for w in x.w]

    return slope
