"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Progress = Literal["bar", "lines", "none"]

SandboxConfig = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of a run with `backend: sandbox`.")]
ClusterConfig = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of a run with `backend: scaled`.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the complete config, every field explained, and stop.")
]
StudyProgress = Annotated[Progress, typer.Option(help="A live bar, lines (for logs), or nothing.")]
Draws = Annotated[int, typer.Option(min=2, max=1000, metavar="N", help="Draws of the batch per engine.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")]


def require_folder_of(option: str, file: Path | None) -> None:
    """ConfigError, naming the option, where a file would be written in place of a folder, or into one that is none."""
    from lab.strict import ConfigError

    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        expected = "a file, got the folder" if file.is_dir() else "a file in a folder that exists, got"
        raise ConfigError(f"{option}: expected {expected} {file}")
