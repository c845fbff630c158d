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
    """The actor that made a stored tensor: `home` of `group`, which does not travel."""

    group: RankGroup | None
    home: int

    def __reduce__(self) -> tuple[Any, ...]:
        # Where the group is missing rows are fetched: an actor that asked the group might wait for itself.
        return Owner, (None, self.home)


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor (rows, L, X) of these layers under a name in a stored bucket."""

    reference: Any
    name: str
    owner: Any
    layer_numbers: tuple[int, ...]

    def tensor(self) -> Tensor:
        """A view of the stored tensor, mapped into this process."""
        bucket: Any = ray.get(self.reference)
        return bucket.tensor(self.name)


def columns(layers: Sequence[int], wanted: Sequence[int]) -> Int[Tensor, " L"]:
    """The places of the wanted layers among these."""
    return torch.tensor([list(layers).index(n) for n in wanted], dtype=torch.int64)


__all__ = ["Owner", "RankGroup", "Source", "columns"]
