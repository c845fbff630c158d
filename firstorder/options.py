"""Checks of options that several commands share."""

from __future__ import annotations

from pathlib import Path


def require_folder_of(option: str, file: Path | None) -> None:
    """ConfigError, naming the option, where a file would be written into a folder that does not exist."""
    from lab.strict import ConfigError

    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{option}: expected a file in a folder that exists, got {file}")


__all__ = ["require_folder_of"]
