"""The command that installs what only a part of the commands needs."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, in the checkout: no package index has this project."""
    return f"pip install -e '.[{extra}]' in the checkout"


__all__ = ["how_to_install"]
