"""The worlds that a config's `backend:` can name, each imported only when it is named."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.config.run import RunConfig

# backend: the class of its run config. `<package>.run.run` runs one.
CONFIGS = {"sandbox": ("sandbox.config", "SandboxRun"), "scaled": ("scaled.config", "ScaledRun")}


class Schemas(Mapping[str, "type[RunConfig]"]):
    """Backend name to its config class; looking one up imports its world."""

    def __getitem__(self, backend: str) -> type[RunConfig]:
        module, name = CONFIGS[backend]
        return getattr(_import(backend, module), name)

    def __iter__(self) -> Iterator[str]:
        return iter(CONFIGS)

    def __len__(self) -> int:
        return len(CONFIGS)


def runner(backend: str) -> Callable[..., Any]:
    """The function that runs a config of this backend."""
    return _import(backend, f"{backend}.run").run


def _import(backend: str, module: str) -> Any:
    """The module; ConfigError if this version of the project does not have that world yet."""
    from lab.strict import ConfigError

    # The package first: find_spec of a submodule raises where its package is missing.
    if importlib.util.find_spec(backend) is None or importlib.util.find_spec(module) is None:
        raise ConfigError(f"backend: '{backend}' is not in this version of firstorder; it has no {module}")
    return importlib.import_module(module)
