"""The form of an engine defect: one departure of an inference engine from the training engine's maths, with one dial.

A defect may change the weights as they are handed over, and may touch a forward pass where `Numerics` lets it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.config.strict import Strict
from sandbox.numerics import EXACT, Numerics


class Defect(Strict):
    """Base of all defects; each subclass has a literal `kind`, its dial, and overrides one of the two hooks."""

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """The weight as this engine keeps it; `name` is the Hugging Face name."""
        return tensor

    def numerics(self, generator: torch.Generator) -> Numerics:
        """What this defect does to one generate call, whose random draws come from `generator`."""
        return EXACT
