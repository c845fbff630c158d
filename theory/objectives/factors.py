"""Weights and ratios by value and by logarithm, so that no product is lost to overflow, and none is nan.

Two conventions where an equation gives no number: a ratio with numerator 0 is 0, also over 0, and a product with a
factor 0 is 0, also times infinity. A nan stays nan and stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_MOST_TERMS = 2.0**24
"""The number of log-ratios of a response whose sum stays finite however large they are."""
LARGEST = 700.0
"""An exponent, nats, up to which the exponential is finite in float64."""


def wide(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The same numbers in float32 where they are in 16 bits, else as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def log_ratio(logp_a_BT: Float[Tensor, "*BT"], logp_b_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """log(a/b), nats; -inf where a is 0, also where b is 0 too; differentiable in a, with gradient 1.

    log(1/0) is finite and so large that its exponential is inf: sums of log-ratios have no inf - inf.
    """
    lowest = torch.finfo(logp_b_BT.dtype).min / _MOST_TERMS
    # Only the denominator is held: log 0 of the numerator stays -inf, also over a denominator of 0.
    return logp_a_BT - logp_b_BT.clamp(min=lowest)


def times(a_BT: Float[Tensor, "*BT"], b_BT: Float[Tensor, "*#BT"]) -> Float[Tensor, "*BT"]:
    """a b, and 0 where one is 0 and the other infinite; a constant."""
    product_BT = a_BT * b_BT
    is_zero_times_inf_BT = product_BT.isnan() & ~a_BT.isnan() & ~b_BT.isnan()
    return torch.where(is_zero_times_inf_BT, 0.0, product_BT)


@dataclass(frozen=True)
class Factor:
    """A constant >= 0 per token, with its logarithm, which stays right where the value underflows or overflows."""

    value_BT: Float[Tensor, "*BT"]
    log_BT: Float[Tensor, "*BT"]

    @staticmethod
    def exp(log_BT: Float[Tensor, "*BT"]) -> Factor:
        """The factor with this logarithm."""
        log_BT = log_BT.detach()
        return Factor(log_BT.exp(), log_BT)

    def __mul__(self, other: Factor) -> Factor:
        # Never nan from numbers: a logarithm is finite or -inf, as `log_ratio` holds log(1/0) finite.
        log_BT = self.log_BT + other.log_BT
        # By values where both have all of their digits: exp(log) would round once more.
        is_plain_BT = self.is_plain & other.is_plain
        return Factor(torch.where(is_plain_BT, self.value_BT * other.value_BT, log_BT.exp()), log_BT)

    def clamp(self, low: float, high: float) -> Factor:
        """The factor within [low, high]."""
        # By torch, in the factor's type: its log 0 is -inf, where math.log raises.
        bounds = torch.tensor([low, high], dtype=self.log_BT.dtype, device=self.log_BT.device).log()
        return Factor(self.value_BT.clamp(low, high), self.log_BT.clamp(bounds[0], bounds[1]))

    @property
    def is_plain(self) -> Tensor:
        """True where the value has all of its digits: neither 0 nor subnormal, nor inf."""
        info = torch.finfo(self.value_BT.dtype)
        return (self.value_BT >= info.tiny) & (self.value_BT <= info.max)


def scaled_exp(weight: Factor, log_ratio_BT: Float[Tensor, "*BT"], scale_BT: Float[Tensor, "*#BT"]) -> Tensor:
    """w exp(x) c, differentiable in x with itself as gradient; c is not 0. Where w or exp(x) is too large or too small
    for a float, though the product may not be, the logarithms are added instead."""
    is_plain_BT = weight.is_plain & Factor.exp(log_ratio_BT).is_plain
    # Each branch gets 0 where it is not taken, before its exponential: an inf there would be a nan in the gradient.
    ratio_BT = torch.where(is_plain_BT, log_ratio_BT, 0.0).exp()
    whole_BT = torch.where(is_plain_BT, 0.0, weight.log_BT + log_ratio_BT).exp()
    plain_BT = torch.where(is_plain_BT, weight.value_BT, 1.0) * (ratio_BT * scale_BT)
    return torch.where(is_plain_BT, plain_BT, whole_BT * scale_BT)


def pick(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers, in the type of `like`: torch.where of two floats would round them to the default type."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


LEAST = -1e30
"""A logarithm below this is that of 0, also beside an infinite factor: log(1/0) is about 2e31 in float32."""


def or_zero(log_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """The logarithm, and -inf where it is below LEAST: too small for any float, so that it makes a product 0."""
    return torch.where(log_BT < LEAST, -torch.inf, log_BT)


class _Sloped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value_BT: Tensor, slope_BT: Tensor, x_BT: Tensor) -> Tensor:
        return value_BT.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[None, None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, times(grad_BT, ctx.saved_tensors[0])


def sloped(
    value_BT: Float[Tensor, "*BT"], slope_BT: Float[Tensor, "*BT"], x_BT: Float[Tensor, "*BT"]
) -> Float[Tensor, "*BT"]:
    """The value with this derivative in x, both constants: for gradients that autograd would lose to overflow."""
    # Not value + slope (x - sg[x]), which is nan where x or the slope is infinite.
    return _Sloped.apply(value_BT.detach(), slope_BT.detach(), x_BT)


def linear(coefficient_BT: Float[Tensor, "*BT"], x_BT: Float[Tensor, "*BT"]) -> Float[Tensor, "*BT"]:
    """c x with the gradient c in x, for a constant c: 0 log 0 is 0, and an infinite value may have a finite c."""
    # Plain c * x is nan in value for 0 * -inf, and in the gradient where a gradient of 0 meets an infinite c.
    return sloped(times(coefficient_BT, x_BT.detach()), coefficient_BT, x_BT)
