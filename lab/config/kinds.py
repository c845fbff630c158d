"""The kinds of config that a file can hold, so that one given to a command of another kind is named as what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lab.strict import ConfigError

KINDS = {
    "algorithm": ("a run", "train"),
    "policies": ("an audit", "audit"),
    "problems": ("a flow", "flow"),
}
"""A required key that only this kind has: the kind, and the command that takes it."""


def require_kind(raw: Mapping[str, Any], schemas: Mapping[str, type[BaseModel]], path: str | Path) -> None:
    """ConfigError where a file's mapping is of another kind than the schemas, which are all of one kind."""
    found = [key for key in KINDS if key in raw]
    fields = schemas[next(iter(schemas))].model_fields if found else {}
    wanted = [kind for key, (kind, _) in KINDS.items() if key in fields]
    # With a key of its own kind it is a config of that kind, with a key too many.
    if wanted and not any(key in fields for key in found):
        kind, command = KINDS[found[0]]
        raise ConfigError(
            f"{path}: expected the config of {wanted[0]}, got that of {kind} ({found[0]}); use firstorder {command}"
        )
