"""`firstorder configs`: the configs that come with the project, by the names that every command accepts."""

from __future__ import annotations

from typing import Annotated

import typer


def configs(
    under: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="List only the configs in this folder, such as demo.")
    ] = None,
) -> None:
    """List the configs that come with firstorder; their names can be used wherever a command takes a CONFIG.

    \b
    Examples:
      firstorder configs
      firstorder configs demo
      firstorder train demo/r3
    """
    from lab.config.shipped import FOLDER, names, words
    from lab.strict import ConfigError

    found = [name for name in names() if under is None or name.startswith(f"{under.rstrip('/')}/")]
    if not found:
        folders = sorted({name.rpartition("/")[0] for name in names()} - {""})
        raise ConfigError(f"FOLDER: expected one of {', '.join(folders)}, got {under}")
    width = max(map(len, found))
    typer.echo("\n".join(f"{name:<{width}}  {words(name)}" for name in found))
    typer.echo(f"\nThe files: {FOLDER}")
