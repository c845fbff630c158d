"""What one generate call gathers: the routing of every forward pass, and the tokens of responses while they grow.

Extra letter: W rows of a response's buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.routing.gates import Gate, route


class Recorder:
    """Natural routing that keeps what one forward pass did: experts, router inputs and logits by layer."""

    def __init__(self, keep_features: bool):
        self.keep_features = keep_features
        self.experts: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        experts_NK, weights_NK = route(logits_NE, num_slots, gate, selection_bias_E)
        self.experts.append(experts_NK)
        if self.keep_features:
            self.hidden.append(hidden_ND)
            self.logits.append(logits_NE)
        return experts_NK, weights_NK


@dataclass
class Buffers:
    """What is gathered for B responses while they grow; rows are input tokens, t are response positions."""

    tokens_BT: Tensor
    logp_BT: Tensor
    lengths_B: Tensor
    experts_BWLK: Tensor | None
    hidden_BWLD: Tensor | None = None
    logits_BWLE: Tensor | None = None
    has_stopped_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    def store(self, recorder: Recorder, rows: Tensor, positions: Tensor) -> None:
        """Writes the recorder's forward pass: its n-th row is input token positions[n] of response rows[n]."""
        if self.experts_BWLK is not None:
            self.experts_BWLK[rows, positions] = torch.stack(recorder.experts, 1).to(self.experts_BWLK.dtype)
        if self.hidden_BWLD is not None and self.logits_BWLE is not None:
            self.hidden_BWLD[rows, positions] = torch.stack(recorder.hidden, 1)
            self.logits_BWLE[rows, positions] = torch.stack(recorder.logits, 1)
