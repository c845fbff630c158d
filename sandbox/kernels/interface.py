"""The interface of a set of kernels; a model computes with one set."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from theory.routing.gates import Gate

THREADS_PER_CORE = 8
"""The most threads for each core: more gain nothing, and a system ends a process that starts too many."""


def check_threads(number: int) -> None:
    """ValueError for more threads than THREADS_PER_CORE allows on this machine."""
    cores = os.cpu_count() or 1
    if number > cores * THREADS_PER_CORE:
        raise ValueError(
            f"threads: expected at most {cores * THREADS_PER_CORE}, {THREADS_PER_CORE} for each of this machine's "
            f"{cores} cores, got {number}"
        )


@runtime_checkable
class Heads(Protocol):
    """The sizes and conventions of a model's attention: those of its `ModelConfig`."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def qk_norm(self) -> Literal["head", "projection", "none"]: ...

    @property
    def norm_eps(self) -> float: ...


class AttentionWeights(NamedTuple):
    """The weights of a layer up to its MLP, each as its parameter; None where a model has none."""

    norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    router: Tensor | None


@dataclass(frozen=True)
class Kernels:
    """A set of kernels; the eager kernels document each field.

    key_mask: the argument of `attention` for the number of key slots that each query sees, from (num_seen_BS,
    num_slots, dtype).
    gate: the gate convention, computed by this set.
    set_threads: sets the number of threads that the process may compute with, torch's included (`check_threads`).
    attention_layer: a layer up to its MLP in one operator (sandbox/kernels/compiled/attention_layer.py); returns None
    where the set has no such operator for a model's sizes.
    has_passes: whether a model runs whole passes without gradients in one call (sandbox/model/compiled_passes.py).
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
    attention_layer: Callable[..., tuple[Tensor, Tensor, Tensor] | None] = lambda *arguments: None
    has_passes: bool = False
