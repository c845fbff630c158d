"""Numerics that apply a `Rounding` with torch's operators: the hooks of the precision defects."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor

from sandbox.engines.formats import (
    amax_of_blocks,
    amax_of_rows,
    amax_of_tensor,
    round_bf16,
    round_fp8_saturating,
    round_fp16,
    round_scaled,
)
from sandbox.kernels.numerics import LARGE_PRODUCTS, Numerics, Site
from sandbox.kernels.rounding import Rounding, RoundingStep


@final
class Rounded(Numerics):
    """Applies the steps of its `Rounding` at every hook."""

    def __init__(self, steps: Rounding):
        assert not steps.asks_router, "rounding does not touch router logits"
        self.steps = steps

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        return rounded(x, self.steps.inputs if site in LARGE_PRODUCTS else self.steps.other_inputs)

    def output(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        return rounded(x, self.steps.outputs) if site in LARGE_PRODUCTS else x

    def kv(self, k_BSHd: Float[Tensor, "B S H d"], v_BSHd: Float[Tensor, "B S H d"]) -> tuple[Tensor, Tensor]:
        return rounded(k_BSHd, self.steps.kv), rounded(v_BSHd, self.steps.kv)

    def rounding(self) -> Rounding | None:
        """The steps, if each row is rounded by itself and no step can raise.

        None with a scale per tensor, which depends on the batch, and with fp16, whose hook raises on overflow.
        """
        steps = self.steps
        every = steps.inputs + steps.other_inputs + steps.outputs + steps.kv
        is_by_row = all(step.scale != "tensor" and step.format != "fp16" for step in every)
        return steps if is_by_row and type(self) is Rounded else None


def rounded(x: Float[Tensor, "*rows D"], steps: tuple[RoundingStep, ...]) -> Float[Tensor, "*rows D"]:
    """x after these steps; x itself if there are none."""
    for step in steps:
        x = _rounded(x, step)
    return x


def _rounded(x: Tensor, step: RoundingStep) -> Tensor:
    if step.format == "bf16":
        return round_bf16(x)
    if step.format == "fp16":
        return round_fp16(x)
    if step.scale == "unit":
        return round_fp8_saturating(x)
    if step.scale == "block":
        amax = amax_of_blocks(x, 1, step.block_size)
    else:
        amax = amax_of_rows(x) if step.scale == "token" else amax_of_tensor(x)
    return round_scaled(x, step.format, amax)
