"""The tensors that stay in the object store, and the actors that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import ray
import torch
from jaxtyping import Int
from torch import Tensor


@runtime_checkable
class RankGroup(Protocol):
    """The actors that made stored tensors, by number."""

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """work(*arguments, i) of every actor i, run there."""
        ...


@dataclass(frozen=True, eq=False)
class Owner:
    """The actor that made a stored tensor: number `home` of `group`. Pickling drops the group."""

    group: RankGroup | None
    home: int

    def __reduce__(self) -> tuple[Any, ...]:
        # Without a group a process fetches the rows itself. An actor that asked the group might wait for itself.
        return Owner, (None, self.home)


@dataclass(frozen=True, eq=False)
class Source:
    """A stored tensor (rows, L, X) of these layers: its bucket's reference, and its name there."""

    reference: Any
    name: str
    owner: Any
    layer_numbers: tuple[int, ...]

    def tensor(self) -> Tensor:
        """A view of the stored tensor, mapped into this process."""
        bucket: Any = ray.get(self.reference)
        return bucket.tensor(self.name)


def columns(layers: Sequence[int], wanted: Sequence[int]) -> Int[Tensor, " L"]:
    """The place of each wanted layer among `layers`; ValueError where one is not among them."""
    return torch.tensor([list(layers).index(n) for n in wanted], dtype=torch.int64)


__all__ = ["Owner", "RankGroup", "Source", "columns"]
