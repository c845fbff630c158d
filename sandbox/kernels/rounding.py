"""The rounding of an engine inside a forward pass, as plain data that any set of kernels can apply.

sandbox/engines/rounded.py applies it with torch's operators, sandbox/kernels/compiled in a whole pass; the bits agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["bf16", "fp16", "fp8_e4m3", "int8"]
Scale = Literal["unit", "tensor", "token", "block"]


@dataclass(frozen=True)
class RoundingStep:
    """One rounding of rows to `format` and back (sandbox/engines/formats.py).

    `scale`: the numbers that share a scale: none (`unit`: no scale), all rows (`tensor`), one row (`token`), or
    `block_size` consecutive numbers of a row (`block`).
    """

    format: Format
    scale: Scale = "unit"
    block_size: int = 0

    def __post_init__(self) -> None:
        assert (self.scale == "block") == (self.block_size > 0), f"{self.scale} of {self.block_size}"
        is_scaled = self.scale != "unit"
        # FP8 goes with and without a scale; INT8 needs one (its steps of 1 are too coarse), bf16 and fp16 have none.
        assert self.format == "fp8_e4m3" or is_scaled == (self.format == "int8"), f"{self.format} per {self.scale}"


@dataclass(frozen=True)
class Rounding:
    """The rounding steps of one pass, applied in order at each place.

    inputs, other_inputs: of the large matrix products (`LARGE_PRODUCTS`), and of the others.
    outputs: of the large products. kv: keys (rotated) and values; a row is one head's.
    asks_router: whether the hook `router_logits` is called between the router's product and the choice of experts.
    """

    inputs: tuple[RoundingStep, ...] = ()
    other_inputs: tuple[RoundingStep, ...] = ()
    outputs: tuple[RoundingStep, ...] = ()
    kv: tuple[RoundingStep, ...] = ()
    asks_router: bool = False

    def then(self, other: Rounding) -> Rounding:
        """These steps, followed by those of `other`."""
        return Rounding(
            self.inputs + other.inputs,
            self.other_inputs + other.other_inputs,
            self.outputs + other.outputs,
            self.kv + other.kv,
            self.asks_router or other.asks_router,
        )
