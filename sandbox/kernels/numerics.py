"""Hooks in a forward pass at which an engine's arithmetic may depart from the exact one; by default it does not.

A defect overrides hooks of `Numerics`; `compose` chains several. `EXACT` costs one call per site and keeps all bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Literal, final

from jaxtyping import Float
from torch import Tensor

from sandbox.kernels.rounding import Rounding

Site = Literal["qkv", "o", "router", "gate_up", "down", "shared_gate", "head"]
"""The matrix products of a decoder: `gate_up` and `down` are those of experts, shared experts and dense layers alike.
An engine that quantises its large matrices touches `qkv`, `o`, `gate_up` and `down` and leaves the other three."""

LARGE_PRODUCTS: tuple[Site, ...] = ("qkv", "o", "gate_up", "down")

Part = Callable[[int, int], Tensor]
"""part(start, stop): the sum of a matrix product over the inner indices start, ..., stop - 1 alone."""


class Numerics:
    """The hooks of one forward pass. Rows are tokens (for `down` of experts: token-expert pairs and padding).

    A hook must keep shape and dtype. Gradients flow through it; defects run without gradients.
    """

    def activation(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        """The input of the matrix product at `site`, as the engine's matrix unit sees it."""
        return x

    def weight(self, weight: Float[Tensor, "*shape"], site: Site) -> Float[Tensor, "*shape"]:
        """The weight of the matrix product at `site` (of all experts at once), as the matrix unit sees it."""
        return weight

    def product(self, part: Part, width: int, num_rows: int, site: Site) -> Float[Tensor, "*rows O"]:
        """The matrix product at `site` from its parts: an inner axis of `width`, a batch of `num_rows` tokens."""
        return part(0, width)

    def output(self, x: Float[Tensor, "*rows D"], site: Site) -> Float[Tensor, "*rows D"]:
        """The output of the matrix product at `site`, as the engine stores it."""
        return x

    def kv(self, k_BSHd: Float[Tensor, "B S H d"], v_BSHd: Float[Tensor, "B S H d"]) -> tuple[Tensor, Tensor]:
        """Keys (after normalisation and rotation) and values, as the engine caches them."""
        return k_BSHd, v_BSHd

    def router_logits(self, layer_number: int, logits_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
        """The router logits of decoder layer `layer_number`, as the engine's top-k sees them."""
        return logits_NE

    def router_noise(self, num_layers: int, num_rows: int, num_experts: int) -> Float[Tensor, "L N E"] | None:
        """The float32 numbers that `router_logits` adds in the MoE layers of one pass, from the same draws.

        None, without a draw, where it must be called, as it is by default. With them a whole pass stops at no layer.
        """
        return None

    def logits(self, logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """The next-token logits, as the engine's sampler sees them."""
        return logits_NV

    def rounding(self) -> Rounding | None:
        """The effect of all hooks but `logits`, as data from which a pass can be computed without calling them.

        None if a hook does more than `Rounding` can express: such a pass must call its hooks. A class that overrides a
        hook but not this method gets None too; only `router_logits` can be called inside a whole pass.
        """
        hooks = ("activation", "weight", "product", "output", "kv")
        if any(getattr(type(self), hook) is not getattr(Numerics, hook) for hook in hooks):
            return None
        return Rounding(asks_router=type(self).router_logits is not Numerics.router_logits)


@final
class _Chain(Numerics):
    def __init__(self, parts: Sequence[Numerics]):
        self.parts = tuple(parts)
        # Computed once: every pass reads it, and a decoding step is short.
        self._rounding = _in_order([part.rounding() for part in self.parts])

    def rounding(self) -> Rounding | None:
        return self._rounding

    def activation(self, x: Tensor, site: Site) -> Tensor:
        for part in self.parts:
            x = part.activation(x, site)
        return x

    def weight(self, weight: Tensor, site: Site) -> Tensor:
        for part in self.parts:
            weight = part.weight(weight, site)
        return weight

    def product(self, part: Part, width: int, num_rows: int, site: Site) -> Tensor:
        # Nested: the last numerics splits the whole axis, and earlier ones sum each of its pieces.
        for numerics in self.parts:
            part = partial(_within, numerics, part, num_rows, site)
        return part(0, width)

    def output(self, x: Tensor, site: Site) -> Tensor:
        for part in self.parts:
            x = part.output(x, site)
        return x

    def kv(self, k_BSHd: Tensor, v_BSHd: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.parts:
            k_BSHd, v_BSHd = part.kv(k_BSHd, v_BSHd)
        return k_BSHd, v_BSHd

    def router_logits(self, layer_number: int, logits_NE: Tensor) -> Tensor:
        for part in self.parts:
            logits_NE = part.router_logits(layer_number, logits_NE)
        return logits_NE

    def router_noise(self, num_layers: int, num_rows: int, num_experts: int) -> Tensor | None:
        asked = [part for part in self.parts if type(part).router_logits is not Numerics.router_logits]
        # The sum of several is another number than each added after the other.
        return asked[0].router_noise(num_layers, num_rows, num_experts) if len(asked) == 1 else None

    def logits(self, logits_NV: Tensor) -> Tensor:
        for part in self.parts:
            logits_NV = part.logits(logits_NV)
        return logits_NV


def _in_order(parts: Sequence[Rounding | None]) -> Rounding | None:
    known = [part for part in parts if part is not None]
    return reduce(Rounding.then, known, Rounding()) if len(known) == len(parts) else None


def _within(numerics: Numerics, part: Part, num_rows: int, site: Site, start: int, stop: int) -> Tensor:
    """The part from start to stop, summed as these numerics would sum a whole product of that width."""
    return numerics.product(lambda a, b: part(start + a, start + b), stop - start, num_rows, site)


EXACT = Numerics()
"""The training engine's own arithmetic."""


def compose(parts: Sequence[Numerics]) -> Numerics:
    """Numerics that apply all of `parts`, in order, at every hook; `EXACT` among them adds nothing."""
    # By identity: products test `is EXACT` to skip all hooks, so without other parts EXACT itself must come back.
    parts = [part for part in parts if part is not EXACT]
    if not parts:
        return EXACT
    return parts[0] if len(parts) == 1 else _Chain(parts)
