"""A GPU that is not there, for what Megatron-core moves between GPU and host memory: its own code, by copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


class PretendedGpu:
    """The memory of a machine in two halves: what was moved to the host, and the GPU's, which is all the rest.

    Where there is a GPU, it is that one.
    """

    def __init__(self) -> None:
        self._is_real = torch.cuda.is_available()
        # By address; kept, as no other tensor may come to lie there.
        self._host: dict[int, Tensor] = {}

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on the GPU."""
        return tensor.is_cuda if self._is_real else tensor.data_ptr() not in self._host

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside the block torch has the GPU, and `cpu` and `cuda` copy a tensor into the other half."""
        if self._is_real:
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "synchronize", lambda: None)
            patch.setattr(torch.Tensor, "is_cuda", property(self.has))
            patch.setattr(torch.Tensor, "cpu", lambda tensor: self._to_host(tensor))
            patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor.clone())
            yield

    def _to_host(self, tensor: Tensor) -> Tensor:
        moved = tensor.clone()
        self._host[moved.data_ptr()] = moved
        return moved


__all__ = ["PretendedGpu"]
