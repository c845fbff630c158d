"""The worlds that a config's `backend:` can name, each imported only when it is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lab.config.run import RunConfig
    from sandbox.config import SandboxRun
    from scaled.config import ScaledRun

Run = TypeVar("Run", bound="RunConfig")

# backend: the class of its run config. `<package>.run.run` runs one.
CONFIGS = {"sandbox": ("sandbox.config", "SandboxRun"), "scaled": ("scaled.config", "ScaledRun")}


class Schemas(Mapping[str, "type[RunConfig]"]):
    """Backend name to its config class; looking one up imports its world."""

    def __getitem__(self, backend: str) -> type[RunConfig]:
        # A KeyError for an unknown name is what `load` relies on: `in` of a Mapping is this look-up.
        module, name = CONFIGS[backend]
        return getattr(importlib.import_module(module), name)

    def __iter__(self) -> Iterator[str]:
        return iter(CONFIGS)

    def __len__(self) -> int:
        return len(CONFIGS)


def sandbox_run(path: str | Path, overrides: Sequence[str] = ()) -> SandboxRun:
    """The config of the sandbox in the file, with these overrides; ConfigError where it is of another world."""
    from sandbox.config import SandboxRun

    return _load_as(SandboxRun, "the sandbox", path, overrides)


def cluster_run(path: str | Path, overrides: Sequence[str] = ()) -> ScaledRun:
    """The same for a config of the cluster."""
    from scaled.config import ScaledRun

    return _load_as(ScaledRun, "the cluster (scaled)", path, overrides)


def _load_as(kind: type[Run], title: str, path: str | Path, overrides: Sequence[str]) -> Run:
    from lab.config.load import load
    from lab.strict import ConfigError

    config = load(path, overrides, Schemas())
    if not isinstance(config, kind):
        raise ConfigError(f"{path}: backend: expected a config of {title}, got {config.backend}")
    return config


def runner(backend: str) -> Callable[..., Any]:
    """The function that runs a config of this backend."""
    return importlib.import_module(f"{backend}.run").run
