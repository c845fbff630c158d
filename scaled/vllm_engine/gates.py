"""Router inputs and logits as vLLM's own gates compute them, written into static buffers inside their forward.

The buffers never move, so that a captured CUDA graph writes into the same memory on every replay.

Extra letters: N rows of one engine step.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

GATE = re.compile(r"layers\.(\d+)\.mlp\.gate$")


class _RecordingGate:
    """Mixin for a gate's class: runs the gate, and copies its input and output."""

    recorder: GateRecorder
    column: int

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)  # type: ignore[misc]
        # vLLM's linear layers return (output, bias).
        self.recorder.write(self.column, x, out[0] if isinstance(out, tuple) else out)
        return out


class GateRecorder:
    """The last step's router inputs (in the engine's type) and logits (fp32) at every MoE layer."""

    def __init__(
        self, model: nn.Module, num_rows: int, hidden_size: int, num_experts: int, dtype: torch.dtype, device: Any
    ):
        found = {int(m[1]): gate for name, gate in model.named_modules() if (m := GATE.search(name))}
        self.layer_numbers = tuple(sorted(found))
        self._gates = [found[n] for n in self.layer_numbers]
        self._classes = [type(gate) for gate in self._gates]
        L = len(self._gates)
        self.hidden_LND = torch.zeros(L, num_rows, hidden_size, dtype=dtype, device=device)
        self.logits_LNE = torch.zeros(L, num_rows, num_experts, dtype=torch.float32, device=device)

    def write(self, column: int, hidden_ND: Float[Tensor, "N D"], logits_NE: Float[Tensor, "N E"]) -> None:
        """Copies one gate's forward pass into the buffers."""
        self.hidden_LND[column, : len(hidden_ND)].copy_(hidden_ND)
        self.logits_LNE[column, : len(logits_NE)].copy_(logits_NE)

    def install(self) -> None:
        """Lets the gates write."""
        for column, (gate, kind) in enumerate(zip(self._gates, self._classes, strict=True)):
            gate.recorder, gate.column = self, column  # type: ignore[assignment]
            gate.__class__ = type(f"Recording{kind.__name__}", (_RecordingGate, kind), {})  # type: ignore[assignment]

    def remove(self) -> None:
        """Gives the gates their own classes back."""
        for gate, kind in zip(self._gates, self._classes, strict=True):
            gate.__class__ = kind
