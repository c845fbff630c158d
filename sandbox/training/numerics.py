"""The training engine's own arithmetic: fp32, or bf16 products over fp32 master weights, in a fixed or varying order.

It holds in the old pass and the gradient passes, and, except for the order of summation and FP8 products, in the exact
inference engine, which is by definition the training engine's maths. Paper: R3 (arXiv 2510.11370) sec. 3.3.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from sandbox.engines.formats import amax_of_rows, round_bf16, round_fp8_e4m3
from sandbox.engines.reduction_order import ReductionOrder
from sandbox.kernels.numerics import EXACT, LARGE_PRODUCTS, Numerics, Site, compose

Precision = Literal["fp32", "bf16"]
Products = Literal["fp8_e4m3"]
"""Formats of the large products' inputs and weights, in the training passes only."""


class _Bf16(Numerics):
    """Mixed precision as in autocast: bf16 inputs and weights, float32 sums, bf16 outputs; gradients likewise.

    Norms, the residual stream, attention's own products, softmaxes, router logits and vocabulary logits stay float32
    (Megatron-core's `moe_router_dtype: fp32`), and so do the weights that the optimiser updates.
    """

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        # At every site: routers and the head take bf16 inputs and weights, too; only their outputs stay float32.
        return round_bf16(x)

    def weight(self, weight: Float[Tensor, "*shape"], site: Site) -> Float[Tensor, "*shape"]:
        return round_bf16(weight)

    def output(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        return round_bf16(x) if site in LARGE_PRODUCTS else x


class _Fp8Weights(Numerics):
    """Weights of the large products in FP8 e4m3, a scale per output of each matrix, with straight-through gradients.

    With `_Fp8Inputs` the bits of an engine with `weight_precision` and `activation_precision` at their defaults, which
    stores FP8 weights before its products round them. Weights that the optimiser updates stay float32.
    """

    def weight(self, weight: Float[Tensor, "*shape"], site: Site) -> Float[Tensor, "*shape"]:
        if site not in LARGE_PRODUCTS:
            return weight
        # Axis 1 is the inner axis of a matrix (O, D) and of experts (E, D, F) alike.
        return _straight_through(weight, round_fp8_e4m3(weight, weight.abs().amax(dim=1, keepdim=True)))


class _Fp8Inputs(Numerics):
    """Inputs of the large products in FP8 e4m3, a scale per token; gradients pass straight through."""

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        return _straight_through(x, round_fp8_e4m3(x, amax_of_rows(x))) if site in LARGE_PRODUCTS else x


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The values of `rounded` with the gradient of x (x - x is exactly 0)."""
    return rounded.detach() + (x - x.detach())


def of_precision(precision: Precision) -> Numerics:
    """The arithmetic of a precision, in a fixed order of summation: a row's bits do not depend on its batch."""
    return EXACT if precision == "fp32" else _Bf16()


def training_numerics(precision: Precision, order: ReductionOrder, products: Products | None = None) -> Numerics:
    """The arithmetic of the training engine's passes; `products` is a format that the inference engine does not share.

    With `order.units` > 1 the order of sums depends on the rows of the micro-batch (padding included), so that two
    passes over the same responses in different micro-batches differ: R3 sec. 3.3's repeated forward.
    """
    base = of_precision(precision)
    # The engine's order: FP8 weights are stored before a product rounds them to bf16, inputs are rounded after it.
    own = [base] if products is None else [_Fp8Weights(), base, _Fp8Inputs()]
    return compose([*own, order.order()])
