"""The interface of kernels: a model computes with one set, chosen when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from theory.routing.gates import Gate


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


@dataclass(frozen=True)
class Kernels:
    """A set of kernels; each field is documented where the eager one is defined.

    key_mask: how `attention` is told how many of the key slots each query sees: (num_seen_BS, num_slots, dtype).
    gate: the gate convention, as it is computed here.
    set_threads: how many threads the process may compute with, torch's included.
    self_attention: what stands between the product of queries, keys and values and that of the heads, in one operator;
    gives None where the set has none for a model's sizes.
    has_passes: whether a model takes whole passes without gradients in one call (sandbox/model/compiled_passes.py).
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
    has_passes: bool = False
