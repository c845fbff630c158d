"""The `torch` that Megatron's modules see where there is no CUDA: torch, but for what a shim has put before it.

torch itself is not changed, but for tensor methods during single calls and in one thread, so that other code in the
process sees the torch that it knows. `cpu_shims` says what is put, and why.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch


class _Facade(ModuleType):
    """A module that answers from its own attributes first and from `behind` for all others."""

    def __init__(self, behind: ModuleType) -> None:
        super().__init__(behind.__name__)
        self.__dict__["_behind"] = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_behind"], name)


CUDA = _Facade(torch.cuda)
TORCH = _Facade(torch)
TORCH.__dict__["cuda"] = CUDA

# Held while a method is replaced, so that no other thread saves the replacement as the real one.
_patching = threading.RLock()


@contextlib.contextmanager
def method_as(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """A context in which a tensor method is `replacement(real method, tensor, ...)`, in this thread only."""
    with _patching:
        real, owner = getattr(torch.Tensor, name), threading.get_ident()

        def method(*args: Any, **kwargs: Any) -> Any:
            mine = threading.get_ident() == owner
            return replacement(real, *args, **kwargs) if mine else real(*args, **kwargs)

        setattr(torch.Tensor, name, method)
        try:
            yield
        finally:
            setattr(torch.Tensor, name, real)


def call_with(method: str, replacement: Callable[..., Any], owner: Any, name: str) -> None:
    """Replaces a tensor method, as `method_as` does, during each call of the function `name` of `owner`."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with method_as(method, replacement):
            return function(*args, **kwargs)

    setattr(owner, name, call)


def give() -> None:
    """Puts `TORCH` into the modules of Megatron that have been imported since the last call."""
    # Only modules that hold torch itself: others are done already, or do not use it.
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = TORCH


__all__ = ["CUDA", "TORCH", "call_with", "give", "method_as"]
