"""The decoder's interface to a routing: the experts of each token, layer by layer.

Letters beyond theory/contracts.py: N = B S rows of a flattened batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from theory.routing.gates import Gate


@runtime_checkable
class Routing(Protocol):
    """The choice of experts in a forward pass: NaturalRouting, or a ReplayContext that replays and records."""

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        """Expert ids, ascending in each row, and their weights; rows are the flattened batch, padding included."""
        ...


class NaturalRecorder(Routing):
    """A routing that leaves the choice of experts to the router and only records it.

    A whole pass chooses experts itself and hands over several layers in one call, without a stop at each layer. Not a
    protocol: every decoding step asks whether its routing is one, and of a protocol that takes 20 microseconds.
    """

    keep_features: bool

    @abstractmethod
    def take(
        self,
        experts_LNK: Int[Tensor, "L N K"],
        hidden_LND: Float[Tensor, "L N D"] | None,
        logits_LNE: Float[Tensor, "L N E"] | None,
    ) -> None:
        """Records the natural experts of consecutive layers; router inputs and logits are given if `keep_features`."""
        ...
