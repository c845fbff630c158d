"""What a model computes with: one set of kernels, chosen when the model is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sandbox.kernels.numerics import Numerics
from theory.routing.gates import Gate


@runtime_checkable
class Passes(Protocol):
    """Whole forward passes without gradients, in the bits of the operators one by one, while weights do not change.

    `numerics` are such as state their `rounding()`; hooks that it does not cover are not met.
    """

    def forward(self, x_BSD: Tensor, positions_BS: Tensor, routing: Any, cache: Any, numerics: Numerics) -> Tensor:
        """All layers and the last norm on embedded tokens, (B, S, D), which are used up: `MoE.forward_hidden`."""
        ...

    def logits(self, hidden_ND: Tensor, numerics: Numerics) -> Tensor:
        """Next-token logits of these rows, (N, V), before the hook `logits`."""
        ...


@dataclass(frozen=True)
class Kernels:
    """A set of kernels; each field is documented where the eager one is defined.

    key_mask: how `attention` is told how many of the key slots each query sees: (num_seen_BS, num_slots, dtype).
    gate: the gate convention, as it is computed here.
    set_threads: how many threads the process may compute with, torch's included.
    self_attention: what stands between the product of queries, keys and values and that of the heads, in one operator;
    gives None where the set has none for a model's sizes.
    passes: makes `Passes` of a model, or None where it has none for its sizes.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor]
    key_mask: Callable[..., Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    grouped_experts: Callable[..., Tensor]
    gate: Callable[[Gate], Gate]
    set_threads: Callable[[int], None]
    self_attention: Callable[..., Tensor | None] = lambda *arguments: None
    passes: Callable[[Any], Passes | None] | None = None
