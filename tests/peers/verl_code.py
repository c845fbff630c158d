"""verl's own modules, imported without what else they import: ray and the like are stubs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

IS_INSTALLED = importlib.util.find_spec("verl") is not None
needs_verl = pytest.mark.skipif(not IS_INSTALLED, reason="verl is not installed")
STUBS = ("accelerate", "codetiming", "hydra", "omegaconf", "orjson", "peft", "ray", "tensordict", "torchdata")


class Stub(ModuleType):
    """A module in which every name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class Stubs(MetaPathFinder, Loader):
    """Finds a stub for the packages in STUBS that are not installed: it is asked last."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in STUBS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Config(SimpleNamespace):
    """The part of verl's ActorConfig that a loss reads."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@contextmanager
def verl_code() -> Iterator[tuple[ModuleType, ModuleType]]:
    """core_algos and rollout_corr_helper; afterwards no stub is left for other tests to import."""
    finder = Stubs()
    sys.meta_path.append(finder)
    try:
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        core.ActorConfig = Config  # pyright: ignore[reportAttributeAccessIssue]
        yield core, helper
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, found in sys.modules.items() if isinstance(found, Stub) or name[:4] == "verl"]:
            del sys.modules[name]


__all__ = ["IS_INSTALLED", "Config", "verl_code", "needs_verl"]
