"""The model that engines are compared with, one module at a time: the same weights in exact arithmetic, or rounded.

Letters beyond theory/contracts.py: N rows of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.routing.record import RoutingRecord

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, eq=False)
class Routed:
    """A pass over whole sequences: the routers of every MoE layer, and log-probabilities of the next tokens, nats.

    Rows are input tokens: S_b - 1 of each sequence. `scores` are the values that a router's top-k compares, `natural`
    the experts that it chooses. Without `has_margins` the choice is more than a top-k of scores (groups of experts).
    """

    scores: dict[int, Float[Tensor, "R E"]]
    natural: dict[int, Int[Tensor, "R K"]]
    logp_R: Float[Tensor, " R"]
    has_margins: bool = True


@runtime_checkable
class ReferenceModules(Protocol):
    """A model's modules as functions of their inputs, in float32."""

    @property
    def name(self) -> str:
        """The name of the implementation, for a report."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def moe_layers(self) -> tuple[int, ...]: ...

    def embedding(self, tokens_N: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """The tokens' embeddings."""
        ...

    def norm(self, name: str, x_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The norm of this Hugging Face name, of a residual stream."""
        ...

    def attention(self, layer: int, x_ND: Float[Tensor, "N D"], lengths_B: Int[Tensor, " B"]) -> Float[Tensor, "N D"]:
        """Attention over each sequence, its output projection included; x is normalised."""
        ...

    def router_logits(self, layer: int, x_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """The router's logits; x is normalised."""
        ...

    def weights(self, layer: int, logits_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"] | None:
        """The weights of the experts that these logits choose, 0 for the others; None where unknown."""
        ...

    def mlp(
        self, layer: int, x_ND: Float[Tensor, "N D"], weights_NE: Float[Tensor, "N E"] | None
    ) -> Float[Tensor, "N D"]:
        """The MLP or the experts; `weights_NE` are the routes to take (None: those of its own router)."""
        ...

    @property
    def replays(self) -> bool:
        """Whether `routed` replays a record."""
        ...

    def routed(self, sequences: Sequence[Tensor], record: RoutingRecord | None, temperature: float = 1.0) -> Routed:
        """A pass over these tokens that replays the record's experts at every layer, where supported; `temperature`
        divides the logits of the next tokens."""
        ...

    def rounded(self, precision: Precision) -> ReferenceModules:
        """The model as an engine of that precision computes it: weights, inputs and outputs of products rounded."""
        ...


def hand_on(x: Tensor, precision: Precision) -> Tensor:
    """x rounded to the dtype that modules of that precision pass on, as float32; bf16 for fp8."""
    kind = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    return x.to(kind).float()
